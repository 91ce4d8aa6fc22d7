"""A push whose gradients are routed and sent part by part, and counted once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_g2.routing.reading import mean_of_decisions
from lightning_g2.strategy.client import PushHead, RankClient, Route
from lightning_g2.strategy.nonfinite import nonfinite_names
from lightning_g2.values import GateDecision


class PushInParts:
    """One push under way.

    The gate decides on each part by what the server said before the first one. Where it finds NaN or Inf, that part and
    all later ones are rejected, and with them the push counts as rejected; earlier parts have been applied.

    Args:
        client: this rank's end of the protocol.
        head: what all packets say alike.
        route: gives the gate's decision function for this step.
    """

    def __init__(self, client: RankClient, head: PushHead, route: Callable[[], Route]) -> None:
        self._client = client
        self._head = head
        self._route = route
        self._sent: set[int] = set()
        self._refused: set[int] = set()
        self._decisions: list[GateDecision] = []
        self._spoiled = False

    @property
    def dealt_with(self) -> set[int]:
        """Parameters whose gradients are on their way, or have been rejected."""
        return self._sent | self._refused

    def send(
        self, gradients: Mapping[int, Tensor], *, at: int = 0, fresh: bool = False, lr_factor: float = 1.0
    ) -> bool:
        """Route some gradients, and send what the gate lets pass.

        Args:
            gradients: by index.
            at: where in the rank's buffer for gradients there is room, bytes.
            fresh: the answer brings the new weights of these parameters.
            lr_factor: what their learning rates are multiplied by.

        Returns:
            Whether a packet is on its way.
        """
        decision = self._decide(gradients, lr_factor)
        if decision.rejected:
            return False
        self._client.send(self._head, gradients, decision, last=False, at=at, fresh=fresh)
        self._sent.update(gradients)
        return True

    def close(
        self, rest: Mapping[int, Tensor], *, at: int = 0, samples: int | None = None, lr_factor: float = 1.0
    ) -> None:
        """Send the last packet, with what is left.

        Args:
            rest: gradients by index; may be empty.
            at: see :meth:`send`.
            samples: training samples behind the push, where that was not known before.
            lr_factor: see :meth:`send`.
        """
        closing = GateDecision({})
        if rest and (closing := self._decide(rest, lr_factor)).rejected:
            rest = {}
        energy, weight = mean_of_decisions(self._decisions)
        closing = replace(
            closing, energy=energy, weight=weight, rejected=self._spoiled or not (self._sent or rest),
            scale={b: s for d in self._decisions if d.rejected or d is closing for b, s in d.scale.items()},
        )  # fmt: skip
        head = self._head if samples is None else replace(self._head, samples=samples)
        self._client.send(head, rest, closing, at=at, unsent=tuple(self._refused))

    def _decide(self, gradients: Mapping[int, Tensor], lr_factor: float) -> GateDecision:
        named = self._client.by_name(gradients)
        if self._spoiled:
            decision = GateDecision(named, weight=0.0, rejected=True, reason="an earlier part holds NaN or Inf")
        else:
            with self._client.spent.deciding():
                decision = self._route()(named, self._head.view, self._head.staleness)
        if decision.rejected:
            self._spoiled |= bool(nonfinite_names(named))
            self._refused.update(gradients)
        if lr_factor != 1.0:
            decision = replace(decision, lr_factor=decision.lr_factor * lr_factor)
        self._decisions.append(decision)
        return decision


def dense(gradients: Mapping[int, Tensor]) -> bool:
    """Whether all gradients are dense, so that their size is known beforehand."""
    return all(gradient.layout == torch.strided for gradient in gradients.values())
