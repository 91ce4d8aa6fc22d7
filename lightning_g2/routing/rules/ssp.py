"""Stale synchronous parallel: a fast rank waits for the slowest."""

from __future__ import annotations

from lightning_g2.routing.option import require
from lightning_g2.routing.rules.none import NoneGate


class StaleSynchronousGate(NoneGate):
    """Passes every finite push, and lets a rank begin only while it leads the slowest by no more than s pushes.

    Runs on the server, which makes ranks wait. Memory: one count a rank.

    Args:
        bound: s ≥ 0; 0 is a barrier after each push.

    Raises:
        ConfigurationError: an option is out of range.

    Source:
        Q. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013.
    """

    runs_on = "server"
    simulated_only = "the server of a real run makes no rank wait between sync points"

    def __init__(self, *, bound: int = 3) -> None:
        require(bound >= 0, "bound", bound, "be ≥ 0", "0 is a barrier after each push")
        self.bound = bound

    def may_begin(self, lead: int) -> bool:
        """See :meth:`Gate.may_begin`."""
        return lead <= self.bound

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        return f"ssp (s={self.bound})"
