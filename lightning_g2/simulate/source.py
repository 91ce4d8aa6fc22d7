"""What a simulation is given, in the many forms that it may be given in."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_g2.errors import ConfigurationError
from lightning_g2.routing import Gate, build_gate

ModelLike: TypeAlias = nn.Module | Callable[[], nn.Module]
Batches: TypeAlias = Sequence[Any] | Callable[[int, int], Any]
GateLike: TypeAlias = str | tuple[str, Mapping[str, Any]] | Callable[[], Gate]
OptimizerLike: TypeAlias = str | Callable[..., Optimizer]
_EVALUATED_RANKS = 8


class Loss(Protocol):
    """Scalar loss of a module on a batch."""

    def __call__(self, model: nn.Module, batch: Any, /) -> Tensor:
        """Forward pass and loss; runs with gradients enabled."""
        ...


def seed_torch(seed: int) -> None:
    """Seed torch's generators, as ``torch.manual_seed`` does but for accelerators that nobody has used yet.

    For those it would put the seed, with a stack trace, on a list of things to do.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def build_model(model: ModelLike, seed: int) -> nn.Module:
    """The module to train: a copy of the one given, or one made under the seed."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    seed_torch(seed)
    made = model()
    if not isinstance(made, nn.Module):
        raise ConfigurationError(f"model={model!r}: must be a torch.nn.Module or make one, made {type(made).__name__}")
    return made


def build_optimizer(optimizer: OptimizerLike, parameters: list[nn.Parameter], lr: float) -> Optimizer:
    """The optimizer, at the given learning rate.

    A class, or anything else that takes ``lr``, is given it, and may set rates of its own from it; otherwise it is set
    in every group.
    """
    make = _optimizer_class(optimizer) if isinstance(optimizer, str) else optimizer
    names = inspect.signature(make).parameters
    takes_lr = "lr" in names or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values())
    made = make(parameters, lr=lr) if takes_lr else make(parameters)
    if not isinstance(made, Optimizer):
        raise ConfigurationError(
            f"optimizer={optimizer!r}: must be a name in torch.optim or make an optimizer of a list of parameters, "
            f"made {type(made).__name__}"
        )
    if not takes_lr:
        for group in made.param_groups:
            group["lr"] = lr
    return made


def gate_maker(gate: GateLike) -> Callable[[], Gate]:
    """Makes one gate a rank."""
    if isinstance(gate, str):
        return lambda: build_gate(gate)
    if callable(gate):
        return gate
    name, options = gate
    return lambda: build_gate(name, **options)


class BatchSource:
    """Batches to train on, and to evaluate on.

    Args:
        batches: a sequence, handed out in order to whichever rank begins, again and again; or what gives a rank's k-th
            batch.
        evaluation: held-out batches; None takes all of a sequence, or the first batch of up to 8 ranks.
        ranks: number of ranks.
    """

    def __init__(self, batches: Batches, evaluation: Sequence[Any] | None, ranks: int) -> None:
        self._given: Callable[[int, int], Any] | None = None
        self._sequence: Sequence[Any] = ()
        if callable(batches):
            self._given = batches
        else:
            self._sequence = _as_sequence("batches", batches)
        self._evaluation = None if evaluation is None else _as_sequence("evaluation", evaluation)
        self._ranks = ranks

    def batch(self, rank: int, k: int, number: int) -> Any:
        """A batch to train on.

        Args:
            rank: who trains on it.
            k: gradients that this rank has begun before.
            number: gradients that all ranks have begun before.
        """
        return self._sequence[number % len(self._sequence)] if self._given is None else self._given(rank, k)

    def evaluation(self) -> Sequence[Any]:
        """Batches to evaluate on."""
        if self._evaluation is not None:
            return self._evaluation
        if self._given is None:
            return self._sequence
        return [self._given(rank, 0) for rank in range(min(self._ranks, _EVALUATED_RANKS))]


def _as_sequence(name: str, batches: Iterable[Any]) -> Sequence[Any]:
    sized = hasattr(batches, "__len__")
    if not sized or len(batches) == 0:  # type: ignore[arg-type]
        raise ConfigurationError(
            f"{name}={batches!r}: must be a sequence of at least one batch; give a list, or for training batches a "
            "function of rank and k"
        )
    return batches if hasattr(batches, "__getitem__") else list(batches)  # type: ignore[return-value]


def _optimizer_class(name: str) -> Callable[..., Optimizer]:
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name.lower() not in classes:
        raise ConfigurationError(f"optimizer={name!r}: must be one of {', '.join(sorted(classes))}; or give its class")
    found: Callable[..., Optimizer] = classes[name.lower()]
    return found
