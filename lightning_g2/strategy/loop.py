"""Lightning's loops, driven by the counts of the whole job: a rank trains and meets the others when it is told to.

With several ranks every count of the Trainer means what it means for one process: an epoch is each batch once,
``max_steps`` counts the optimizer steps of all ranks. Between sync points a rank's own counters (``global_step``,
``batch_idx``) go up by one for each of its own steps and batches, so that users' ``% n`` and ``== n`` work; at sync
points ``global_step`` is the job's, and so are all counts in checkpoints.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader

from lightning_g2.callbacks.progress import JobProgress, JobProgressBar, LimitProgressBar
from lightning_g2.errors import ConfigurationError
from lightning_g2.server import first_share
from lightning_g2.strategy.dispatch import DispatchedBatches, batches_of, dispatched, reason_against
from lightning_g2.values import EpochCursor, EpochPlan, SyncPoint, Ticket, TicketRequest

if TYPE_CHECKING:
    from lightning_g2.strategy.strategy import G2AsyncStrategy


_KEY = "lightning_g2"
"""Entry of a checkpoint that says where its epoch goes on."""


@dataclass(frozen=True)
class ResumedEpoch:
    """How far a checkpoint's run had come in its epoch.

    Attributes:
        seed: what the order of batches was drawn with.
        batches: batches of the epoch.
        cursor: those still to be trained on.
    """

    seed: int
    batches: int
    cursor: EpochCursor


class ConductedEpochLoop(_TrainingEpochLoop):
    """Lightning's epoch loop, asking the server before each accumulation window what comes next."""

    job_batches = 0
    """Batches of the epoch that the whole job has begun, as far as this rank knows."""
    resumed: ResumedEpoch | None = None
    """Where a checkpoint says that the epoch goes on; read once."""

    _batches_before = 0
    """Batches of the whole job in earlier epochs."""
    _steps_before = 0
    """Optimizer steps before this fit, restored from a checkpoint."""
    _job_steps = 0
    """Optimizer steps of the whole job in this fit, as the server said last."""
    _own_steps = 0
    """Optimizer steps of this rank in this fit, as reported last."""
    _counted_at: int | None = None
    """The ``global_step`` at that report; what it has grown by since are this rank's steps."""
    _first_epoch = True
    _left = 0
    """Batches left in the window, the current one included."""
    _point: SyncPoint | None = None
    _skips = False
    _runs_dry = False
    _plan: EpochPlan
    _seed = 0

    # --- an epoch's start ---------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Start an epoch, or go on in one."""
        super().reset()
        if self._first_epoch:
            self._batches_before = self.batch_progress.total.ready - self.batch_progress.current.ready
        else:
            self._batches_before += self.job_batches
        self._first_epoch = False
        self._point, self._left, self.job_batches = None, 0, 0
        self._skips = self._runs_dry = False

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Agree on the epoch with the other ranks, and give loading workers their first batches."""
        batches = self._dispatched()
        fit_loop = self.trainer.fit_loop
        epoch = fit_loop.epoch_progress.current.processed
        resumed = self._resumed_epoch(epoch)
        self._seed = _seed() if resumed is None else resumed.seed
        self._plan = self._made_plan(data_fetcher, epoch, None if resumed is None else resumed.cursor)
        self.job_batches = self._plan.cursor.trained
        if batches is not None:
            batches.draw(self._seed, epoch)
            batches.give(first_share(self._plan, rank=self.trainer.global_rank, ranks=self.trainer.world_size))
            if self.trainer.current_epoch == 0 or fit_loop.is_resuming or self.restarting:
                iter(data_fetcher)  # the iterator made before was made before there were batches
        super().on_run_start(data_fetcher)
        if data_fetcher.length is not None:
            # In a resumed epoch, of batches of its own a rank has had its share.
            before = self._plan.cursor.trained
            data_fetcher.fetched = before if self._plan.shared else before // self.trainer.world_size
            data_fetcher.done = data_fetcher.fetched >= data_fetcher.length

    def begin_batch(self) -> Any | None:
        """Indices of the samples that this rank is about to train on; None where ranks bring their own data."""
        batches = self._dispatched()
        return None if batches is None else batches.begin()

    def _dispatched(self) -> DispatchedBatches | None:
        loader = self.trainer.fit_loop._combined_loader
        assert loader is not None
        return batches_of(loader.flattened[0]) if len(loader.flattened) == 1 else None

    def _resumed_epoch(self, epoch: int) -> ResumedEpoch | None:
        """What a checkpoint says of this epoch, if it still is about the same batches."""
        resumed, self.resumed = self.resumed, None
        if resumed is None or self._dispatched() is None:
            return None
        return resumed if (resumed.cursor.epoch, resumed.batches) == (epoch, self._job_batches()) else None

    def _job_batches(self) -> int | None:
        count, batches = self.trainer.num_training_batches, self._dispatched()
        if count == float("inf"):
            return None
        return int(count) if batches is None else min(int(count), len(batches))  # SWA adds one that is not there

    def _made_plan(self, fetcher: _DataFetcher, epoch: int, cursor: EpochCursor | None) -> EpochPlan:
        trainer, interval = self.trainer, self.trainer.val_check_batch
        loader = trainer.fit_loop._combined_loader
        assert loader is not None
        cursor = cursor or EpochCursor(epoch=epoch, next=self.batch_progress.current.ready)
        shared, endless = self._dispatched() is not None, interval == float("inf")
        return EpochPlan(
            epoch=epoch,
            batches=self._job_batches(),
            shared=shared,
            # A pass without backward, in which SWA collects statistics, is "accumulated" to the epoch's end.
            window=1 if trainer.fit_loop._skip_backward else trainer.accumulate_grad_batches,
            hold=loader.flattened[0].num_workers if shared else 0,
            cursor=cursor,
            steps=None if self.max_steps == -1 else max(self.max_steps - self._first_step(), 0),
            counts_windows=trainer.lightning_module.automatic_optimization,
            validates=self._should_check_val_epoch(),
            validate_every=None if interval is None or endless else int(interval),
            validate_at_end=endless or isinstance(fetcher, _DataLoaderIterDataFetcher),
            offset=self._batches_before if trainer.check_val_every_n_epoch is None else 0,
            validated=cursor.trained > 0 and not self.restarted_on_train_batch_end,
        )

    # --- windows and points -------------------------------------------------------------------------------------------

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Train on one batch, if the server has given this rank any; otherwise a sync point is due."""
        if self._left == 0:
            self._accept(self._request(data_fetcher))
        if self._point is not None:
            return
        before = self.batch_progress.current.ready
        try:
            super().advance(data_fetcher)
        except StopIteration:
            # Either the data ended earlier than they had said, or `on_train_batch_start` returned -1.
            self._skips = self.batch_progress.current.ready > before
            self._runs_dry = not self._skips
            self._left = 0

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """What follows a batch, or the validation of a sync point."""
        if self._point is None:
            if self._left > 0:  # otherwise there was no batch after all
                super().on_advance_end(data_fetcher)
                self._left = 0 if self.batch_progress.is_last_batch else self._left - 1
            return
        # Lightning validates before it counts the batch for loggers; the batch was counted when it ended.
        counted, self._batches_that_stepped = self._batches_that_stepped, max(self._batches_that_stepped - 1, 0)
        super().on_advance_end(data_fetcher)
        self._batches_that_stepped = counted

    def _request(self, fetcher: _DataFetcher, still_open: tuple[int, ...] = ()) -> Ticket:
        """Ask the server for a window; one who asks ahead says which earlier ones are still open."""
        trainer, plan = self.trainer, self._plan
        interval = trainer._val_check_time_interval
        request = TicketRequest(
            plan=plan,
            steps=self._counted_steps(),
            exhausted=self._runs_dry or (not plan.shared and fetcher.done),
            stop=self._wants_to_stop(),
            skip=self._skips,
            pushes=trainer.strategy.pushes,
            unpushed=trainer.strategy.unpushed,
            validate=interval is not None and time.monotonic() - trainer._last_val_time >= interval,
            open=still_open,
        )
        ticket: Ticket = trainer.strategy.ticket(request)
        self._skips = False
        return ticket

    def _accept(self, ticket: Ticket) -> None:
        """Take a window, or meet the other ranks at a sync point."""
        trainer, plan = self.trainer, self._plan
        if ticket.point is not None:
            trainer.strategy.meet_announced(ticket.point)
        self._left, self._point = ticket.batches, ticket.point
        self.job_batches, self._job_steps = ticket.first + ticket.batches, max(self._job_steps, ticket.steps)
        if plan.shared:
            batches = self._dispatched()
            assert batches is not None
            batches.give(ticket.numbers)
        if ticket.point is not None and ticket.point.ends_epoch:
            trainer.should_stop |= ticket.point.stop
            if ticket.point.finished:
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _wants_to_stop(self) -> bool:
        fit_loop = self.trainer.fit_loop
        if self.trainer.should_stop and not fit_loop._can_stop_early:
            self._warning_cache.info(
                f"Trainer was signaled to stop but min_epochs={fit_loop.min_epochs!r} or min_steps={self.min_steps!r} "
                "has not been met: training goes on"
            )
        return bool(self.trainer.should_stop and fit_loop._can_stop_early)

    # --- what Lightning's loops ask -----------------------------------------------------------------------------------

    @property
    def _is_training_done(self) -> bool:
        return self._point is not None and self._point.ends_epoch

    @property
    def done(self) -> bool:
        """Whether the server has announced the end of the epoch."""
        return self._is_training_done and self._is_validation_done

    def _num_ready_batches_reached(self) -> bool:
        return self._point is not None and self._point.finished

    def _accumulated_batches_reached(self) -> bool:
        if self.trainer.fit_loop._skip_backward:
            return False
        return self._left <= 1 or self.batch_progress.is_last_batch

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        return self._point is not None and self._point.validate

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """As Lightning's; but a sync point is no step."""
        if self._point is None or interval != "step":
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _get_monitor_value(self, key: str) -> Any:
        # Rank 0's: schedules on a plateau must not part because ranks know different values.
        return self.trainer.strategy.broadcast(super()._get_monitor_value(key))

    # --- counts -------------------------------------------------------------------------------------------------------

    @property
    def job_step(self) -> int:
        """Optimizer steps of the whole job, those before this fit included, as far as this rank knows."""
        return self._first_step() + self._job_steps + (self.global_step - (self._counted_at or 0))

    def restart(self) -> None:
        """A training begins, and the server's counts with it; a fit with a finder in it has several."""
        self._counted_at, self._own_steps, self._job_steps, self._first_epoch = None, 0, 0, True

    def meet(self, steps: int) -> None:
        """All ranks are at a sync point; the job has made this many optimizer steps in this fit."""
        self._counted_steps()
        self._job_steps = steps
        self._counted_at = self._first_step() + steps
        progress = self.manual_optimization.optim_step_progress
        if self.trainer.lightning_module.automatic_optimization:
            progress = self.automatic_optimization.optim_progress.optimizer.step
        progress.total.ready = progress.total.completed = self._counted_at

    def steps_at(self, snapshot_steps: int) -> int:
        """Optimizer steps of the whole job in this fit, at a moment of which the server has told its count."""
        self._counted_steps()
        self._job_steps = max(self._job_steps, snapshot_steps)
        return self._job_steps

    def _first_step(self) -> int:
        if self._counted_at is None:
            self._steps_before = self._counted_at = self.global_step
        return self._steps_before

    def _counted_steps(self) -> int:
        self._first_step()
        assert self._counted_at is not None
        self._own_steps += self.global_step - self._counted_at
        self._counted_at = self.global_step
        return self._own_steps

    def put_job_counts(self, checkpoint: dict[str, Any], cursor: EpochCursor | None, *, buffered: int) -> None:
        """Replace this rank's own counts in a checkpoint by the job's, so that any strategy can resume from it.

        Args:
            checkpoint: a full checkpoint, as Lightning has put it together.
            cursor: what of the epoch the checkpoint's weights have not been trained on, where that is known.
            buffered: pushes that the server has, but not in these weights; where batches have numbers they will come
                again.
        """
        batches, steps = self.job_batches, self.job_step
        if cursor is not None and self._plan.batches is not None:
            batches, steps = cursor.trained, steps - buffered
            checkpoint[_KEY] = {
                "seed": self._seed, "batches": self._plan.batches, "epoch": cursor.epoch, "next": cursor.next,
                "loose": list(cursor.loose),
            }  # fmt: skip
        state = checkpoint["loops"]["fit_loop"]
        checkpoint["global_step"] = steps
        for name in ("automatic_optimization.optim_progress", "manual_optimization.optim_step_progress"):
            progress = state[f"epoch_loop.{name}"]
            total = (progress["optimizer"]["step"] if "optimizer" in progress else progress)["total"]
            if total["completed"]:  # only one of the two has been counting
                total["ready"] = total["completed"] = steps
        progress = state["epoch_loop.batch_progress"]
        behind = {field: self.batch_progress.current.ready - value for field, value in progress["current"].items()}
        for field, lag in behind.items():
            progress["current"][field] = batches - lag
            progress["total"][field] = self._batches_before + batches - lag
        progress["is_last_batch"] = self._plan.batches is not None and batches >= self._plan.batches

    def resume_from(self, checkpoint: dict[str, Any]) -> None:
        """Read where the epoch of a checkpoint goes on; files of other strategies do not say."""
        if (saved := checkpoint.get(_KEY)) is not None:
            cursor = EpochCursor(epoch=saved["epoch"], next=saved["next"], loose=tuple(saved["loose"]))
            self.resumed = ResumedEpoch(seed=saved["seed"], batches=saved["batches"], cursor=cursor)

    @property
    def seed(self) -> int:
        """What the order of the epoch's batches was drawn with."""
        return self._seed

    @property
    def progress(self) -> JobProgress:
        """How far the job has come in its epoch."""
        total = self.trainer.num_training_batches
        loader = self.trainer.fit_loop._combined_loader
        batches = None if loader is None else self._dispatched()
        if batches is None or (samples := batches.samples(int(total))) is None:
            return JobProgress(self.job_batches, total, "batches")
        return JobProgress(batches.samples(self.job_batches) or 0, samples, "samples")


class ConductedFitLoop(_FitLoop):
    """Lightning's fit loop, with the job's number of batches in place of the rank's."""

    epoch_loop: ConductedEpochLoop
    _loaders = 0

    @property
    def _can_stop_early(self) -> bool:
        enough_epochs: bool = self.epoch_progress.current.processed >= (self.min_epochs or 0)  # type: ignore[attr-defined]
        return enough_epochs and self.epoch_loop.job_step >= (self.min_steps or 0)

    def setup_data(self) -> None:
        """Set the training data up; afterwards counts are those of the job."""
        if self._combined_loader is not None and not self._should_reload_train_dl:
            return
        trainer, source = self.trainer, self._data_source
        requested, interval = source.dataloader, trainer.val_check_interval
        module = trainer.lightning_module
        allowed = module.allow_zero_length_dataloader_with_multiple_devices

        def counted() -> Any:
            loaders = requested()
            self._loaders = 1 if isinstance(loaders, DataLoader) else 2
            return loaders

        vars(source)["dataloader"] = counted
        module.allow_zero_length_dataloader_with_multiple_devices = True  # a rank may have no data
        if isinstance(interval, int):
            trainer.val_check_interval = 1.0  # Lightning would compare it with this rank's batches
        try:
            super().setup_data()
        finally:
            del vars(source)["dataloader"]
            trainer.val_check_interval = interval
            module.allow_zero_length_dataloader_with_multiple_devices = allowed
        if self._combined_loader is not None:
            self._count_for_all()

    def prepare(self, dataloader: object, prepare: Callable[[], object]) -> object:
        """Hand a training loader's batches out one by one, if the strategy's options and the loader allow it.

        Raises:
            ConfigurationError: ``dispatch="dynamic"`` was asked for and is impossible.
        """
        strategy = cast("G2AsyncStrategy", self.trainer.strategy)
        wanted = strategy.options.dispatch
        reason = reason_against(dataloader)
        if self._loaders > 1:
            reason = "there are several training loaders"
        elif is_param_in_hook_signature(self.trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
            reason = "training_step takes the loader's iterator"
        elif not self.trainer._accelerator_connector.use_distributed_sampler:
            reason = "use_distributed_sampler=False says that the loader splits the data among the ranks itself"
        if wanted == "dynamic" and reason is not None:
            raise ConfigurationError(
                f"dispatch='dynamic': the training batches cannot be handed out one by one, because {reason}; "
                "leave dispatch out"
            )
        if wanted == "static" or reason is not None:
            return prepare()
        assert isinstance(dataloader, DataLoader)
        return dispatched(dataloader, strategy.broadcast)

    def _count_for_all(self) -> None:
        trainer: Any = self.trainer
        assert self._combined_loader is not None
        own, interval = sized_len(self._combined_loader), trainer.val_check_interval
        if own is None:
            if isinstance(interval, int) and trainer._val_check_time_interval is None:
                trainer.val_check_batch = interval
            return
        if batches_of(self._combined_loader.flattened[0]) is None:
            counts = trainer.strategy.reduce(torch.tensor(own, device=trainer.strategy.root_device), reduce_op="sum")
            limit = trainer.limit_train_batches
            own = min(int(counts), limit) if isinstance(limit, int) else int(counts)
        self.max_batches = own
        if trainer._val_check_time_interval is not None or own == 0:
            return
        trainer.val_check_batch = interval if isinstance(interval, int) else max(1, int(own * interval))
        too_long = isinstance(interval, int) and interval > own and trainer.check_val_every_n_epoch is not None
        if too_long and trainer.limit_val_batches > 0:
            raise ValueError(
                f"val_check_interval={interval}: must be at most the {own} training batches of an epoch; "
                "limit_val_batches=0 turns validation off, check_val_every_n_epoch=None counts over epochs"
            )


class Conducted:
    """Puts the loops of a trainer under the server's direction and its bars at the job's pace, and gives them back.

    Args:
        trainer: a trainer that is about to fit with several ranks.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._fit_loop = trainer.fit_loop
        self._connector = trainer._data_connector
        self._classes = (type(self._fit_loop), type(self._fit_loop.epoch_loop))
        bars = [c for c in trainer.callbacks if isinstance(c, ProgressBar)]  # type: ignore[attr-defined]
        self._bars = [(bar, type(bar)) for bar in bars if not isinstance(bar, LimitProgressBar)]

    def install(self) -> None:
        """Put the conducted loops in place."""
        fit_class, epoch_class = self._classes
        for bar, bar_class in self._bars:
            bar.__class__ = mixed(JobProgressBar, bar_class)
        self._fit_loop.__class__ = mixed(ConductedFitLoop, fit_class)
        self._fit_loop.epoch_loop.__class__ = mixed(ConductedEpochLoop, epoch_class)
        original = self._connector._prepare_dataloader

        def prepare(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
            if mode != RunningStage.TRAINING:
                return original(dataloader, shuffle, mode)
            loop = self._fit_loop
            assert isinstance(loop, ConductedFitLoop)
            return loop.prepare(dataloader, lambda: original(dataloader, shuffle, mode))

        vars(self._connector)["_prepare_dataloader"] = prepare

    def remove(self) -> None:
        """Put Lightning's own loops back."""
        fit_class, epoch_class = self._classes
        loop = self._fit_loop.epoch_loop
        for name in [name for name in vars(loop) if name in vars(ConductedEpochLoop) or name == "_plan"]:
            delattr(loop, name)
        vars(self._fit_loop).pop("_loaders", None)
        loop.__class__ = epoch_class
        self._fit_loop.__class__ = fit_class
        vars(self._connector).pop("_prepare_dataloader", None)
        for bar, bar_class in self._bars:
            vars(bar).pop("_moved_at", None)
            bar.__class__ = bar_class


def mixed(mixin: type, cls: type) -> type:
    """A class like one of a trainer's objects, with a mixin before it."""
    # Users may have loops of their own; profilers name actions after the class.
    return type(cls.__name__, (mixin, cls), {"__module__": mixin.__module__})


def _seed() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
