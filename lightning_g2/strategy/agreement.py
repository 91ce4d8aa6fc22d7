"""What ranks know of each other's metrics at a sync point, so that their callbacks decide alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric, _Sync
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_g2.strategy.metric_scope import MetricScope, this_rank_alone
from lightning_g2.strategy.patches import Patches
from lightning_g2.strategy.sync_points import SyncPoints

Gather = Callable[[Any], list[Any]]
"""An object of this rank in, the objects of all ranks in order of rank out."""

_UNSAVED = ("_last_checkpoint_saved", "_defer_save_until_validation")
"""What ModelCheckpoint decides by and does not save."""


@dataclass(frozen=True)
class Logged:
    """A value that a rank has logged over an epoch, as other ranks need to know it.

    Attributes:
        value: the sum of values times batch sizes where ``op`` is mean, else the value; None for a metric object.
        weight: the sum of batch sizes, where ``op`` is mean.
        op: how values of ranks are reduced: mean, sum, min or max.
        shared: whether the user asked for the reduction (``sync_dist=True``).
    """

    value: Tensor | None
    weight: Tensor | None
    op: str
    shared: bool

    @classmethod
    def of(cls, metric: _ResultMetric) -> Logged:
        """Take it from Lightning's record."""
        meta = metric.meta
        shared = meta.sync.should and not meta.sync.rank_zero_only and meta.sync.group is None
        if not metric.is_tensor:
            return cls(None, None, "", shared)
        weight = metric.cumulated_batch_size.cpu() if meta.is_mean_reduction else None
        return cls(metric.value.detach().cpu(), weight, meta.reduce_fx.__name__, shared)


def reduced(logged: Sequence[Logged]) -> Tensor:
    """One value of those that some ranks have logged, at least one: a mean weighs every sample alike."""
    values = [entry.value for entry in logged if entry.value is not None]
    if logged[0].op == "max":
        return reduce(torch.maximum, values)
    if logged[0].op == "min":
        return reduce(torch.minimum, values)
    total = reduce(torch.add, values)
    weights = [entry.weight for entry in logged if entry.weight is not None]
    return total / reduce(torch.add, weights) if logged[0].op == "mean" else total


class Agreement:
    """Gives all ranks the same epoch-end metrics and the same state of the callbacks that monitor them.

    Lightning reduces each logged value by a collective of its own, and callbacks decide by a number of collectives that
    depends on what a rank has logged: ranks that log other keys would wait for each other without end. Here ranks tell
    each other at fixed points all they have logged, and each works the reductions out. Values of a step are a rank's
    own; values of an epoch are reduced over the ranks that logged them. A value that a callback or a schedule monitors,
    and that ranks have no common value of, is rank 0's, or the lowest rank's that has it.

    Args:
        trainer: the trainer.
        points: tells whether ranks are together.
        gather: collects an object from every rank.
    """

    def __init__(self, trainer: Trainer, points: SyncPoints, gather: Gather) -> None:
        self._trainer = trainer
        self._connector = trainer._logger_connector
        self._points = points
        self._gather = gather
        self._scope = MetricScope(trainer, points)
        self._patches = Patches()
        self._rounds = 0
        self._ended = False
        self._received: dict[str, Tensor] = {}
        self._warned: set[str] = set()

    def install(self) -> None:
        """Stand where Lightning logs values, reads them and lets callbacks see them."""
        self._scope.install()
        trainer, put = self._trainer, self._patches.put
        epoch_loop = trainer.fit_loop.epoch_loop
        for loop in (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            results = loop._results
            put(results, "log", _without_collective(results.log))
            put(results, "metrics", self._peeking(results, results.metrics))
        put(
            self._connector, "update_eval_epoch_metrics", self._after(self._dataloader_end, "update_eval_epoch_metrics")
        )
        put(self._connector, "on_epoch_end", self._after(self._epoch_end, "on_epoch_end"))
        monitoring = [c for c in self._callbacks() if isinstance(c, (EarlyStopping, Checkpoint))]
        for callback in monitoring[:1]:  # these come last, after the module's hook, which may log, too
            put(callback, "on_train_epoch_end", _preceded(self._epoch_end, callback.on_train_epoch_end))

    def remove(self) -> None:
        """Leave all of it to Lightning again."""
        self._patches.remove()
        self._scope.remove()

    def meet(self) -> None:
        """All ranks have come to a sync point."""
        self._scope.forget_values()

    def share_callbacks(self) -> None:
        """Give every rank rank 0's state of the callbacks that monitor: between sync points they went their own way."""
        if not self._points.together:
            return
        callbacks = [c for c in self._callbacks() if isinstance(c, (EarlyStopping, ModelCheckpoint))]
        states = self._gather([self._state(c) for c in callbacks] if self._trainer.is_global_zero else None)[0]
        if not self._trainer.is_global_zero:
            for callback, state in zip(callbacks, states, strict=True):
                self._restore(callback, state)

    def agree(self) -> None:
        """Reduce what is logged and not yet reduced, then give monitored names one value; a collective."""
        if not self._points.together:
            return
        results = self._trainer._results
        pending = {} if results is None else _pending(results)
        gathered = self._gather(({key: Logged.of(m) for key, m in pending.items()}, self._scope.names()))
        self._scope.limit_to(set.intersection(*(set(names) for _, names in gathered)))
        self._scope.warn_about(_partial([names for _, names in gathered]))
        everyone: list[dict[str, Logged]] = [logged for logged, _ in gathered]
        for key in dict.fromkeys(key for logged in everyone for key in logged):
            holders = [logged[key] for logged in everyone if key in logged]
            self._settle(key, pending.get(key), holders, ranks=len(everyone))
        if self._trainer.state.fn == "fit":
            self._share_monitored(results)

    def _settle(self, key: str, mine: _ResultMetric | None, holders: Sequence[Logged], *, ranks: int) -> None:
        partly = len(holders) < ranks
        if partly and holders[0].shared and key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(f"{key!r} is logged on {len(holders)} of {ranks} ranks: reduced over those")
        if mine is None:
            return
        if mine.is_tensor and holders[0].shared:
            _set_result(mine, reduced(holders).to(mine.value.device))
        elif mine.is_tensor or not partly:
            mine.compute()  # a metric object gathers here, on all ranks alike
        else:
            with this_rank_alone():
                mine.compute()

    def _share_monitored(self, results: _ResultCollection | None) -> None:
        names = self._monitored()
        known = self._connector.callback_metrics
        # What this rank has only been told is no value of its own; another rank may have a newer one.
        own = {n: known[n] for n in sorted(names) if n in known and known[n] is not self._received.get(n)}
        everyone = self._gather({name: value.detach().cpu() for name, value in own.items()})
        for name in names:
            value = next((metrics[name] for metrics in everyone if name in metrics), None)
            if value is None or (name in own and torch.equal(own[name].cpu(), value)):
                continue
            value = value.to(self._trainer.strategy.root_device)
            self._connector._callback_metrics[name] = self._received[name] = value
            for metric in () if results is None else _epoch_metrics(results).values():
                if results is not None and name in results._forked_name(metric, on_step=False):
                    _set_result(metric, value)

    def _monitored(self) -> set[str]:
        names = {getattr(callback, "monitor", None) for callback in self._callbacks()}
        names |= {config.monitor for config in self._trainer.lr_scheduler_configs if config.reduce_on_plateau}
        for callback in self._callbacks():
            if isinstance(callback, ModelCheckpoint):  # names of files are made of metrics
                names |= set(re.findall(r"\{([^:}]+)", callback.filename or ""))
        return {name for name in names if isinstance(name, str)} - {"epoch", "step"}

    def _dataloader_end(self) -> None:
        if self._ended:  # Lightning reads once more after the evaluation's end
            self._ended = False
            return
        # Once for each dataloader on every rank, whatever number of them has batches here.
        loop = self._trainer._evaluation_loop
        current = loop._results.dataloader_idx or 0
        while self._rounds <= min(current, loop.num_dataloaders - 1):
            self._rounds += 1
            self.agree()

    def _epoch_end(self) -> None:
        if self._trainer.training:
            self.agree()
            return
        loop = self._trainer._evaluation_loop
        while self._rounds < loop.num_dataloaders:
            self._rounds += 1
            self.agree()
        self._rounds, self._ended = 0, True
        self.agree()

    def _after(self, first: Callable[[], None], name: str) -> Callable[..., Any]:
        return _preceded(first, getattr(self._connector, name))

    def _peeking(self, results: _ResultCollection, original: Callable[[bool], Any]) -> Callable[[bool], Any]:
        def metrics(on_step: bool) -> Any:
            pending = [] if on_step or not self._points.together else list(_pending(results).values())
            if not pending:
                return original(on_step)
            # A rank that looks before all have agreed sees its own values, and reduces with the others later.
            with this_rank_alone():
                seen = original(on_step)
            for metric in pending:
                metric._computed = None
                if not metric.is_tensor:
                    metric.value._computed = None
            return seen

        return metrics

    def _callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    def _state(self, callback: EarlyStopping | ModelCheckpoint) -> dict[str, Any]:
        state = {"saved": apply_to_collection(callback.state_dict(), Tensor, lambda t: t.detach().cpu())}
        if isinstance(callback, ModelCheckpoint):
            state |= {name: getattr(callback, name) for name in _UNSAVED}
            state["at_this_step"] = callback._last_global_step_saved == self._trainer.global_step
        return state

    def _restore(self, callback: EarlyStopping | ModelCheckpoint, state: dict[str, Any]) -> None:
        callback.load_state_dict(state["saved"])
        if isinstance(callback, ModelCheckpoint):
            for name in _UNSAVED:
                setattr(callback, name, state[name])
            callback._last_global_step_saved = self._trainer.global_step if state["at_this_step"] else -1


class AgreementCallback(Callback):
    """Lets ranks agree on the hooks that follow a sync point; stands behind the callback that enters it."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Callbacks that monitor run at the validation's end."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._agreement.share_callbacks()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reduce what training steps have logged, before any callback looks at it."""
        self._agreement.share_callbacks()
        self._agreement.agree()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End with one list of best checkpoints, which ``ckpt_path="best"`` will look at."""
        self._agreement.share_callbacks()


def _epoch_metrics(results: _ResultCollection) -> dict[str, _ResultMetric]:
    return {key: metric for key, metric in results.valid_items() if metric.meta.on_epoch}


def _pending(results: _ResultCollection) -> dict[str, _ResultMetric]:
    return {key: metric for key, metric in _epoch_metrics(results).items() if metric._computed is None}


def _set_result(metric: _ResultMetric, value: Tensor) -> None:
    vars(metric)["_computed"] = value  # where a metric keeps what it has computed, until its next update or reset


def _without_collective(log: Callable[..., None]) -> Callable[..., None]:
    def logged(*args: Any, sync_dist_group: Any = None, sync_dist_fn: Any = None, **kwargs: Any) -> None:
        fn = _Sync.no_op if sync_dist_group is None else sync_dist_fn
        log(*args, sync_dist_group=sync_dist_group, sync_dist_fn=fn, **kwargs)

    return logged


def _preceded(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        first()
        return then(*args, **kwargs)

    return call


def _partial(names: Sequence[Sequence[str]]) -> set[str]:
    return {name for some in names for name in some if any(name not in others for others in names)}
