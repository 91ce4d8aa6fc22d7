"""A shallow copy of a module tree for one forward thread, over the same storage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_g2.decoupled.layer import Layout
from lightning_g2.errors import ConfigurationError

_TABLES = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks")
_Slot = tuple[Any, Any, int]


class ModuleClone:
    """The module as one forward thread sees it.

    Modules are new objects of the same classes; parameters are whatever leaves :meth:`refresh` puts in place, also in
    plain lists and dicts that hold them (as recurrent layers keep them). Buffers share their storage with the module's,
    so what a forward pass writes in place is everyone's at once; one that it replaces becomes the module's when the
    pass is over (:meth:`settle`). Other attributes that a forward pass sets stay with the thread, which so carries on
    its own recurrent state from batch to batch; :meth:`give_back` hands them to the module. What other code sets on the
    module, also its mode (``train()``, ``eval()``), the copy has from the next batch on.

    Args:
        module: the module; left as it is.
        layout: its parameters.
        before_layer: called with a layer's index before a module that holds its parameters runs.
        shared: classes of modules that are not copied, nor what they hold.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        before_layer: Callable[[int], None],
        shared: tuple[type[nn.Module], ...] = (),
    ) -> None:
        self._numbers = {id(p): number for number, p in enumerate(layout.parameters)}
        left = {id(part) for m in module.modules() if isinstance(m, shared) for part in m.modules()}
        self._originals = [part for part in module.modules() if id(part) not in left]
        self._copies: dict[int, nn.Module] = {id(m): type(m).__new__(type(m)) for m in self._originals}
        self._slots: list[_Slot] = []
        self._placed: list[dict[str, Any]] = []
        self._seen: list[dict[str, Any]] = []
        self._buffers: list[tuple[nn.Module, nn.Module, str, Tensor | None]] = []
        for original in self._originals:
            self._fill(original)
        for layer in layout.layers:
            holder = self._copies[id(module.get_submodule(layer.name))]
            holder.register_forward_pre_hook(_Notice(before_layer, layer.index), prepend=True)
        self.module = self._copies[id(module)]

    def refresh(self, leaves: Sequence[Tensor]) -> None:
        """Put the leaves of a new batch in place of the parameters; take buffers and attributes as they are now."""
        self._follow()
        self.place(leaves)
        self._buffers = []
        for original in self._originals:
            copy = self._copies[id(original)]
            for name, buffer in original._buffers.items():
                # Of `.data`: writing it in one pass must not trip the version check of another's graph.
                alias = None if buffer is None else buffer.data
                copy._buffers[name] = alias
                self._buffers.append((original, copy, name, alias))

    def place(self, leaves: Sequence[Tensor]) -> None:
        """Put tensors in place of the parameters."""
        for container, key, number in self._slots:
            container[key] = leaves[number]

    def settle(self) -> None:
        """Give the module the buffers that the last forward pass has replaced."""
        for original, copy, name, alias in self._buffers:
            value = copy._buffers.get(name)
            if value is not alias:
                original._buffers[name] = None if value is None else value.detach()

    def give_back(self) -> None:
        """Give the module the plain attributes that forward passes have set here."""
        for original, placed in zip(self._originals, self._placed, strict=True):
            for name, value in vars(self._copies[id(original)]).items():
                if name not in _TABLES and placed.get(name, _MISSING) is not value:
                    vars(original)[name] = value

    def _follow(self) -> None:
        """Take over attributes that have been set on the module since the last batch."""
        for original, placed, seen in zip(self._originals, self._placed, self._seen, strict=True):
            for name, value in list(vars(original).items()):
                if name not in _TABLES and seen.get(name, _MISSING) is not value:
                    seen[name], placed[name] = value, self._swapped(value)
                    vars(self._copies[id(original)])[name] = placed[name]

    def _fill(self, original: nn.Module) -> None:
        attributes: dict[str, Any] = {}
        for name, value in vars(original).items():
            if name == "_buffers":
                attributes[name] = dict(value)
            elif name == "_forward_pre_hooks":
                attributes[name] = OrderedDict(value)
            else:
                attributes[name] = self._swapped(value)
        vars(self._copies[id(original)]).update(attributes)
        self._placed.append(attributes)
        self._seen.append(dict(vars(original)))

    def _swapped(self, value: Any) -> Any:
        """The value, with modules replaced by their copies; containers of parameters are copied and noted."""
        if isinstance(value, nn.Module):
            return self._copies.get(id(value), value)
        if isinstance(value, MethodType) and id(value.__self__) in self._copies:
            return MethodType(value.__func__, self._copies[id(value.__self__)])
        if type(value) in (dict, OrderedDict):
            items: list[tuple[Any, Any]] = list(value.items())
        elif type(value) is list:
            items = list(enumerate(value))
        elif type(value) is tuple:
            parts = [self._swapped(part) for part in value]
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else tuple(parts)
        else:
            return value
        slots = [(key, self._numbers[id(part)]) for key, part in items if id(part) in self._numbers]
        parts_of = {key: self._swapped(part) for key, part in items}
        if not slots and all(parts_of[key] is part for key, part in items):
            return value
        copy = type(value)(value)
        for key, part in parts_of.items():
            copy[key] = part
        self._slots += [(copy, key, number) for key, number in slots]
        return copy


_MISSING = object()


class _Notice:
    """Tells that a layer is about to run."""

    def __init__(self, before_layer: Callable[[int], None], index: int) -> None:
        self._before_layer, self._index = before_layer, index

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        self._before_layer(self._index)


def refuse_compiled(module: nn.Module) -> None:
    """Refuse what cannot be copied.

    Raises:
        ConfigurationError: a part of the module is compiled or scripted.
    """
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) or hasattr(part, "_orig_mod"):
            raise ConfigurationError(
                f"module {name or type(module).__name__!r}: is compiled or scripted, which ties it to its own "
                "parameters; forward threads need the plain module: compile functions that it calls instead"
            )
        if getattr(part, "_compiled_call_impl", None) is not None:
            raise ConfigurationError(
                f"module {name or type(module).__name__!r}: was compiled in place (module.compile()), which ties it to "
                "its own parameters; forward threads need the plain module"
            )
