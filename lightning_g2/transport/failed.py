"""An error of the server's on its way back to the rank that asked."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_g2 import errors
from lightning_g2.errors import G2Error


@dataclass(frozen=True)
class Failed:
    """An error as it travels: RPC itself would flatten its text and lose its type now and then."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """What to send of an error."""
        return cls(type(error).__name__, str(error))

    def raised(self) -> Exception:
        """The error to raise; one that is not of this package becomes a :class:`~lightning_g2.errors.G2Error`."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, G2Error):
            return kind(self.message)
        return G2Error(f"the server failed with {self.kind}: {self.message}")
