"""Options of decoupled training, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_g2.errors import ConfigurationError

Weights = Literal["current", "stashed"]
UpdateUnit = Literal["layer", "block"]
ClipScope = Literal["layer", "global"]
Correction = Literal["none", "pipemare"]


@dataclass(frozen=True, kw_only=True)
class DecoupledOptions:
    """How forward and backward passes are spread over threads.

    Attributes:
        forward_threads: threads that run forward passes, ≥ 1.
        backward_threads: threads that run backward passes; 0: each forward thread walks back through its own graph
            (with ``update="layer"`` or ``"block"`` that is Hogwild).
        max_graphs: most batches under way at once, from their submission to their update: a bounded queue. Further ones
            wait, none is dropped. None: one in each thread, and one between them where backward threads can keep up
            (two for each forward thread, as a backward pass costs about two forward passes); where they cannot, one
            more would only be one version older. 1: forward and backward take turns, as in plain training.
        weights: what the backward pass multiplies with. ``"current"``: the weights as they are by then, as in the
            paper. ``"stashed"``: those of the forward pass, copied; costs a copy of the parameters for each graph.
        update: ``"layer"`` updates each layer as soon as its gradient exists; ``"block"`` all layers at the end of the
            backward pass (D-ASGD).
        accumulate: batches behind one update; their losses are divided by it.
        clip_norm: largest norm of a gradient, see ``clip_scope``; None does not clip.
        clip_value: largest absolute entry of a gradient; None does not clip.
        clip_scope: ``"layer"`` clips each layer by its own norm; ``"global"`` all by the norm of the whole gradient,
            which only ``update="block"`` knows in time.
        private_state: each thread that updates keeps optimizer state of its own, as LAP-SGD's processes keep their
            momentum; it is lost with the thread. Otherwise the state is one, like the weights.
        own_block: ``(i, n)``: from ``own_block_after`` on, every other batch brings gradients for the i-th of n
            contiguous blocks of the parameters alone (LPP-SGD); None: for all, always.
        own_block_after: batches before that.
        correction: ``"pipemare"`` corrects for delays, see :class:`~lightning_g2.decoupled.correction.PipeMare`.
        correction_steps: updates over which PipeMare's smaller learning rates give way to the full one.

    Raises:
        ConfigurationError: a value is out of range, or contradicts another.

    Source:
        arXiv 2410.05985 (PD-ASGD); arXiv 1910.05124 (PipeMare); B. Chatterjee, V. Kungurtsev, D. Alistarh, "Scaling the
        Wild: Decentralizing Hogwild!-style Shared-memory SGD" (2022), LAP-SGD and LPP-SGD.
    """

    forward_threads: int = 1
    backward_threads: int = 2
    max_graphs: int | None = None
    weights: Weights = "current"
    update: UpdateUnit = "layer"
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    clip_scope: ClipScope = "layer"
    private_state: bool = False
    own_block: tuple[int, int] | None = None
    own_block_after: int = 0
    correction: Correction = "none"
    correction_steps: int = 1000

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{name}={value!r}: must be an integer ≥ {least}")
        if self.max_graphs is not None and (not isinstance(self.max_graphs, int) or self.max_graphs < 1):
            raise ConfigurationError(f"max_graphs={self.max_graphs!r}: must be an integer ≥ 1; None lets it follow")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r}: must be one of {', '.join(map(repr, allowed))}"
                )
        if self.own_block is not None and not 0 <= self.own_block[0] < self.own_block[1]:
            raise ConfigurationError(f"own_block={self.own_block!r}: must be (i, n) with 0 ≤ i < n")
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name}={value!r}: must be > 0; None does not clip")
        if self.clip_norm is not None and self.clip_scope == "global" and self.update == "layer":
            raise ConfigurationError(
                "clip_scope='global' with update='layer': the norm of the whole gradient is known only when the first "
                "layers have been updated; clip with clip_scope='layer', or update the whole with update='block' "
                "(and weights='stashed' for the gradient of one set of weights)"
            )
        if self.correction == "pipemare" and self.weights == "stashed":
            raise ConfigurationError(
                "correction='pipemare' with weights='stashed': the backward pass has the forward's weights already; "
                "use weights='current'"
            )

    @property
    def graphs(self) -> int:
        """Most batches under way at once."""
        queue = int(self.backward_threads >= 2 * self.forward_threads)
        return self.max_graphs or self.forward_threads + self.backward_threads + queue


_LEAST = {"forward_threads": 1, "backward_threads": 0, "accumulate": 1, "own_block_after": 0, "correction_steps": 1}

_CHOICES: dict[str, tuple[str, ...]] = {
    "weights": get_args(Weights),
    "update": get_args(UpdateUnit),
    "clip_scope": get_args(ClipScope),
    "correction": get_args(Correction),
}
