"""What a gate is: the context it sees and the contract it keeps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_g2.routing.mge import relative_age
from lightning_g2.values import GateDecision

Need = Literal["weights", "base_weights", "evaluate"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GateContext:
    """What a gate knows beside the gradients of one push.

    Attributes:
        rank: the pushing rank.
        staleness: τ, versions between the gradient's base and now.
        concurrency: N, ranks of the job.
        pushes_per_version: K, pushes averaged into one version.
        lr: learning rate of the step, one for all or one per block.
        step: optimizer steps of this rank so far.
        version: current version.
        window: effective energy Ê = E·x of the latest push of each live rank; the own rank included if it has pushed.
        scale: running maximum of lr·|d_b| of each block, in the gradient's units times the learning rate.
        weights: the newest weights at hand, for gates that declare the need: the server's current ones in a simulation,
            and in a real run where the gate also needs ``base_weights``; otherwise the rank's own copy.
        base_weights: weights the gradient was computed from, likewise; detached.
        evaluate: loss of a held-out batch under given weights, differentiable in them, likewise.
    """

    rank: int = 0
    staleness: int = 0
    concurrency: int = 1
    pushes_per_version: int = 1
    lr: float | Mapping[str, float] = 0.0
    step: int = 0
    version: int = 0
    window: Mapping[int, float] = field(default_factory=dict)
    scale: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, Tensor] | None = None
    base_weights: Mapping[str, Tensor] | None = None
    evaluate: Callable[[Mapping[str, Tensor]], Tensor] | None = None

    @property
    def age(self) -> float:
        """Relative age x = τK/N; dimensionless."""
        return relative_age(self.staleness, self.concurrency, self.pushes_per_version)

    def lr_of(self, block: str) -> float:
        """Learning rate of one block; 0 for one that ``lr`` does not name.

        Args:
            block: the block.

        Returns:
            The rate.
        """
        return self.lr.get(block, 0.0) if isinstance(self.lr, Mapping) else self.lr


class Gate(ABC):
    """Decides on each push of one rank.

    Contract. An instance belongs to one rank and keeps that rank's state. ``decide`` never writes to the gradients it
    is given; where nothing changes it returns the very same tensors. NaN or Inf in any block gives ``rejected=True``
    with a reason that names the first such block, and leaves the state as if the push had not been. On an accelerator
    ``decide`` makes the host wait at most once.

    Class attributes:
        runs_on: ``"rank"`` for gates that need the rank's own history, ``"server"`` for others.
        needs: optional fields of :class:`GateContext` that the caller must fill.
        needs_view: whether ``decide`` looks at staleness, window or scale, which a rank has to ask the server for.
        simulated_only: why only :func:`lightning_g2.simulate.simulate` can run the rule; empty where real runs can too.
    """

    runs_on: ClassVar[Literal["rank", "server"]] = "rank"
    needs_view: ClassVar[bool] = True
    simulated_only: ClassVar[str] = ""

    @property
    def blockwise(self) -> bool:
        """Whether deciding on the parts of a push one by one gives every block what deciding on the whole gives it.

        What holds for a push as a whole (that it is too old) is then decided for each part.
        """
        return False

    @property
    def staleness_cost(self) -> float:
        """What is left of the cost of a push's age, 1 where the gate takes nothing away; for ``rounds="auto"``."""
        return 1.0

    @property
    def needs(self) -> frozenset[Need]:
        """Optional context fields that this instance uses."""
        return frozenset()

    @abstractmethod
    def decide(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        """Decide on one push.

        Args:
            gradients: gradient of each block by name, no None among them; any dtype, layout and device.
            context: what is known beside them.

        Returns:
            The decision; its gradients have the same keys, dtypes and strides.
        """

    def may_begin(self, lead: int) -> bool:
        """Whether the rank may begin its next gradient, or has to wait for slower ranks.

        Args:
            lead: pushes of this rank less those of the slowest one.
        """
        return True

    def look_ahead(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        """Weights to compute the next gradient on, given those that were read.

        Args:
            weights: by name, detached; not to be written to.
            version: their version.
        """
        return weights

    def describe(self) -> str:
        """Name and the options that matter, for the strategy's start-up line."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """State to be kept in a checkpoint; empty for a gate without state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - a gate without state needs none
        """Restore what :meth:`state_dict` gave.

        Args:
            state: of a gate with the same options.
        """


def magnitude(gradient: Tensor) -> Tensor | None:
    """Largest absolute entry, on the device: NaN or Inf exactly where the gradient holds one.

    Args:
        gradient: any dtype; a sparse one is judged by its stored values.

    Returns:
        Shape (), or None for a tensor that is empty or cannot hold NaN.
    """
    values = gradient.detach()
    if values.is_sparse:
        values = values._values()
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.dtype.is_floating_point or values.numel() == 0:
        return None
    # On the CPU torch's maximum norm takes 19 times as long.
    low, high = torch.aminmax(values)
    return torch.maximum(low.abs(), high.abs())


def read_push(gradients: Mapping[str, Tensor], numbers: list[Tensor]) -> tuple[str, list[float]]:
    """Judge a push and bring numbers about it to the host, in one transfer.

    Args:
        gradients: by name.
        numbers: tensors of shape (), real.

    Returns:
        Why the push cannot be used, the first block with NaN or Inf (empty for a sound one), and the numbers.
    """
    sizes = {name: size for name, tensor in gradients.items() if (size := magnitude(tensor)) is not None}
    host = to_host([*numbers, *sizes.values()])
    read = host[: len(numbers)]
    for name, largest in zip(sizes, host[len(numbers) :], strict=True):
        if not math.isfinite(largest):
            return f"NaN or Inf in {name}", read
    return "", read


def unsound(gradients: Mapping[str, Tensor]) -> str:
    """Why a push cannot be used, see :func:`read_push`.

    Args:
        gradients: by name.
    """
    return read_push(gradients, [])[0]


def is_filterable(gradient: Tensor) -> bool:
    """Whether a rule's arithmetic applies to a block: dense, real and floating; other blocks pass as they are.

    Args:
        gradient: any tensor.
    """
    return gradient.dtype.is_floating_point and gradient.layout == torch.strided and gradient.numel() > 0


def rejection(gradients: Mapping[str, Tensor], reason: str, energy: float = 0.0) -> GateDecision:
    """Decision not to send a push.

    Args:
        gradients: of the push.
        reason: why.
        energy: of the push.
    """
    return GateDecision(gradients, energy=energy, weight=0.0, rejected=True, reason=reason)


def to_host(values: list[Tensor]) -> list[float]:
    """Bring scalars to the host in one transfer per device, one in all where they share a device.

    Args:
        values: tensors of shape (), real.

    Returns:
        Their values, in order.
    """
    if not values:
        return []
    dtype = values[0].dtype
    if any(value.dtype != dtype for value in values):
        dtype = torch.float64
    device = values[0].device
    gathered: list[float] = torch.stack([value.to(device=device, dtype=dtype) for value in values]).tolist()
    return gathered
