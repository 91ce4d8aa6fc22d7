"""Large values in pieces: one message never carries more than a limit, whatever the size of the model.

That is faster, too: RPC makes a new tensor of each message, and memory of a few megabytes comes back from the
allocator, where that of hundreds is mapped and cleared by the system each time.

A value is taken apart into its structure and its tensors; the tensors count as one long row of bytes, cut into pieces
that are sent one by one. Offsets are Python integers, hence exact beyond 2³¹ bytes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_g2.errors import ProtocolError
from lightning_g2.server import Parcel, unpack

CHUNK_BYTES = 8 << 20
"""Largest number of tensor bytes in one message."""

IN_FLIGHT = 6
"""Pieces under way at a time."""


@dataclass(frozen=True)
class Hollow:
    """A parcel whose tensors travel apart.

    Attributes:
        key: names the parcel on the side that keeps it.
        skeleton: its structure.
        forms: shape and dtype of each tensor.
    """

    key: tuple[int, int]
    skeleton: bytes
    forms: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, parcel: Parcel, key: tuple[int, int]) -> Hollow:
        """The parcel without its tensors."""
        return cls(key, parcel.skeleton, tuple((tuple(t.shape), t.dtype) for t in parcel.tensors))

    def allocate(self) -> Parcel:
        """A parcel of that form; its tensors are yet to be filled."""
        return Parcel(self.skeleton, tuple(torch.empty(shape, dtype=dtype) for shape, dtype in self.forms))


def read_piece(tensors: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """Bytes ``start`` to ``stop`` of the row of tensors, as a tensor whose storage is just that: RPC sends storages.

    Args:
        tensors: dense and contiguous; they must stay as they are until the piece has been sent.
        start: first byte.
        stop: byte after the last one.

    Returns:
        ``uint8``, shape (stop - start,); it shares memory with a tensor that it lies within, and is a copy otherwise.
    """
    offset = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.itemsize
        if offset <= start < stop <= offset + size and tensor.device.type == "cpu":
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            return torch.frombuffer(flat.numpy(), dtype=torch.uint8, count=stop - start, offset=start - offset)
        offset += size
    piece = torch.empty(stop - start, dtype=torch.uint8)
    _copy(tensors, start, piece, lambda inside, outside: outside.copy_(inside))
    return piece


def write_piece(tensors: Sequence[Tensor], start: int, piece: Tensor) -> None:
    """Copy a piece to its place in the row of tensors.

    Args:
        tensors: dense and contiguous; written to.
        start: where the piece begins.
        piece: ``uint8``, shape (bytes,).
    """
    _copy(tensors, start, piece, lambda inside, outside: inside.copy_(outside))


def pieces(size_bytes: int) -> list[tuple[int, int]]:
    """First byte, and byte after the last one, of each piece of so many bytes."""
    return [(start, min(start + CHUNK_BYTES, size_bytes)) for start in range(0, size_bytes, CHUNK_BYTES)]


def _copy(tensors: Sequence[Tensor], start: int, piece: Tensor, copy: Callable[[Tensor, Tensor], Any]) -> None:
    offset, stop = 0, start + piece.numel()
    for tensor in tensors:
        size = tensor.numel() * tensor.itemsize
        low, high = max(start, offset), min(stop, offset + size)
        if low < high:
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            copy(flat[low - offset : high - offset], piece[low - start : high - start])
        offset += size


class Room:
    """Room for values of one form that come again and again; the one before last gives its own up."""

    def __init__(self) -> None:
        self._parcels: list[Parcel] = []

    def take(self, hollow: Hollow) -> Parcel:
        """A parcel of that form; its tensors are yet to be filled."""
        forms = [tuple((tuple(t.shape), t.dtype) for t in parcel.tensors) for parcel in self._parcels]
        if any(form != hollow.forms for form in forms):
            self._parcels.clear()
        if len(self._parcels) < 2:
            self._parcels.append(hollow.allocate())
        else:
            self._parcels.reverse()
        return Parcel(hollow.skeleton, self._parcels[-1].tensors)


class Depot:
    """Parcels that are on their way in or out, on the server's side; pieces come and go in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parcels: dict[tuple[int, int], Parcel] = {}
        self._left: dict[tuple[int, int], int] = {}
        self._spare: dict[Any, Parcel] = {}  # one of each rank
        self._numbers = itertools.count()

    def lay_out(self, parcel: Parcel, rank: int) -> Hollow:
        """Keep a parcel for a rank, until it has fetched every piece."""
        with self._lock:
            key = (-1 - rank, next(self._numbers))  # keys that ranks choose begin with the rank itself
            self._parcels[key], self._left[key] = parcel, parcel.size_bytes
        return Hollow.of(parcel, key)

    def fetch(self, key: tuple[int, int], start: int, stop: int) -> Tensor:
        """A piece of a parcel that was laid out; with the last one the parcel is gone."""
        piece = read_piece(self._find(key).tensors, start, stop)
        with self._lock:
            self._left[key] -= stop - start
            if self._left[key] <= 0:
                del self._parcels[key], self._left[key]
        return piece

    def expect(self, hollow: Hollow) -> None:
        """Make room for a parcel whose pieces will come."""
        with self._lock:
            spare = self._spare.pop(self._place(hollow), None)
        parcel = hollow.allocate() if spare is None else Parcel(hollow.skeleton, spare.tensors)
        with self._lock:
            self._parcels[hollow.key] = parcel

    def take(self, key: tuple[int, int], start: int, piece: Tensor) -> None:
        """Take in a piece."""
        write_piece(self._find(key).tensors, start, piece)

    def collect(self, value: Any) -> Any:
        """The value whose pieces have all come; any other value as it is."""
        if not isinstance(value, Hollow):
            return value
        parcel = self._find(value.key)
        with self._lock:
            del self._parcels[value.key]
        return unpack(parcel)

    def borrow(self, value: Any, use: Callable[[Any], None]) -> None:
        """Collect a value for as long as it is used; the next of this form from this rank may then have its room."""
        if not isinstance(value, Hollow):
            use(value)
            return
        parcel = self._find(value.key)
        try:
            use(self.collect(value))
        finally:
            with self._lock:
                for place in [place for place in self._spare if place[0] == value.key[0]]:
                    del self._spare[place]
                self._spare[self._place(value)] = parcel

    def _place(self, hollow: Hollow) -> Any:
        return hollow.key[0], hollow.forms

    def _find(self, key: tuple[int, int]) -> Parcel:
        with self._lock:
            if key not in self._parcels:
                raise ProtocolError(f"parcel {key}: not here; its pieces were all fetched, or none was announced")
            return self._parcels[key]
