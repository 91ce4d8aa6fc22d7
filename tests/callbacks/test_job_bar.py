import re
from collections.abc import Callable


def test_both_bars_count_the_samples_of_all_ranks(run_job: Callable) -> None:
    job = run_job("bars.py", env={"COLUMNS": "160"})
    assert job.code == 0, job.output
    tqdm = re.findall(r"Epoch 1: +(\d+)%.*? (\d+)/103 \[\d+:\d+<\d+:\d+, +[\d.]+ samples/s", job.output)
    assert tqdm[-1] == ("100", "103")
    assert re.search(r"Epoch 1/1 \(samples\).* 103/103 ", job.output)
    assert job.left == ()
