"""Layers of a module: the units that are updated, and whose versions are counted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_g2.errors import ConfigurationError


@dataclass(frozen=True)
class Layer:
    """The parameters that one module holds itself.

    Attributes:
        index: position among the layers, in the order of their definition.
        name: of the module; empty for the root.
        parameters: numbers of its parameters in the module's order; a tied parameter belongs to its first holder.
    """

    index: int
    name: str
    parameters: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A module's parameters and how they make up layers.

    Attributes:
        names: of the parameters, in the module's order, tied ones once.
        parameters: those parameters.
        layers: the layers.
        layer_of: index of each parameter's layer.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    layers: tuple[Layer, ...]
    layer_of: tuple[int, ...]

    def block(self, index: int, count: int) -> range:
        """Numbers of the parameters in one of ``count`` contiguous blocks of about equal size."""
        total = sum(p.numel() for p in self.parameters)
        edges, passed = [0], 0
        for number, parameter in enumerate(self.parameters):
            passed += parameter.numel()
            while len(edges) < count and passed >= total * len(edges) / count:
                edges.append(number + 1)
        return range(edges[index], [*edges, len(self.parameters)][index + 1])

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Find the layers of a module.

        Args:
            module: all of its parameters have their shape.

        Raises:
            ConfigurationError: a parameter has no shape yet, or there is none at all.
        """
        named = dict(module.named_parameters())
        for name, parameter in named.items():
            if is_lazy(parameter):
                raise ConfigurationError(
                    f"parameter {name!r}: has no shape yet; run one batch through the module before training"
                )
        if not named:
            raise ConfigurationError(f"{type(module).__name__}: has no parameters; there is nothing to train")
        numbers = {id(parameter): number for number, parameter in enumerate(named.values())}
        layers: list[Layer] = []
        layer_of = [0] * len(named)
        seen: set[int] = set()
        for name, part in module.named_modules():
            own = [numbers[id(p)] for p in part.parameters(recurse=False)]
            own = [number for number in dict.fromkeys(own) if number not in seen]
            if own:
                seen.update(own)
                for number in own:
                    layer_of[number] = len(layers)
                layers.append(Layer(len(layers), name, tuple(own)))
        return cls(tuple(named), tuple(named.values()), tuple(layers), tuple(layer_of))
