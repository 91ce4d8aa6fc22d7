"""Lets one rank of a job wait for another, so that what a test counts does not hang on who is faster."""

import time
from collections.abc import Callable

LIMIT_S = 120.0


def wait_until(true: Callable[[], bool]) -> None:
    """Wait until something is true; an error if it does not become so in far more time than a busy machine takes."""
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.002)
