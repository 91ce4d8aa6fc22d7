"""Objects taken apart into structure and tensors: tensors travel as bytes, parameters as their index in the layout."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Parcel:
    """An object that :func:`pack` has taken apart.

    Attributes:
        skeleton: the pickled object without its tensors; classes and functions of ``__main__`` are in it by value.
        tensors: its tensors, dense, contiguous and on the CPU.
    """

    skeleton: bytes
    tensors: tuple[Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors)


class Packer(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles an object and puts its tensors aside.

    Args:
        sink: takes the skeleton.
        index_of: index by ``id`` of the parameters that the other side has too.
        copy: whether tensors are copied, so that the parcel shares no memory with the object.
    """

    def __init__(self, sink: io.BytesIO, index_of: Mapping[int, int], *, copy: bool) -> None:
        super().__init__(sink)
        self.tensors: list[Tensor] = []
        self._index_of = index_of
        self._copy = copy
        self._seen: dict[int, int] = {}
        self._kept: list[Tensor] = []

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        """What stands in the skeleton for a tensor; None for anything else."""
        if not isinstance(value, Tensor):
            return None
        if id(value) in self._index_of:
            return "known", self._index_of[id(value)]
        if isinstance(value, UninitializedParameter):
            return "absent", 0  # a lazy parameter without a shape: there is nothing to send yet
        if value.layout != torch.strided or value.is_quantized:
            return None
        if id(value) not in self._seen:
            self._seen[id(value)] = len(self.tensors)
            self._kept.append(value)  # an id belongs to a tensor only as long as that lives
            dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            self.tensors.append(dense.clone() if self._copy and dense.data_ptr() == value.data_ptr() else dense)
        kind = ("fixed" if not value.requires_grad else "free") if isinstance(value, torch.nn.Parameter) else "tensor"
        return kind, self._seen[id(value)]


class _Unpacker(pickle.Unpickler):
    def __init__(self, parcel: Parcel, known: Sequence[Any], device: torch.device) -> None:
        super().__init__(io.BytesIO(parcel.skeleton))
        self._tensors: list[Tensor] = [t.to(device) if t.ndim else t for t in parcel.tensors]
        self._known = known

    def persistent_load(self, key: tuple[str, int]) -> Any:
        kind, index = key
        if kind == "known":
            return self._known[index]
        if kind == "absent":
            return None
        if kind != "tensor" and not isinstance(self._tensors[index], torch.nn.Parameter):
            self._tensors[index] = torch.nn.Parameter(self._tensors[index], requires_grad=kind == "free")
        return self._tensors[index]


def pack(
    value: Any, index_of: Mapping[int, int] | None = None, *, copy: bool = True, packer: type[Packer] = Packer
) -> Parcel:
    """Take an object apart.

    Args:
        value: any object that cloudpickle can pickle.
        index_of: index by ``id(tensor)`` of tensors that the other side has: only their index travels.
        copy: whether the parcel shall share no memory with the object.
        packer: how objects are reduced.

    Returns:
        The parcel.
    """
    sink = io.BytesIO()
    pickler = packer(sink, index_of or {}, copy=copy)
    pickler.dump(value)
    return Parcel(sink.getvalue(), tuple(pickler.tensors))


def unpack(parcel: Parcel, known: Sequence[Any] = (), *, device: torch.device = _CPU) -> Any:
    """Put an object together again; its tensors are those of the parcel.

    Args:
        parcel: what :func:`pack` gave.
        known: what stands on this side for the tensors that travelled as their index.
        device: where its tensors shall lie; those of one number, such as counts of steps, stay on the CPU.

    Returns:
        The object.
    """
    return _Unpacker(parcel, known, device).load()
