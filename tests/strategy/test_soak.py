"""Minutes at the greatest rate: no growth, no push lost."""

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_grows_in_five_minutes_at_the_greatest_rate(run_job):
    job = run_job("soak.py", 300, timeout_s=500)
    assert job.code == 0, job.output
    assert "pushes sent" in job.output
