"""What a rank notes of an accumulation window, so that its push can be repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_g2.values import PushNote


class WindowNotes:
    """Samples and random state of the window under way.

    Attributes:
        path: file that the server writes the pushes to.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._rng = b""
        self._samples: list[tuple[int, ...]] | None = []

    def begin_batch(self, samples: Any | None) -> None:
        """A batch is about to be trained on.

        Args:
            samples: its indices in the data set, or its index; None where the rank does not know them.
        """
        if not self._rng:
            self._rng = torch.get_rng_state().numpy().tobytes()
        if samples is None or self._samples is None:
            self._samples = None
        else:
            self._samples.append(tuple(samples) if isinstance(samples, Sequence) else (samples,))

    def take(self, optimizer: Optimizer, viewed: int) -> PushNote:
        """The note for the window's push; the next one starts anew.

        Args:
            optimizer: gives the learning rates.
            viewed: pushes that the server had taken in when the gate decided.
        """
        samples = None if self._samples is None else tuple(self._samples)
        rates = tuple(float(group.get("lr", 1.0)) for group in optimizer.param_groups)
        note = PushNote(rng=self._rng, samples=samples, rates=rates, viewed=viewed)
        self.forget()
        return note

    def forget(self) -> None:
        """The window has ended."""
        self._rng, self._samples = b"", []
