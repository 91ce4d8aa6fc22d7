"""Streams of an accelerator: each batch under way has its own, so that passes of different batches may overlap."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Streams:
    """A stream for each batch under way; nothing on the CPU.

    Autograd runs the backward of an operation on the stream of its forward, so a stream for all backward passes cannot
    be had; with one for each batch, the backward pass of one and the forward pass of the next are on different ones.

    Args:
        device: where the module is.
        count: most batches under way.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._free: queue.SimpleQueue[torch.Stream] = queue.SimpleQueue()
        self._device = device
        self.used = device.type not in ("cpu", "meta")
        if self.used:
            for _ in range(count):
                self._free.put(torch.Stream(device))

    def submit(self) -> torch.Event | None:
        """Mark, on the submitter's stream, that a batch's data are ready."""
        return torch.accelerator.current_stream(self._device).record_event() if self.used else None

    def take(self, ready: torch.Event | None) -> torch.Stream | None:
        """A stream for one batch, which waits for its data."""
        if not self.used:
            return None
        stream = self._free.get()
        if ready is not None:
            stream.wait_event(ready)
        return stream

    def give(self, stream: torch.Stream | None) -> None:
        """Wait for a batch's work to be over, so that its memory may go to others, and take its stream back."""
        if stream is not None:
            stream.synchronize()
            self._free.put(stream)


@contextmanager
def on(stream: torch.Stream | None) -> Iterator[None]:
    """Issue work on a stream."""
    if stream is None:
        yield
    else:
        with stream:
            yield
