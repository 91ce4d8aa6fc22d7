"""How several pushes make one version: buffers of K pushes, and synchronous rounds that end with the first m.

Pure bookkeeping and sums; :class:`~lightning_g2.server.state.ServerState` decides when an optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_g2.routing.option import require, require_choice
from lightning_g2.server.cadence import Criterion
from lightning_g2.server.parts import OpenPush
from lightning_g2.values import Late as Late
from lightning_g2.values import PushPacket

BufferWeights = Literal["equal", "fedbuff"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Aggregation:
    """How many pushes make one version.

    Attributes:
        aggregate: K. The mean of K pushes makes a version, whatever weights they were computed from; a rank goes on
            at once. 1 is plain asynchrony.
        rounds: m. The mean of the first m pushes of the current version makes the next one, and a rank whose push is
            among them waits for it; None for no rounds.
        late: what becomes of a push whose round had ended before it came: ``"drop"``, or ``"gate"``: where the gate has
            let it pass, it joins the current round.
        buffer_weights: what a push counts in the mean: ``"equal"``, all the same; ``"fedbuff"``, 1/√(1+τ) with τ its
            staleness in versions, while the sum is still divided by K (arXiv 2106.06639).
        delayed_nesterov: each push makes a version, at 1/K of the rate, and momentum moves with every K-th, see
            :class:`~lightning_g2.server.outer.DelayedNesterov`.
        auto: m, or no rounds, is chosen by this from the times of arrival, again and again; ``rounds`` is what is in
            force.
    """

    aggregate: int = 1
    rounds: int | None = None
    late: Late = "drop"
    buffer_weights: BufferWeights = "equal"
    delayed_nesterov: bool = False
    auto: Criterion | None = None

    def __post_init__(self) -> None:
        require_choice("buffer_weights", self.buffer_weights, get_args(BufferWeights))
        require_choice("delayed_nesterov", self.delayed_nesterov, (True, False))
        weighted, delayed = self.buffer_weights != "equal", self.delayed_nesterov
        require(
            self.aggregate > 1 or not weighted, "buffer_weights", self.buffer_weights, "be 'equal' beside aggregate=1",
            "give aggregate=2 or more; gate='polynomial' weighs pushes that are applied one by one",
        )  # fmt: skip
        require(
            self.aggregate > 1 or not delayed, "delayed_nesterov", delayed, "be False beside aggregate=1",
            "give aggregate=K, the pushes to one move of the momentum",
        )  # fmt: skip
        require(
            not delayed or (self.rounds is None and self.auto is None), "delayed_nesterov", delayed,
            "be False beside rounds", "a round is one step already: leave one of the two out",
        )  # fmt: skip

    @property
    def pushes(self) -> int:
        """Pushes of one version, as long as there are so many ranks."""
        if self.delayed_nesterov:
            return 1
        return self.aggregate if self.rounds is None else self.rounds

    @property
    def may_wait(self) -> bool:
        """Whether a rank may have to wait for the answer to its push."""
        return self.rounds is not None or self.auto is not None

    def weight(self, staleness: int) -> float:
        """What a push of this staleness, in versions, counts in the mean."""
        return 1.0 if self.buffer_weights == "equal" else (1.0 + staleness) ** -0.5


ASYNCHRONOUS = Aggregation()
"""Each push makes a version."""


class GradientMean:
    """Mean of the gradients of several pushes, parameter by parameter.

    A parameter counts with zero in a push that has no gradient for it, as under DDP; where no push has one, neither has
    the mean. Half precision is added up in float32. Sparse gradients stay sparse and uncoalesced, unless another push
    has a dense one for the same parameter. The gradients of a single push come out as they went in.

    Args:
        by_samples: a push counts by its samples over the mean of all pushes so far.
    """

    def __init__(self, *, by_samples: bool = False) -> None:
        self.pushes = 0
        self._by_samples = by_samples
        self._sums: dict[int, Tensor] = {}
        self._samples = 0.0
        self._unit = 0.0  # the samples of a push that counts with 1
        self._before = (0, 0.0)  # pushes in earlier means, samples behind them

    def add(
        self,
        indices: Sequence[int],
        gradients: Sequence[Tensor],
        samples: float,
        *,
        single: bool,
        weight: float = 1.0,
    ) -> None:
        """Add one push.

        Args:
            indices: its parameters.
            gradients: their gradients.
            samples: training samples behind them, or behind a step where they are a sum of steps.
            single: it is all that the mean is of, so that its gradients need not be copied.
            weight: what its gradients are multiplied by; they count as one push all the same.
        """
        share = self._share(samples) * weight
        self.pushes, self._samples = self.pushes + 1, self._samples + samples
        totals: list[Tensor] = []
        terms: list[Tensor] = []
        for index, gradient in zip(indices, gradients, strict=True):
            total = self._sums.get(index)
            if total is None:
                self._sums[index] = gradient if single and weight == 1.0 else _copied(gradient, share)
            elif total.is_sparse or gradient.is_sparse:
                self._sums[index] = _sparse_sum(total, _copied(gradient, share))
            else:
                totals.append(total)
                terms.append(gradient)
        if totals:
            torch._foreach_add_(totals, terms, alpha=share)

    def factor(self, samples: int) -> float:
        """What :meth:`take` would multiply the gradients of a single push by, if it were the next one."""
        pushes, all_samples = self._before[0] + 1, self._before[1] + samples
        equal = not self._by_samples or samples * pushes == all_samples
        return 1.0 if equal else samples * pushes / all_samples

    def take(self) -> tuple[tuple[int, ...], list[Tensor]]:
        """The mean, as parameters and their gradients; the next one starts from nothing."""
        indices, tensors, count = tuple(self._sums), list(self._sums.values()), self.pushes
        pushes, samples = self._before[0] + count, self._before[1] + self._samples
        # Equal batches stay as they are, to the last bit.
        if self._by_samples and tensors and self._unit * pushes != samples:
            torch._foreach_mul_(tensors, self._unit * pushes / samples)
        if count > 1 and tensors:
            torch._foreach_div_(tensors, count)
        self._sums, self._before, self.pushes, self._samples = {}, (pushes, samples), 0, 0.0
        return indices, tensors

    def _share(self, samples: float) -> float:
        """What a push counts beside the first one of this mean."""
        if not self._by_samples:
            return 1.0
        if self.pushes == 0:
            self._unit = samples
        elif self._unit == 0 and samples > 0:  # those before it had none, and count nothing
            for total in self._sums.values():
                total.zero_()
            self._unit = samples
        return 1.0 if samples == self._unit else samples / self._unit


def _copied(gradient: Tensor, share: float) -> Tensor:
    wide = gradient.float() if gradient.dtype in _HALF else gradient.clone()
    return wide if share == 1.0 else wide.mul_(share)


def _sparse_sum(one: Tensor, other: Tensor) -> Tensor:
    if one.is_sparse and other.is_sparse and one.sparse_dim() == other.sparse_dim():
        return one + other
    return (one.to_dense() if one.is_sparse else one) + (other.to_dense() if other.is_sparse else other)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A push that has been taken in and is part of the next version.

    Attributes:
        packet: its control part, the last one of a push in several packets.
        push: what else is known of it.
        waits: its rank gets no answer before.
    """

    packet: PushPacket
    push: OpenPush
    waits: bool


@dataclass
class PushBuffer:
    """The pushes that make the next version of one optimizer, an optimizer within another being one of its own.

    Attributes:
        mean: of their gradients.
        count: arrivals, those without gradient (rejected ones) included.
        arrivals: those that something is still to be said to: all that have a gradient or whose rank waits.
        version: version that this optimizer's latest step has made; what was computed before is late in a round.
    """

    mean: GradientMean
    count: int = 0
    arrivals: list[Arrival] = field(default_factory=list)
    version: int = 0

    def clear(self) -> list[Arrival]:
        """Start the next version; returns the arrivals of this one."""
        arrivals, self.arrivals, self.count = self.arrivals, [], 0
        return arrivals
