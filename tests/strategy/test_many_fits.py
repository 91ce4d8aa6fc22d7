import json
from collections.abc import Callable
from pathlib import Path

import pytest

GROWTH_BYTES = 1_000_000
"""Per fit; a server's address space or one leaked agent would take several times as much."""


@pytest.mark.parametrize(
    "fits",
    [
        5,
        pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(1000)]),
        pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
def test_fits_in_one_process_leave_nothing_behind(fits: int, run_job: Callable, tmp_path: Path) -> None:
    """No descriptor, thread, child, segment or RPC state; the second fit's end is the measure, the first warms up."""
    job = run_job("many_fits.py", tmp_path, fits, timeout_s=180 + 20 * fits)
    assert job.code == 0, job.output
    assert job.left == ()
    held = json.loads((tmp_path / "held.json").read_text())
    assert len(held) == fits
    before, after = held[1], held[-1]
    for kind in ("descriptors", "threads", "tasks", "children", "segments", "stores", "rpc"):
        assert after[kind] <= before[kind], (kind, [h[kind] for h in held])
    assert after["segments"] == after["stores"] == after["rpc"] == after["children"] == 0
    growth = (after["rss"] - before["rss"]) / (fits - 2)
    assert growth < GROWTH_BYTES, [h["rss"] for h in held]
