"""Which parameters the optimizers step, what they are called, and where the server keeps each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from lightning_g2.errors import ConfigurationError
from lightning_g2.server import ParameterLayout


class Ownership:
    """A rank's map between its parameters and the server's layout.

    It follows what happens to the optimizers while they train: groups that are added, taken away or rearranged, and
    lazy parameters that get their shape.

    Args:
        named_parameters: gives the module's parameters by name, tied ones once.
        optimizers: the module's optimizers.

    Attributes:
        layout: the server's parameters as far as this rank knows them.
        parameters: this rank's parameter for each of them; None for one outside the module that only another rank has.
    """

    def __init__(
        self, named_parameters: Callable[[], Iterable[tuple[str, Parameter]]], optimizers: Sequence[Optimizer]
    ) -> None:
        self.layout = ParameterLayout(())
        self.parameters: list[Parameter | None] = []
        self._named_parameters = named_parameters
        self._optimizers = list(optimizers)
        self._outside: list[Parameter] = []
        self._index_of: dict[int, int] = {}
        self._members: list[tuple[tuple[int, ...], ...]] = []
        self._seen: list[list[list[Parameter]]] = []
        self._lazy: set[int] = set()

    def owned(self) -> dict[str, Parameter]:
        """The optimizers' parameters by name, in the module's order, then those outside the module.

        Lazy ones count once they have a shape.

        Raises:
            ConfigurationError: a parameter belongs to two optimizers.
        """
        stepped = self._stepped()
        self._lazy = {key for key, p in stepped.items() if isinstance(p, UninitializedParameter)}
        return {
            name: parameter
            for name, parameter in self.named().items()
            if id(parameter) in stepped and not isinstance(parameter, UninitializedParameter)
        }

    def was_lazy(self, parameter: Parameter) -> bool:
        """Whether a parameter had no shape when :meth:`owned` was last called."""
        return id(parameter) in self._lazy

    def changed(self) -> bool:
        """Whether the optimizers' groups, or lazy parameters in them, are not what they were at :meth:`bind`."""
        if self._lazy:
            lazy = [p for key, p in self._stepped().items() if key in self._lazy]
            if not all(isinstance(p, UninitializedParameter) for p in lazy):
                return True
        for optimizer, groups in zip(self._optimizers, self._seen, strict=True):
            if len(groups) != len(optimizer.param_groups):
                return True
            for group, seen in zip(optimizer.param_groups, groups, strict=True):
                now = group["params"]
                if len(now) != len(seen) or any(a is not b for a, b in zip(now, seen, strict=True)):
                    return True
        return False

    def bind(self, layout: ParameterLayout) -> None:
        """Find this rank's parameters in the server's layout.

        Raises:
            ConfigurationError: a parameter has another shape or dtype here.
        """
        named = self.named()
        self.layout = layout
        self.parameters = [named.get(spec.name) for spec in layout.specs]
        for spec, parameter in zip(layout.specs, self.parameters, strict=True):
            if parameter is None or isinstance(parameter, UninitializedParameter):
                continue
            if (tuple(parameter.shape), parameter.dtype) != (spec.shape, spec.dtype):
                raise ConfigurationError(
                    f"parameter {spec.name!r}: shape {tuple(parameter.shape)} {parameter.dtype} here, the server has "
                    f"{spec.shape} {spec.dtype}; every rank must build the same module"
                )
        self.parameters = [None if isinstance(p, UninitializedParameter) else p for p in self.parameters]
        self._index_of = {id(p): i for i, p in enumerate(self.parameters) if p is not None}
        groups = [[list(group["params"]) for group in o.param_groups] for o in self._optimizers]
        self._members = [
            tuple(tuple(self._index_of[id(p)] for p in group if id(p) in self._index_of) for group in optimizer)
            for optimizer in groups
        ]
        self._seen = groups

    def members(self, optimizer: int) -> tuple[tuple[int, ...], ...]:
        """Indices of the parameters of each group of an optimizer."""
        return self._members[optimizer]

    def index_of(self) -> dict[int, int]:
        """Index by ``id(parameter)``."""
        return self._index_of

    def load(self, views: Sequence[Tensor]) -> None:
        """Copy the server's weights into the parameters."""
        here = [(p, view) for p, view in zip(self.parameters, views, strict=True) if p is not None]
        if here:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in here], [view for _, view in here])

    def _stepped(self) -> dict[int, Parameter]:
        owner: dict[int, int] = {}
        stepped: dict[int, Parameter] = {}
        for number, optimizer in enumerate(self._optimizers):
            for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                if owner.setdefault(id(parameter), number) != number:
                    name = next((n for n, p in self._named_parameters() if p is parameter), "outside the module")
                    raise ConfigurationError(
                        f"parameter {name!r}: belongs to optimizers {owner[id(parameter)]} and {number}; a server "
                        "keeps one optimizer state for each parameter: give it to one optimizer"
                    )
                stepped[id(parameter)] = parameter
        return stepped

    def named(self) -> dict[str, Parameter]:
        """The module's parameters by name, and those that are in optimizers alone."""
        named = dict(self._named_parameters())
        inside = {id(p) for p in chain(named.values(), self._outside)}
        self._outside += [p for key, p in self._stepped().items() if key not in inside]
        return named | {
            f"outside.{i}": p for i, p in enumerate(self._outside) if not any(p is q for q in named.values())
        }


def uninitialised(module: torch.nn.Module) -> set[str]:
    """Names of a module's lazy parameters and buffers that have no shape yet."""
    named = chain(module.named_parameters(), module.named_buffers())
    return {name for name, tensor in named if isinstance(tensor, (UninitializedParameter, UninitializedBuffer))}
