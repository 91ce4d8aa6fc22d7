"""A rank that is told to end leaves the job to the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LeaveJob(SystemExit):
    """This rank has left in order, and its process ends with exit code 0; the others go on."""


class Departure:
    """Whether this rank is to leave, and whether it may do so at once.

    Args:
        possible: the others can go on without this rank: it is not rank 0, and no server runs under it.
    """

    def __init__(self, *, possible: bool) -> None:
        self.possible = possible
        self.wanted = False
        self._waiting = False

    def notice(self) -> None:
        """SIGTERM has come, in the signal's handler: a rank at work goes on to the end of its window.

        Raises:
            LeaveJob: the rank only waits for others.
        """
        self.wanted = True
        if self._waiting:
            raise LeaveJob(0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, this rank waits for others and has nothing to lose.

        Raises:
            LeaveJob: it is to leave.
        """
        self._waiting = True
        try:
            if self.wanted:
                raise LeaveJob(0)
            yield
        finally:
            self._waiting = False
