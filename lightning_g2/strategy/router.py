"""Asks the gate about one push, and tells the user about pushes that do not pass."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor

from lightning_g2.callbacks.routing import G2RoutingCallback
from lightning_g2.routing import GateContext, GateDecision
from lightning_g2.strategy.client import RankClient
from lightning_g2.strategy.nonfinite import NonFiniteGradients, nonfinite_names
from lightning_g2.values import ServerView

_log = logging.getLogger("lightning.pytorch.g2async")


class PushRouter:
    """Puts together what a gate may know, and judges pushes that it rejects.

    Args:
        routing: the callback that owns the gate.
        client: this rank's end of the protocol.
        nonfinite: judges NaN and Inf.
        rank: this rank.
        ranks: number of ranks.
        lanes: windows of a rank that are under way at once.

    Raises:
        ConfigurationError: the gate needs base weights, and there are several optimizers.
    """

    def __init__(
        self,
        routing: G2RoutingCallback,
        client: RankClient,
        nonfinite: NonFiniteGradients,
        *,
        rank: int,
        ranks: int,
        lanes: int = 1,
    ) -> None:
        self.gate = routing.gate
        self._routing = routing
        self._client = client
        self._nonfinite = nonfinite
        self._rank = rank
        self._ranks = ranks
        self._lanes = lanes
        self._rejection_seen = False
        if "base_weights" in self.gate.needs:
            client.keep_base_weights()

    def route(
        self, optimizer: int, step: int, gradients: Mapping[str, Tensor], view: ServerView, staleness: int
    ) -> GateDecision:
        """Decide on the gradients of one optimizer.

        Args:
            optimizer: its index.
            step: optimizer steps so far.
            gradients: by parameter name.
            view: what the server says.
            staleness: of the gradients, versions.
        """
        needs_base = "base_weights" in self.gate.needs
        context = GateContext(
            rank=self._rank,
            staleness=staleness,
            concurrency=(view.ranks or self._ranks) * self._lanes,
            pushes_per_version=view.pushes_per_version,
            lr=self._client.learning_rate(optimizer),
            step=step,
            version=view.version,
            window=view.window,
            scale=view.scale,
            weights=self._weights(staleness),
            base_weights=self._client.base_weights() if needs_base else None,
        )
        decision = self._routing.route(gradients, context)
        if decision.rejected:
            self._tell(gradients, decision, step)
        return decision

    def _weights(self, staleness: int) -> Mapping[str, Tensor] | None:
        """The newest weights at hand; a gate that compares them with the base has the server's current ones fetched."""
        needs = self.gate.needs
        if "weights" not in needs:
            return None
        return self._client.current_weights() if "base_weights" in needs and staleness > 0 else self._client.weights()

    def admit(self, gradients: Mapping[str, Tensor], step: int) -> bool:
        """Whether the rank itself may step on gradients: not where they hold NaN or Inf.

        Moments that NaN has gone into never become finite again, and here no server keeps it out of them.

        Args:
            gradients: by parameter name.
            step: optimizer steps so far.
        """
        if not nonfinite_names(gradients):
            return True
        if warning := self._nonfinite.judge(gradients, step, "the rank steps without it"):
            _log.warning(warning)
        return False

    def _tell(self, gradients: Mapping[str, Tensor], decision: GateDecision, step: int) -> None:
        warning = self._nonfinite.judge(gradients, step)
        if not warning and not self._rejection_seen:
            warning = f"rank {self._rank}: a push was rejected ({decision.reason}); g2/rejected counts all of them"
        if warning:
            self._rejection_seen = True
            _log.warning(warning)
