"""Where each parameter lies in a flat buffer of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_g2.server.wire import travel_dtype
from lightning_g2.values import SparseShape

_ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every dtype's size."""

_KEPT_OFFSETS = 64
"""Sets of indices whose offsets are remembered; which parameters have a gradient may differ from push to push."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Name, shape and dtype of one parameter.

    Attributes:
        name: its name in the module.
        shape: its shape.
        dtype: its dtype.
        order: its dimensions from the largest stride to the smallest; empty where it is contiguous.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> ParameterSpec:
        """Spec of a tensor."""
        return cls(name, tuple(tensor.shape), tensor.dtype, _order(tensor))

    def view(self, flat: Tensor) -> Tensor:
        """The tensor in its bytes, with the strides that it has in the module.

        Arithmetic that runs along memory rounds alike only over the same strides.
        """
        typed = flat.view(self.dtype)
        if not self.order:
            return typed.view(self.shape)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return typed.view([self.shape[d] for d in self.order]).permute(inverse)

    def agrees_with(self, other: ParameterSpec) -> bool:
        """Whether both can stand for one parameter; strides may differ."""
        return (self.name, self.shape, self.dtype) == (other.name, other.shape, other.dtype)

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense, contiguous tensor."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class ParameterLayout:
    """The parameters that a server owns, in a fixed order.

    A server's layout only ever grows at its end, so whoever knows an earlier one reads the beginning of its buffers.

    A buffer is a flat ``uint8`` tensor, so that parameters of any mixture of dtypes travel in one piece and unchanged.
    Tensors lie in it densely, in the order of their strides; offsets are Python integers, hence exact beyond 2³¹ bytes.
    """

    specs: tuple[ParameterSpec, ...]
    _known: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, named_tensors: Iterable[tuple[str, Tensor]]) -> ParameterLayout:
        """Layout of named tensors, in their order."""
        return cls(tuple(ParameterSpec.of(name, tensor) for name, tensor in named_tensors))

    def __len__(self) -> int:
        return len(self.specs)

    def __reduce__(self) -> tuple[Any, ...]:
        return ParameterLayout, (self.specs,)

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
            views.append(spec.view(buffer[offset : offset + spec.size_bytes]))
        return views

    def spans(self) -> list[tuple[int, int]]:
        """First byte, and byte after the last one, of each parameter in a buffer of all."""
        offsets, _ = self._offsets(self.all())
        return [(offset, offset + spec.size_bytes) for offset, spec in zip(offsets, self.specs, strict=True)]

    def with_more(self, specs: Iterable[ParameterSpec]) -> ParameterLayout:
        """This layout with parameters added at its end."""
        return ParameterLayout((*self.specs, *specs))

    def of_gradients(
        self, present: Sequence[int], sparse: Mapping[int, SparseShape], wire: torch.dtype | None = None
    ) -> ParameterLayout:
        """Layout of one push: a dense gradient is one entry, a sparse one two, its indices and its values.

        Args:
            present: the parameters that have a gradient.
            sparse: those of them whose gradient is sparse.
            wire: dtype in which dense ones travel, see :func:`travel_dtype`.
        """
        specs: list[ParameterSpec] = []
        for index in present:
            spec = self.specs[index]
            if (shape := sparse.get(index)) is None:
                specs.append(replace(spec, dtype=travel_dtype(spec.dtype, wire)))
            else:
                dense = spec.shape[shape.sparse_dim :]
                specs.append(ParameterSpec(f"{spec.name}.indices", (shape.sparse_dim, shape.entries), torch.int64))
                specs.append(ParameterSpec(f"{spec.name}.values", (shape.entries, *dense), spec.dtype))
        return ParameterLayout(tuple(specs))

    def _key(self, indices: Sequence[int] | None) -> tuple[int, ...]:
        return self.all() if indices is None else tuple(indices)

    def _offsets(self, key: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        if key not in self._known:
            offsets, end = [], 0
            for index in key:
                offsets.append(end)
                end += -(-self.specs[index].size_bytes // _ALIGNMENT) * _ALIGNMENT
            if len(self._known) >= _KEPT_OFFSETS:
                self._known.clear()
            self._known[key] = tuple(offsets), end
        return self._known[key]


def _order(tensor: Tensor) -> tuple[int, ...]:
    if tensor.is_contiguous():
        return ()
    order = tuple(sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True))
    return order if tensor.permute(order).is_contiguous() else ()


def flatten(layout: ParameterLayout, tensors: Sequence[Tensor], indices: Sequence[int], buffer: Tensor) -> None:
    """Copy tensors, on any device, into a buffer of the layout."""
    views = layout.views(buffer, indices)
    if views:
        torch._foreach_copy_(views, list(tensors))


def flatten_gradients(
    layout: ParameterLayout,
    gradients: Sequence[Tensor],
    present: Sequence[int],
    sparse: Mapping[int, SparseShape],
    buffer: Tensor,
    wire: torch.dtype | None = None,
) -> None:
    """Copy gradients, dense and sparse, into a buffer of :meth:`ParameterLayout.of_gradients`."""
    parts: list[Tensor] = []
    for gradient in gradients:
        parts += [gradient._indices(), gradient._values()] if gradient.is_sparse else [gradient]
    push = layout.of_gradients(present, sparse, wire)
    flatten(push, parts, push.all(), buffer)


def read_gradients(
    layout: ParameterLayout,
    present: Sequence[int],
    sparse: Mapping[int, SparseShape],
    buffer: Tensor,
    wire: torch.dtype | None = None,
) -> list[Tensor]:
    """The gradients in a buffer that :func:`flatten_gradients` has filled; they share its memory."""
    if not sparse and wire is None:
        return layout.views(buffer, present)
    parts = iter(layout.of_gradients(present, sparse, wire).views(buffer))
    gradients = []
    for index in present:
        if (shape := sparse.get(index)) is None:
            gradients.append(next(parts))
        else:
            indices, values = next(parts), next(parts)
            size = layout.specs[index].shape
            gradients.append(
                torch.sparse_coo_tensor(indices, values, size, is_coalesced=shape.coalesced, check_invariants=False)
            )
    return gradients
