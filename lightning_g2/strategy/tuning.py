"""Lightning's batch-size finder on several ranks: one search, one decision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.memory import is_oom_error

_OUT_OF_MEMORY = "CUDA out of memory. (on another rank)"  # the words by which Lightning knows such an error


def share_search(trainer: Trainer, any_rank: Callable[[bool], bool]) -> None:
    """Let the trainer's batch-size finders search on all ranks together.

    Lightning refuses them for every distributed strategy, because each rank would write a temporary checkpoint of its
    own name and would judge by its own memory alone. Here each rank keeps its own file for the time of the search, and
    a size is too large when it is so on any rank.

    Args:
        trainer: the trainer, before its callbacks are set up.
        any_rank: whether a flag is set on any rank; ends a trial that has ended early on this one.
    """
    found = [c for c in trainer.callbacks if isinstance(c, BatchSizeFinder)]  # type: ignore[attr-defined]
    for finder in found:
        vars(finder).setdefault("setup", _shared_setup(finder))
        vars(finder)["scale_batch_size"] = _shared_search(finder, any_rank)


def _shared_setup(finder: BatchSizeFinder) -> Callable[..., None]:
    def setup(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        connector = trainer._accelerator_connector
        trainer._accelerator_connector = _Undistributed(connector)  # type: ignore[assignment]
        try:
            type(finder).setup(finder, trainer, *args, **kwargs)
        finally:
            trainer._accelerator_connector = connector

    return setup


class _Undistributed:
    """An accelerator connector that says once that it is not distributed: to the check that would refuse the search."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector
        self._asked = False

    @property
    def is_distributed(self) -> bool:
        asked, self._asked = self._asked, True
        return asked and bool(self._connector.is_distributed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)


def _shared_search(finder: BatchSizeFinder, any_rank: Callable[[bool], bool]) -> Callable[..., None]:
    def scale_batch_size(trainer: Trainer, *args: Any) -> None:
        with _own_files(trainer.strategy), _one_verdict(trainer, any_rank):
            type(finder).scale_batch_size(finder, trainer, *args)

    return scale_batch_size


@contextmanager
def _own_files(strategy: Strategy) -> Iterator[None]:
    """Every rank, not only rank 0, writes and removes the checkpoints it asks for."""

    def save(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        strategy.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    vars(strategy).update(save_checkpoint=save, remove_checkpoint=strategy.checkpoint_io.remove_checkpoint)
    try:
        yield
    finally:
        for name in ("save_checkpoint", "remove_checkpoint"):
            vars(strategy).pop(name, None)


@contextmanager
def _one_verdict(trainer: Trainer, any_rank: Callable[[bool], bool]) -> Iterator[None]:
    """A trial that runs out of memory on one rank does so on all."""
    loop: Any = trainer._active_loop
    original = loop.run

    def run() -> Any:
        failure: RuntimeError | None = None
        result = None
        try:
            result = original()
        except RuntimeError as error:
            if not is_oom_error(error):
                raise
            failure = error
        if any_rank(failure is not None):
            raise failure or RuntimeError(_OUT_OF_MEMORY)
        return result

    loop.run = run
    try:
        yield
    finally:
        del loop.run
