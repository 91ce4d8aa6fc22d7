"""A task of conf/ as a simulation takes it: a module, its loss, batches to train, to choose and to report on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn

from lightning_g2.cli.train import Job, build, config_dir, resolve
from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.recipe import RecipeModule


@dataclass(frozen=True)
class Task:
    """A module and its data.

    Attributes:
        model: makes the module.
        validation: held-out batches that learning rates are chosen on.
        test: other held-out batches, which are reported.
        stream: gives training batches without end.
    """

    model: Callable[[], nn.Module]
    validation: Sequence[Any]
    test: Sequence[Any]
    stream: Callable[[], Iterator[Any]]

    def batches(self) -> Callable[[int, int], Any]:
        """Training batches in the loader's order, to whichever rank begins."""
        stream = self.stream()
        return lambda rank, k: next(stream)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The module's own loss of a batch."""
    assert isinstance(model, RecipeModule)
    return model.loss(batch)


def load_task(overrides: Sequence[str], held_out: int, seed: int) -> Task:
    """Build a task of the configuration.

    Args:
        overrides: Hydra's, such as ``model=mlp``, ``data=digits``, ``model.width=64``.
        held_out: held-out batches to use at most.
        seed: of the training data, where the task draws them.

    Raises:
        ConfigurationError: the model has no loss of a batch, or there are too few held-out batches.
    """
    given = ["output_dir=.", "strategy_name=simulated", f"seed={seed}", *overrides]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        job: Job = resolve(compose("config", overrides=given))
    data = build(job["data"])
    data.prepare_data()
    data.setup("fit")
    if not isinstance(build(job["model"]), RecipeModule):
        raise ConfigurationError(f"model={job['model']!r}: must be a RecipeModule, which knows the loss of a batch")

    def ready(batches: Iterable[Any]) -> Iterator[Any]:
        return (data.on_after_batch_transfer(batch, 0) for batch in batches)  # what a Trainer does before a step

    held = list(itertools.islice(ready(data.val_dataloader()), held_out))
    if len(held) == 1:  # one large batch: its samples are shared out
        held = [_part(held[0], start) for start in (0, 1)]
    if len(held) < 2:
        raise ConfigurationError(f"task {' '.join(overrides)}: has no held-out batch; rates cannot be chosen without")

    def stream() -> Iterator[Any]:
        return ready(itertools.chain.from_iterable(iter(data.train_dataloader()) for _ in itertools.count()))

    return Task(lambda: build(job["model"]), held[0::2], held[1::2], stream)


def terminal_loss(model: nn.Module, batches: Sequence[Any]) -> float:
    """Mean loss over batches, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return sum(float(loss_of(model, batch)) for batch in batches) / len(batches)


def _part(batch: Any, start: int) -> Any:
    """Every second sample of a batch."""
    if isinstance(batch, Tensor):
        return batch[start::2]
    return type(batch)([_part(item, start) for item in batch])
