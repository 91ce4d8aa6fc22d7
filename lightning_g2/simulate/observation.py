"""What somebody who watches a simulation sees of one push."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from lightning_g2.routing import GateContext, GateDecision
from lightning_g2.values import PushReceipt


@dataclass(frozen=True, eq=False, kw_only=True)
class Observation:
    """One push that has just been taken in; tensors are not to be written to.

    Attributes:
        number: pushes that had arrived before.
        time: simulated time of arrival.
        gradients: gradient of each block by name, clipped, as the gate was given it.
        context: what the gate knew beside it; a gate that does not look at the server knows no staleness.
        decision: what the gate made of it.
        receipt: what the server made of it, with its staleness.
        before: weights at the decision, by name.
        after: weights once the server has taken the push in; equal to ``before`` where it made no version of its own:
            it was rejected, or is gathered with others.
    """

    number: int
    time: float
    gradients: Mapping[str, Tensor]
    context: GateContext
    decision: GateDecision
    receipt: PushReceipt
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


Observer: TypeAlias = Callable[[Observation], None]
