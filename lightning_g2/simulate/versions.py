"""Weights of the versions that somebody still needs."""

from __future__ import annotations

from torch import Tensor

from lightning_g2.server import ServerState


class HeldVersions:
    """Keeps each version's weights once, for as long as a gradient that is under way was begun on it.

    Args:
        state: the server.

    Attributes:
        most: largest number of versions kept at one time.
    """

    def __init__(self, state: ServerState) -> None:
        self.most = 0
        self._state = state
        self._held: dict[int, tuple[Tensor, int]] = {}

    def hold(self, count: int = 1) -> int:
        """Keep the current version for so many gradients; returns it."""
        version = self._state.version
        if count == 0:
            return version
        if version in self._held:
            buffer, holders = self._held[version]
        else:
            (_, buffer), holders = self._state.weights(), 0
        self._held[version] = buffer, holders + count
        self.most = max(self.most, len(self._held))
        return version

    def weights(self, version: int) -> Tensor:
        """Weights of a version that is held: one flat buffer of the server's layout, not to be written to."""
        return self._held[version][0]

    def release(self, version: int) -> None:
        """One gradient less needs a version."""
        buffer, holders = self._held.pop(version)
        if holders > 1:
            self._held[version] = buffer, holders - 1
