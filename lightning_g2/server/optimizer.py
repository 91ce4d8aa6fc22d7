"""A module's optimizer, taken apart on a rank and put together again on a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_g2.errors import ConfigurationError
from lightning_g2.server.parcel import Packer, Parcel, pack, unpack

# Bookkeeping that every torch optimizer makes for itself, and that learning-rate schedulers and Lightning put on the
# instance. None of it is the optimizer's own. Step hooks run on the rank, around the push.
_NOT_SHIPPED = frozenset({
    "step", "_opt_called", "_step_count", "_zero_grad_profile_name",
    "_step_supports_amp_scaling", "_warned_capturable_if_run_uncaptured", "_patch_step_function",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
})  # fmt: skip

_OF_TORCH = ("defaults", "state", "param_groups")

MASTER_KEY = "master_weight"
"""Entry of a parameter's optimizer state: its float32 master, where the server keeps one."""


class OptimizerParts:
    """What an optimizer keeps, without its class; optimizers within it are parts too."""

    attributes: dict[str, Any]

    @property
    def state(self) -> dict[Any, Any]:
        """Its state by parameter."""
        state: dict[Any, Any] = self.attributes["state"]
        return state

    @property
    def owns_parameters(self) -> bool:
        """Whether any of its groups has parameters."""
        return any(group["params"] for group in self.attributes["param_groups"])

    def add(self, other: OptimizerParts) -> None:
        """Take over what another piece of the same optimizer keeps by parameter; the parameters are not the same.

        Args:
            other: what the optimizer keeps on another server.
        """
        for name, value in other.attributes.items():
            own = self.attributes.get(name)
            if isinstance(own, OptimizerParts) and isinstance(value, OptimizerParts):
                own.add(value)
            elif isinstance(own, dict) and isinstance(value, dict):
                own.update({key: item for key, item in value.items() if isinstance(key, Tensor)})

    def put_into(self, optimizer: Optimizer) -> None:
        """Give an optimizer of the same making this state; it keeps its own groups, whose hyper-parameters are newer.

        Args:
            optimizer: takes everything but groups and defaults.
        """
        for name, value in self.attributes.items():
            if name in ("defaults", "param_groups"):
                continue
            if name == "state":
                # In place: an optimizer that wraps another one may share the mapping with it.
                optimizer.state.clear()
                optimizer.state.update(value)
            elif isinstance(value, OptimizerParts):
                value.put_into(getattr(optimizer, name))
            elif not _holds_parts(value):
                vars(optimizer)[name] = value


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Optimizers that an optimizer keeps in attributes (as SAM and Lookahead do), by attribute."""
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, Optimizer)}


@dataclass(frozen=True)
class OptimizerSpec:
    """Everything that makes an optimizer, with parameters replaced by their index in the layout.

    Attributes:
        name: the optimizer's class.
        parcel: the optimizer, taken apart.
    """

    name: str
    parcel: Parcel

    @classmethod
    def of(cls, optimizer: Optimizer, index_of: Mapping[int, int]) -> OptimizerSpec:
        """Take an optimizer apart; classes defined in the user's script travel by value.

        Args:
            optimizer: any torch optimizer; left as it is.
            index_of: index in the layout by ``id(parameter)``.

        Raises:
            ConfigurationError: something that the optimizer keeps cannot be pickled.
        """
        name = type(optimizer).__qualname__
        try:
            return cls(name, pack(optimizer, index_of, packer=_ShippingPacker))
        except Exception as error:
            raise ConfigurationError(
                f"optimizer {name}: cannot be sent to the server ({type(error).__name__}: {error}); its attributes and "
                "hyper-parameters must be picklable: keep locks, handles and generators out of it"
            ) from error

    def build(self, parameters: Sequence[Any]) -> Optimizer:
        """Put the optimizer together again over a server's parameters, the way unpickling does.

        Its state lies on the parameters' device. Counts of steps stay on the CPU, where torch keeps them, too, but for
        fused optimizers.
        """
        device = parameters[0].device if parameters else torch.device("cpu")
        optimizer: Optimizer = unpack(self.parcel, parameters, device=device)
        for group in optimizer.param_groups:
            for parameter in group["params"] if group.get("fused") else ():
                if isinstance(step := optimizer.state.get(parameter, {}).get("step"), Tensor):
                    optimizer.state[parameter]["step"] = step.to(device)
        return optimizer

    def restricted(self, parameters: Sequence[Tensor], index_of: Mapping[int, int]) -> OptimizerSpec:
        """The optimizer over some of its parameters, for a server that owns no others.

        Args:
            parameters: what may stand for each parameter of the layout; nothing is written to.
            index_of: index on that server, by index in the layout, of those that it owns.
        """
        kept = {i: torch.nn.Parameter(parameters[i], requires_grad=False) for i in index_of}
        optimizer = self.build([kept.get(i, _ELSEWHERE) for i in range(len(parameters))])
        for each in (optimizer, *inner_optimizers(optimizer).values()):
            for value in vars(each).values():
                _leave_out(value)
        return OptimizerSpec.of(optimizer, {id(kept[i]): index for i, index in index_of.items()})


_ELSEWHERE = torch.nn.Parameter(torch.empty(0), requires_grad=False)
"""Stands for the parameters of other servers while an optimizer is taken apart."""


def _leave_out(value: Any) -> None:
    """Take the parameters of other servers out of lists and mappings, however deep, in place: they may be shared."""
    if isinstance(value, dict):
        for key in [k for k, item in value.items() if k is _ELSEWHERE or item is _ELSEWHERE]:
            del value[key]
        for item in value.values():
            _leave_out(item)
    elif isinstance(value, list):
        value[:] = [item for item in value if item is not _ELSEWHERE]
        for item in value:
            _leave_out(item)


def pack_parts(optimizer: Optimizer, index_of: Mapping[int, int]) -> Parcel:
    """Copy what an optimizer keeps; :func:`unpack` gives :class:`OptimizerParts`."""
    return pack(optimizer, index_of, packer=_ReportingPacker)


class _ShippingPacker(Packer):
    """Reduces optimizers to class and attributes: their own pickling would leave attributes behind."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Optimizer):
            return _blank, (type(value),), _attributes(value), None, None, _restore
        return super().reducer_override(value)


class _ReportingPacker(Packer):
    """Reduces optimizers to attributes alone; the receiver has the classes."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Optimizer):
            return OptimizerParts, (), {"attributes": _attributes(value)}
        return super().reducer_override(value)


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in _NOT_SHIPPED}


def _blank(kind: type[Optimizer]) -> Optimizer:
    return kind.__new__(kind)


def _restore(optimizer: Optimizer, attributes: dict[str, Any]) -> None:
    # Torch defines __setstate__ for each of its optimizers, so no constructor needs to be guessed: classes with
    # positional options, or that build state when constructed, come back as they were.
    optimizer.__setstate__({name: attributes[name] for name in _OF_TORCH})
    vars(optimizer).update({name: value for name, value in attributes.items() if name not in _OF_TORCH})
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not None]  # lazy ones come when they have a shape
        if group.get("capturable"):  # for CUDA graphs, which a server on the CPU has none of
            group["capturable"] = False


def _holds_parts(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(isinstance(item, OptimizerParts) for item in items)


@dataclass(frozen=True)
class PickledValue:
    """A hyper-parameter that is more than a number, pickled by value: the server cannot import the user's script."""

    pickled: bytes


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """All entries of a parameter group but its parameters, as the server can use them: tensors on the CPU.

    ``capturable`` is for CUDA graphs, which a server on the CPU has none of.
    """
    values = {key: to_cpu(value) for key, value in group.items() if key != "params"}
    if values.get("capturable"):
        values["capturable"] = False
    return {k: v if _is_plain(v) else PickledValue(cloudpickle.dumps(v)) for k, v in values.items()}


def plain_value(value: Any) -> Any:
    """A hyper-parameter as the optimizer takes it."""
    return cloudpickle.loads(value.pickled) if isinstance(value, PickledValue) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in (*value.keys(), *value.values()))
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return isinstance(value, Tensor) or type(value) in (bool, int, float, complex, str, bytes, type(None))


def same_value(one: Any, other: Any) -> bool:
    """Whether two hyper-parameters are equal."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one == other).all())
    try:
        return bool(one == other)
    except Exception:  # values that cannot be compared count as different
        return False


def to_cpu(value: Any) -> Any:
    """A copy of nested values with every tensor detached and on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: to_cpu(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_cpu(item) for item in value)
    return value
