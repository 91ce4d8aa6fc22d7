"""Where each parameter lies in a flat buffer of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every dtype's size."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Name, shape and dtype of one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense, contiguous tensor."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class ParameterLayout:
    """The parameters that a server owns, in a fixed order; all ranks and servers of a job hold equal layouts.

    A buffer is a flat ``uint8`` tensor, so that parameters of any mixture of dtypes travel in one piece and unchanged.
    Tensors lie in it contiguously whatever their strides in the module; offsets are Python integers, hence exact
    beyond 2³¹ bytes.
    """

    specs: tuple[ParameterSpec, ...]

    @classmethod
    def of(cls, named_tensors: Iterable[tuple[str, Tensor]]) -> ParameterLayout:
        """Layout of named tensors, in their order."""
        return cls(tuple(ParameterSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named_tensors))

    def __len__(self) -> int:
        return len(self.specs)

    def all(self) -> tuple[int, ...]:
        """Indices of every parameter."""
        return tuple(range(len(self.specs)))

    def size_bytes(self, indices: Sequence[int] | None = None) -> int:
        """Bytes of a buffer that holds the given parameters (all by default)."""
        return self._offsets(self._key(indices))[1]

    def allocate(self, indices: Sequence[int] | None = None) -> Tensor:
        """A zeroed buffer on the CPU for the given parameters (all by default)."""
        return torch.zeros(self.size_bytes(indices), dtype=torch.uint8)

    def views(self, buffer: Tensor, indices: Sequence[int] | None = None) -> list[Tensor]:
        """Typed, shaped views into a buffer, one for each of the given parameters (all by default).

        Raises:
            ValueError: the buffer has another size than the layout says.
        """
        key = self._key(indices)
        offsets, size = self._offsets(key)
        if buffer.numel() != size:
            raise ValueError(f"buffer of {buffer.numel()} bytes: this layout needs {size}; ranks disagree on the model")
        views = []
        for index, offset in zip(key, offsets, strict=True):
            spec = self.specs[index]
            views.append(buffer[offset : offset + spec.size_bytes].view(spec.dtype).view(spec.shape))
        return views

    def _key(self, indices: Sequence[int] | None) -> tuple[int, ...]:
        return self.all() if indices is None else tuple(indices)

    def _offsets(self, key: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        return _offsets(self.specs, key)


@lru_cache(maxsize=64)
def _offsets(specs: tuple[ParameterSpec, ...], key: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    offsets, end = [], 0
    for index in key:
        offsets.append(end)
        end += -(-specs[index].size_bytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(offsets), end
