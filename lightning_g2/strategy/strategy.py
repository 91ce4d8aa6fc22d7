"""``Trainer(strategy="g2async")``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Literal, NoReturn, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer

from lightning_g2.callbacks.monitor import G2MonitorCallback
from lightning_g2.callbacks.progress import JobProgress
from lightning_g2.callbacks.routing import G2RoutingCallback
from lightning_g2.decoupled import RunReport, free_threaded
from lightning_g2.decoupled.options import ClipScope, Correction, UpdateUnit, Weights
from lightning_g2.errors import ConfigurationError, DroppedError, G2Error, PeerFailedError, TransportError
from lightning_g2.server import FINAL_POINT, OuterName
from lightning_g2.server.aggregate import BufferWeights
from lightning_g2.strategy.agreement import Agreement, AgreementCallback
from lightning_g2.strategy.checkpoint import CADENCE_KEY, CheckpointSource, ResumeChoice, without_moments
from lightning_g2.strategy.client import RankClient
from lightning_g2.strategy.collectives import SyncPointStrategy
from lightning_g2.strategy.departure import Departure, LeaveJob
from lightning_g2.strategy.epoch_log import EpochLog
from lightning_g2.strategy.equal_weights import EqualWeightsCallback, WeightNorms, take_from_rank_0
from lightning_g2.strategy.launcher import G2ScriptLauncher
from lightning_g2.strategy.layerwise_refusal import (
    refuse_gate_of_whole_pushes,
    refuse_stepping_in_parts,
    refuse_whole_gradients,
)
from lightning_g2.strategy.local_steps import OUTER_KEY
from lightning_g2.strategy.lockstep import Lockstep
from lightning_g2.strategy.loop import Conducted, ConductedEpochLoop
from lightning_g2.strategy.members import Members
from lightning_g2.strategy.nonfinite import FiniteStatistics
from lightning_g2.strategy.optimizer_state import load_exactly
from lightning_g2.strategy.options import (
    BUCKET_BYTES,
    OPTION_NAMES,
    Consistency,
    Dispatch,
    G2AsyncOptions,
    LrClock,
    MasterDtype,
    OnNonfinite,
    OnSigterm,
    Pull,
    Push,
    StartMethod,
    TransportName,
    WireDtype,
    accept_options,
)
from lightning_g2.strategy.ownership import uninitialised
from lightning_g2.strategy.refusal import (
    refuse_environment,
    refuse_notebook,
    refuse_optimizers,
    refuse_recording,
    refuse_servers,
)
from lightning_g2.strategy.session import Session
from lightning_g2.strategy.skipped_step import SKIPPED, SkippedSteps
from lightning_g2.strategy.stopping import describe, log, stopping
from lightning_g2.strategy.stopwatch import Stopwatch
from lightning_g2.strategy.sync_points import SyncPointCallback, SyncPoints, average_buffers
from lightning_g2.strategy.threads.rank import SettledCheckpoints, ThreadedRank, ThreadsAlone
from lightning_g2.strategy.threads.refusal import refuse_training, thread_options
from lightning_g2.strategy.threads.updates import OwnUpdates
from lightning_g2.strategy.training import RankTraining
from lightning_g2.strategy.tuning import share_search
from lightning_g2.strategy.worker_launcher import G2WorkerLauncher
from lightning_g2.transport import Transport
from lightning_g2.values import EpochRecord, Late, PushRecord, RankTotals, ServerView, SyncPoint, Ticket, TicketRequest


class _Part(Protocol):
    """Something that changes one of Lightning's objects for a while."""

    def install(self) -> None: ...

    def remove(self) -> None: ...


P = TypeVar("P", bound=_Part)

_LEAVE_LIMIT_S = 10.0
"""After a failure: how long rank 0 keeps the server up for other ranks to learn why the job ends."""

_BLAME_LIMIT_S = 20.0  # less than the launcher's GRACE_S
"""How long to wait, after a collective broke, for the server to learn which rank has failed."""


class G2AsyncStrategy(SyncPointStrategy):
    """Asynchronous training: each rank pushes gradients to, and pulls weights from, a parameter server.

    No rank waits for another between sync points (validation, epoch ends, the end of training). The base class gives
    devices, samplers and collectives; no module is ever wrapped for all-reduce.

    Args:
        gate: see :class:`~lightning_g2.strategy.options.G2AsyncOptions`, as for all options down to
            ``start_timeout_s``.
        gate_options: keyword options of the gate.
        transport: what carries gradients and weights.
        servers: number of server processes.
        server_device: where servers keep weights and moments.
        pull: when weights are loaded.
        push: whether gradients are sent whole, or bucket by bucket while backward runs.
        bucket_bytes: size of such a bucket.
        consistency: whether weights are handed out whole or tensor by tensor.
        wire_dtype: dtype in which larger gradients travel.
        lr_clock: what step-wise schedules count.
        dispatch: how training batches come to ranks.
        weight_by_samples: whether a push counts by its samples.
        aggregate: pushes whose mean makes one version.
        rounds: pushes that end a synchronous round; ``"auto"`` leaves their number, or none, to the times of arrival.
        late: what becomes of pushes whose round had ended.
        staleness_cost: what that choice takes the age of a push to cost.
        buffer_weights: what a push counts in a buffer.
        delayed_nesterov: whether pushes are applied at once and momentum moves with every K-th.
        record: file to write each push to.
        on_nonfinite: what happens to a gradient with NaN or Inf.
        on_sigterm: what SIGTERM to a rank does.
        master_dtype: dtype in which the server keeps half-precision parameters.
        local_steps: optimizer steps that a rank makes itself before it pushes their sum.
        outer: how the server takes such a sum.
        outer_lr: learning rate of that.
        outer_momentum: momentum of that.
        outer_delay: pushes to one move of a delayed momentum.
        forward_threads: threads that run training steps, ahead of their backward passes.
        backward_threads: threads that run backward passes.
        max_graphs: most batches under way at once in them.
        weights: what backward passes multiply with.
        update: what they update at once.
        clip_scope: what is clipped by its norm.
        correction: correction for the delay of their updates.
        correction_steps: updates over which that corrects learning rates.
        server_threads: intra-op threads of the server process.
        timeout_s: limit of one call to the server, seconds.
        heartbeat_timeout_s: silence after which a rank is dropped, seconds.
        start_timeout_s: limit of the server's start, seconds.
        start_method: how ranks are started: ``"popen"`` runs the script again for each; ``"spawn"`` and ``"fork"``
            (also by the names ``g2async_spawn`` and ``g2async_fork``) start all of them as workers of this process.
        **ddp: these options of Lightning's ``DDPStrategy``: ``accelerator``, ``parallel_devices``,
            ``cluster_environment``, ``checkpoint_io``, ``precision_plugin``, ``process_group_backend``, ``timeout``.

    Raises:
        ConfigurationError: an unknown option, or a value out of range.

    Example::

        import lightning_g2
        Trainer(strategy="g2async", devices=2)
        Trainer(strategy=lightning_g2.G2AsyncStrategy(gate="none", pull="prefetch"), devices=2)
    """

    strategy_name = "g2async"

    def __init__(
        self,
        *,
        gate: str | None = None,
        gate_options: Mapping[str, Any] | None = None,
        transport: TransportName | None = None,
        servers: int | None = None,
        server_device: str = "cpu",
        pull: Pull | None = None,
        push: Push = "whole",
        bucket_bytes: int = BUCKET_BYTES,
        consistency: Consistency | None = None,
        wire_dtype: WireDtype | None = None,
        lr_clock: LrClock = "server",
        dispatch: Dispatch | None = None,
        weight_by_samples: bool = False,
        aggregate: int = 1,
        rounds: int | Literal["auto"] | None = None,
        late: Late = "drop",
        staleness_cost: float | None = None,
        buffer_weights: BufferWeights = "equal",
        delayed_nesterov: bool = False,
        record: str | None = None,
        on_nonfinite: OnNonfinite = "reject",
        on_sigterm: OnSigterm = "stop",
        master_dtype: MasterDtype | None = None,
        local_steps: int = 1,
        outer: OuterName | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        outer_delay: int | None = None,
        forward_threads: int | None = None,
        backward_threads: int | None = None,
        max_graphs: int | None = None,
        weights: Weights = "current",
        update: UpdateUnit = "layer",
        clip_scope: ClipScope = "global",
        correction: Correction = "none",
        correction_steps: int = 1000,
        server_threads: int = 1,
        timeout_s: float = 60.0,
        heartbeat_timeout_s: float = 10.0,
        start_timeout_s: float = 60.0,
        start_method: StartMethod = "popen",
        **ddp: Any,
    ) -> None:
        given = locals()
        base = accept_options(ddp, start_method=start_method)
        super().__init__(start_method=start_method, **base)
        self.options = G2AsyncOptions(**{name: given[name] for name in OPTION_NAMES})
        if self.options.gate is not None:
            self.options.build_routing()  # an option that the gate refuses is refused here
        self._points = SyncPoints(self._arrive)
        self._meet = SyncPointCallback(self._points, self.close_window, self.on_exception)
        self._installed = ExitStack()  # gives Lightning's objects back as they were
        self._session: Session | None = None
        self._training: RankTraining | ThreadsAlone | None = None
        self._routing: G2RoutingCallback | None = None
        self._loop: ConductedEpochLoop | None = None
        self._agreement: Agreement | None = None
        self._checkpoints: CheckpointSource | None = None
        self._norms: WeightNorms | None = None
        self._members: Members | None = None
        self._epochs: EpochLog | None = None
        self._departure = Departure(possible=False)
        self._loaded: Mapping[str, Any] = {}  # of a checkpoint, what is the server's own, until training starts
        self._kept: Mapping[str, Any] = {}  # the same for checkpoints after training

    # --- before training ----------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        refuse_environment(self.accelerator, sync_batchnorm=self._layer_sync is not None)
        refuse_servers(self.options, nodes=self.num_nodes)
        refuse_notebook(self._start_method, ranks=self.num_processes * self.num_nodes)
        self.options.check_ranks(self.num_processes * self.num_nodes)
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = G2ScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes, on_child_exit=self._on_child_exit
            )
        else:
            self._launcher = G2WorkerLauncher(self, self._start_method, on_child_exit=self._on_child_exit)

    def connect(self, model: LightningModule) -> None:
        """Attach the module, and give the trainer the callbacks that this strategy works through."""
        super().connect(model)
        trainer = model.trainer
        if self.world_size == 1:
            # A distributed sampler draws other orders than the user's own; alone, a rank trains as without us.
            trainer._accelerator_connector.use_distributed_sampler = False
        else:
            self._install(ResumeChoice(trainer, self.broadcast))
            self._agreement = Agreement(trainer, self._points, self.gather_objects)
        share_search(trainer, self._end_trial)
        if trainer.state.fn != "fit":
            return
        if self.world_size > 1:
            self._install(Conducted(trainer))
            self._loop = cast(ConductedEpochLoop, trainer.fit_loop.epoch_loop)
        given: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        own = (SyncPointCallback, AgreementCallback, EqualWeightsCallback, FiniteStatistics)
        callbacks = [c for c in given if not isinstance(c, own)]
        added: list[Callback] = [] if self.options.threaded else [FiniteStatistics()]
        if self._agreement is not None:
            added.insert(0, AgreementCallback(self._agreement))
        if any(isinstance(c, G2RoutingCallback) for c in callbacks):
            self._find_routing(trainer)  # refuses a second gate before anything has started
        else:
            self._routing = self.options.build_routing()
            added.append(self._routing)
        if not any(isinstance(c, G2MonitorCallback) for c in callbacks):
            added.append(G2MonitorCallback())
        last = [EqualWeightsCallback(self._publish_edits, self._equalise)] if self.world_size > 1 else []
        given[:] = [self._meet, *added, *callbacks, *last]

    def _find_routing(self, trainer: Trainer) -> G2RoutingCallback:
        """The trainer's routing callback: ours, the user's, or one that the module brings along."""
        found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        routing = next(c for c in found if isinstance(c, G2RoutingCallback))
        if routing is not self._routing and self.options.gate is not None:
            raise ConfigurationError(
                f"gate={self.options.gate!r} beside a G2RoutingCallback({routing.name!r}): two gates for one push; "
                "give the gate to the strategy or to the callback, not to both"
            )
        return routing

    def setup_environment(self) -> None:
        """Start the process group and, on the first rank of each node, the node's servers."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn == "fit" and self.options.push == "layerwise":
            refuse_whole_gradients(trainer, self.lightning_module)
            refuse_gate_of_whole_pushes(self._find_routing(trainer).gate)
        if trainer.state.fn == "fit" and self.options.threaded:
            refuse_training(trainer, self.lightning_module)
            thread_options(self.options, trainer)
        if trainer.state.fn == "fit" and self._session is None and self.options.servers != 0:
            assert self.cluster_environment is not None
            self._session = Session(self.options, self.cluster_environment, nodes=self.num_nodes)
        try:
            # The base class seeds every rank anew; alone, a rank goes on with the random state that the user left.
            with isolate_rng() if self.world_size == 1 else nullcontext():
                super().setup_environment()
            if self._session is not None:
                self._session.start_servers(
                    rank=self.global_rank, ranks=self.world_size, local_rank=self.local_rank, node=self.node_rank,
                    share=self.broadcast,
                )  # fmt: skip
        except RuntimeError as error:
            if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
                raise TransportError(
                    f"MASTER_PORT={os.environ.get('MASTER_PORT')}: the port is taken by another process on this host; "
                    "unset MASTER_PORT to have a free one chosen, or set it to a free port"
                ) from error
            raise

    def configure_ddp(self) -> None:
        """Give all ranks the same initial weights and buffers; nothing is wrapped."""
        assert self.model is not None
        ignored = "_ddp_params_and_buffers_to_ignore"
        users = getattr(self.model, ignored, None)
        # Lazy parameters have no values yet; the first rank that has pushed defines them.
        vars(self.model)[ignored] = [*(users or ()), *uninitialised(self.model)]
        try:
            _sync_module_states(self.model)
        finally:
            vars(self.model).pop(ignored)
            if users is not None:
                setattr(self.model, ignored, users)

    def setup(self, trainer: Trainer) -> None:
        """Set the module and its optimizers up, and connect to the server."""
        super().setup(trainer)
        if self._agreement is not None:
            self._install(self._agreement)
        if trainer.state.fn != "fit":
            return
        optimizers = [_bare(o) for o in self.optimizers]
        refuse_optimizers(optimizers)
        refuse_recording(self.options, optimizers=len(optimizers))
        if self.options.push == "layerwise":
            refuse_stepping_in_parts(optimizers)
        self._routing = self._find_routing(trainer)
        self._training = self._install(self._rank_training(trainer, self._routing, optimizers))
        if self.world_size > 1:
            self._members = self._install(
                Members(trainer, self._exchange, rank=self.global_rank, ranks=self.world_size, forgive=self._forgive)
            )
        hosts = self._session is None or self._session.hosts_servers
        leaves = self.options.on_sigterm == "leave" and self.global_rank > 0 and not hosts
        self._departure = Departure(possible=leaves)
        self._install(Lockstep(trainer, self._kill_children, self._points, self._departure))
        self._install(SkippedSteps(trainer))
        if self.global_rank == 0:
            if isinstance(self._training, RankTraining):
                advance = self._training.advance_schedules
                source = CheckpointSource(trainer, self._training.client, optimizers, advance, self._loop)
                self._checkpoints = self._install(source)
                self._epochs = EpochLog(trainer)
            log.info(self._start_line())
        if isinstance(self._training, (ThreadedRank, ThreadsAlone)):
            self._install(SettledCheckpoints(trainer, self._training.threads))
        if self.world_size > 1 and torch.are_deterministic_algorithms_enabled():
            rank_zero_warn(
                "deterministic=True: each rank computes deterministically, but the order in which pushes arrive "
                "differs from run to run, and with it the result; devices=1 is repeatable"
            )

    def _rank_training(
        self, trainer: Trainer, routing: G2RoutingCallback, optimizers: list[Optimizer]
    ) -> RankTraining | ThreadsAlone:
        module = self.lightning_module
        assert module is not None
        if self._session is None:
            return ThreadsAlone(self.options, trainer, module, routing, optimizers)
        self.barrier("g2async-connect")  # the handshake's time limit starts when all ranks are here
        transport = self._session.connect(rank=self.global_rank, node=self.node_rank, on_drop=self._on_drop)
        place = {"rank": self.global_rank, "ranks": self.world_size}
        if self.options.threaded:
            return ThreadedRank(self.options, trainer, module, transport, routing, optimizers, **place)
        prefetch = self._pull == "prefetch"
        return RankTraining(self.options, trainer, module, transport, routing, optimizers, prefetch=prefetch, **place)

    def on_train_start(self) -> None:
        """Hand the module over to the server; all ranks start from one version."""
        training = self._require_training()
        assert self.lightning_module is not None
        callbacks: list[Callback] = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
        if self._meet not in callbacks:
            callbacks.append(self._meet)  # a finder trains with callbacks of its own alone
        loaded, self._loaded, self._kept = self._loaded, {}, {}
        if isinstance(training, ThreadsAlone):
            training.begin()
            return
        if self.global_rank == 0:
            training.client.configure(loaded.get(OUTER_KEY), loaded.get(CADENCE_KEY))
        self.barrier("g2async-configured")
        training.begin()
        if self._loop is not None:
            self._loop.restart()
        owned = {id(p) for p in training.client.named_parameters().values()}
        self._norms = WeightNorms([p for p in self.lightning_module.parameters() if id(p) not in owned])

    # --- training -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One training step; where it returns None, nothing is pushed for the batch."""
        output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        skipped = output is None and self.lightning_module.automatic_optimization
        return SKIPPED if skipped and self._training is not None else output

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's backward; buckets are pushed while it runs."""
        with self._stopping():
            return super().backward(closure_loss, *args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """From here on gradients are those of a training step."""
        if isinstance(self._training, RankTraining):
            self._training.begin_backward()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Remember which weights the new gradients belong to, before another optimizer's push brings newer ones."""
        if isinstance(self._training, RankTraining):
            self._training.end_backward()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Leave a sync point; at the start of an accumulation window load arrived weights."""
        self._points.leave()
        if isinstance(self._training, RankTraining):
            self._training.begin_batch(batch, self._loop)

    @property
    def pushes(self) -> int:
        """Pushes that this rank has sent since the start of the training; the last may be under way."""
        return self._require_training().pushes

    @property
    def unpushed(self) -> int:
        """Optimizer steps that this rank has made itself and not pushed yet."""
        return 0 if self._training is None else self._training.unpushed

    def ticket(self, request: TicketRequest) -> Ticket:
        """Ask the server for this rank's next accumulation window, or the sync point that is due."""
        self._points.leave()
        if self._departure.wanted:
            self._leave(done=True)
        with self._stopping(), self._leaving():
            ticket = self._require_client().ticket(request)
        if ticket.point is None and isinstance(self._training, RankTraining):
            self._training.advance_schedules(ticket.steps)
        return ticket

    def meet_announced(self, point: SyncPoint) -> None:
        """Wait for the other ranks at the sync point that the server has announced."""
        self._points.enter("announced")
        if point.ends_epoch:
            self._write_epoch(over=True)

    def _write_epoch(self, *, over: bool) -> None:
        """On rank 0, write down what of an epoch has been trained on."""
        if self._epochs is not None and self._loop is not None and (transport := self._transport) is not None:
            self._epochs.write(transport.epoch(), seed=self._loop.seed, over=over)

    @property
    def epochs(self) -> list[EpochRecord]:
        """What was trained on, epoch by epoch; on rank 0, with several ranks. Empty elsewhere."""
        return [] if self._epochs is None else self._epochs.records

    def close_window(self) -> None:
        """An accumulation window has ended, with or without a push (a GradScaler may have skipped the step)."""
        if isinstance(self._training, RankTraining):
            self._training.close_window()

    def on_train_end(self) -> None:
        """Bring the optimizer state back, so that the trainer can still write checkpoints.

        Where ranks step themselves, each has kept its own, and rank 0's goes into checkpoints.
        """
        training = self._require_training()
        with self._stopping():
            self._equalise()
            if self.global_rank == 0:
                self._kept = training.bring_back_state()

    def _publish_edits(self) -> None:
        """Send the weights that callbacks have changed, and load what the server then has."""
        client = self._require_client()
        with self._stopping():
            if client.send_edits():
                client.load(client.transport.pull())

    def _equalise(self) -> None:
        """Where all ranks meet: weights that callbacks have changed become those of rank 0."""
        if self.world_size == 1 or not self._points.together:
            return
        assert self.lightning_module is not None
        assert self._norms is not None
        changed = {id(p) for p in (*self._require_client().changed(), *self._norms.changed())}
        parameters: list[Tensor] = list(self.lightning_module.parameters())
        buffers = list(self.lightning_module.buffers())
        flags = [id(parameter) in changed for parameter in parameters]
        self.collective(lambda: take_from_rank_0(parameters, flags, buffers))

    def _end_trial(self, flag: bool) -> bool:
        """Whether a flag is set on any rank, after a training that may have ended early on some."""
        if self.world_size == 1:
            return flag
        if not self._points.together:  # what Lightning does at the end of a training that has not failed
            self._points.enter(FINAL_POINT)
            self.on_train_end()
        flags = torch.tensor(flag, dtype=torch.uint8, device=self.root_device)
        self.collective(lambda: dist.all_reduce(flags, op=dist.ReduceOp.MAX))
        return bool(flags)

    def _stopping(self) -> AbstractContextManager[None]:
        assert self.lightning_module is not None
        return stopping(self.lightning_module.trainer)

    # --- sync points --------------------------------------------------------------------------------------------------

    def _arrive(self, point: str) -> bool:
        if not isinstance(self._training, RankTraining):
            return True
        assert self.lightning_module is not None
        module = self.lightning_module
        with self._stopping(), self._leaving():
            release = self._training.client.sync(point)
        if self._loop is not None:
            self._loop.meet(release.steps)
        self._training.advance_schedules(release.steps)
        if self._members is not None:
            self._members.meet(release)
        together = release.together
        if self._agreement is not None:
            self._agreement.meet()
        if not together:
            log.warning(
                f"sync point {point!r}: rank {self.global_rank} goes on without the other ranks, which have another "
                "number of batches; its metrics are its own"
            )
        elif self.world_size > 1:
            self.collective(lambda: average_buffers(module))
        return together

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Where this rank is told to end while it waits for others, leave the job to them."""
        try:
            with self._departure.waiting():
                yield
        except LeaveJob:
            self._leave(done=False)

    def _leave(self, *, done: bool) -> NoReturn:
        client = self._require_client()
        client.settle()
        client.transport.leave(done=done)
        log.info(f"rank {self.global_rank} was told to end (SIGTERM) and leaves; the others go on")
        raise LeaveJob(0)

    def _exchange(self, kind: str, share: Tensor | None) -> dict[int, Tensor]:
        """A collective through the server; see :class:`~lightning_g2.transport.server_group.ServerGroup`."""
        if (transport := self._transport) is None:
            raise TransportError(f"collective {kind!r}: this rank is not connected to a server any more")
        with self._stopping():
            return transport.gather(kind, share).shares

    def raise_peer_failure(self) -> None:
        """Raise the error of the rank that has failed, as soon as the server or the launcher knows it."""
        deadline = time.monotonic() + _BLAME_LIMIT_S
        while time.monotonic() < deadline:
            if (transport := self._transport) is not None:
                with self._stopping():
                    transport.check()
            elif isinstance(self._launcher, (G2ScriptLauncher, G2WorkerLauncher)) and (
                how := self._launcher.failed_child()
            ):
                raise PeerFailedError(f"{how} before training had started; its own error is printed with its output")
            time.sleep(0.1)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state; in a checkpoint that rank 0 makes while training, of one server version."""
        read = super().lightning_module_state_dict
        if self._checkpoints is None or self.lightning_module is None:
            return read()
        return self._checkpoints.module_state(self.lightning_module, read)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State of an optimizer; in a checkpoint that rank 0 makes while training, of that same version."""
        read = partial(super().optimizer_state, optimizer)
        return read() if self._checkpoints is None else self._checkpoints.optimizer_state(_bare(optimizer), read)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load moments on rank 0, which hands them to the server; hyper-parameters on every rank.

        The server's masters, and moments of their dtype, keep it. Ranks that step themselves all start with rank 0's.
        """
        if self.global_rank != 0 and self.options.local_steps == 1:
            checkpoint = without_moments(checkpoint)
        super().load_optimizer_state_dict(checkpoint)
        if self.options.master_dtype is not None:
            for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                load_exactly(_bare(optimizer), saved)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint, and read where its epoch goes on."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._loaded = {key: checkpoint[key] for key in (OUTER_KEY, CADENCE_KEY) if key in checkpoint}
        if self._loop is not None:
            self._loop.resume_from(checkpoint)
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; not where workers trained and failed: they have written theirs, here nothing is new."""
        if not (isinstance(self._launcher, G2WorkerLauncher) and self._launcher.failed):
            if "optimizer_states" in checkpoint:
                checkpoint.update(self._kept)
            super().save_checkpoint(checkpoint, filepath, storage_options)

    # --- the end ------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Tell the server, so that every other rank ends with this rank's error, and leave the process group.

        Called twice: before any callback, since one of them may fail over the error, and at last by Lightning.
        """
        own = not isinstance(exception, (PeerFailedError, DroppedError, LeaveJob))
        if (transport := self._transport) is not None and own:
            stopped = isinstance(exception, SIGTERMException)
            reason = "SIGTERM" if stopped else describe(exception)
            with suppress(G2Error):  # where the server is gone, the others learn that by themselves
                transport.fail(self.global_rank, reason, stopped=stopped)
        if self._training is not None:
            self._training.stop()
        if self._members is not None:
            self._members.abandon()
        if dist.is_initialized() and self.world_size > 1:
            # Ranks that wait for this one in a collective would wait until its process has ended.
            dist.destroy_process_group()

    def teardown(self) -> None:
        """Leave the server; rank 0 stops it once the others have left."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        failed = trainer is not None and trainer.state.status == "interrupted"
        if self._members is not None and (transport := self._transport) is not None:
            with suppress(G2Error):
                if failed:
                    self._write_epoch(over=False)
                for rank, seen in transport.dropped().items():
                    self._members.note_drop(rank, seen)
        self._installed.close()
        self._loop = self._agreement = self._checkpoints = self._members = None
        try:
            if self._session is not None:
                self._session.close(limit_s=_LEAVE_LIMIT_S if failed else None)
        finally:
            self._session = self._training = None
        if failed and isinstance(self._launcher, G2ScriptLauncher):
            self._launcher.end_children()
        self._points.end()
        super().teardown()

    def _install(self, part: P) -> P:
        part.install()
        self._installed.callback(part.remove)
        return part

    def _kill_children(self, signum: Any) -> None:
        if self._launcher is not None:
            self._launcher.kill(signum)

    def _on_child_exit(self, local_rank: int, how: str) -> bool:
        """A process of this node has failed; returns whether the job goes on without it."""
        if (transport := self._transport) is None:
            return False
        rank = self.node_rank * self.num_processes + local_rank
        with suppress(G2Error):  # the job may be ending already
            if transport.drop(rank, how):
                self._on_drop(rank, how)
                return True
        return False

    def _on_drop(self, rank: int, reason: str) -> None:
        if self._members is not None:
            self._members.note_drop(rank, reason)

    def _forgive(self, rank: int) -> None:
        node, local_rank = divmod(rank, self.num_processes)
        launcher = self._launcher
        if node == self.node_rank and isinstance(launcher, (G2ScriptLauncher, G2WorkerLauncher)):
            launcher.forgive(local_rank)

    # --- what the monitor reads ---------------------------------------------------------------------------------------

    @property
    def job_step(self) -> int:
        """Optimizer steps of all ranks, as far as this rank knows; ``global_step`` is that at sync points only."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer.global_step if self._loop is None else self._loop.job_step

    @property
    def progress(self) -> JobProgress:
        """How far the whole job has come in its epoch."""
        assert self._loop is not None
        return self._loop.progress

    @property
    def wait_s(self) -> float:
        """Seconds this rank has spent waiting for the server since the start of the fit."""
        return self.spent.wait_s

    @property
    def spent(self) -> Stopwatch:
        """Where this rank's time outside the module has gone since the start of the fit."""
        return self._training.client.spent if isinstance(self._training, RankTraining) else Stopwatch()

    def drain(self) -> list[PushRecord]:
        """Push records of all ranks since the last call."""
        alone = self._alone
        return self._require_client().transport.drain() if alone is None else alone.telemetry.drain()

    def view(self) -> ServerView:
        """The server's version, window and scales."""
        alone = self._alone
        return self._require_client().transport.view() if alone is None else ServerView(alone.version, {}, {})

    def totals(self) -> dict[int, RankTotals]:
        """Totals by rank since the start of the fit."""
        alone = self._alone
        return self._require_client().transport.totals() if alone is None else alone.telemetry.totals()

    @property
    def report(self) -> RunReport | None:
        """What this rank's forward and backward threads have done since the start of the fit; None without any."""
        return self._training.report if isinstance(self._training, (ThreadedRank, ThreadsAlone)) else None

    # --- helpers ------------------------------------------------------------------------------------------------------

    @property
    def _pull(self) -> str:
        if self.options.local_steps > 1 or self.options.threaded:
            return "fresh"
        return self.options.pull or ("fresh" if self.num_nodes == 1 else "prefetch")

    @property
    def _transport(self) -> Transport | None:
        """This rank's connection, while there is one."""
        return None if self._session is None else self._session.transport

    @property
    def _alone(self) -> OwnUpdates | None:
        """What there is in place of a server."""
        return self._training.updates if isinstance(self._training, ThreadsAlone) else None

    def _require_training(self) -> RankTraining | ThreadsAlone:
        if self._training is None:
            raise TransportError("g2async is not training: there is a server only while trainer.fit runs")
        return self._training

    def _require_client(self) -> RankClient:
        training = self._require_training()
        if isinstance(training, ThreadsAlone):
            raise TransportError("servers=0: there is no server to ask")
        return training.client

    def _start_line(self) -> str:
        assert self._routing is not None
        clock = self.options.lr_clock if self.world_size > 1 else "local"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        if self._session is None:
            return f"g2async: {ranks}, no server, gate {self._routing.gate.describe()}{self._describe_threads()}"
        transports = "+".join(dict.fromkeys(self._session.transports(self.node_rank)))
        count, steps = self._session.servers, self.options.local_steps
        servers = f"{count} server{'s' if count > 1 else ''}"
        return (
            f"g2async: {ranks}, {servers}, transport {transports}, gate {self._routing.gate.describe()}, "
            f"push {self.options.push}, pull {self._pull}, lr clock {clock}{self.options.describe_aggregation()}"
            + (f", {steps} local steps a push" if steps > 1 else "")
            + self._describe_threads()
        )

    def _describe_threads(self) -> str:
        if not self.options.threaded:
            return ""
        chosen = self.options.threads()
        python = "" if free_threaded() else ", which Python's global lock lets run by turns between torch's operations"
        return (
            f", {chosen.forward_threads} forward and {chosen.backward_threads} backward threads a rank{python}, "
            f"update by {chosen.update}, weights {chosen.weights}, at most {chosen.graphs} batches under way"
        )


def _bare(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
