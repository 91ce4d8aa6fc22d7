"""``training_step`` may return None on any number of ranks: no rank waits for another's gradients."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult

SKIPPED = object()
"""Stands for None while Lightning looks: with more than one rank it raises on None, which would hang DDP."""


class _SkippableResult(ClosureResult):
    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        output = None if training_step_output is SKIPPED else training_step_output
        return ClosureResult.from_training_step_output(output, normalize)


class SkippedSteps:
    """Lets automatic optimization take a skipped step from a strategy with several ranks.

    Args:
        trainer: the trainer that trains.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization

    def install(self) -> None:
        """Take :data:`SKIPPED` for None."""
        setattr(self._loop, "output_result_cls", _SkippableResult)  # noqa: B010 - an attribute of the class

    def remove(self) -> None:
        """Put Lightning's own result back."""
        vars(self._loop).pop("output_result_cls", None)
