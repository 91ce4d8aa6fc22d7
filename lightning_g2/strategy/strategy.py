"""``Trainer(strategy="g2async")``."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer

from lightning_g2.callbacks.monitor import G2MonitorCallback
from lightning_g2.callbacks.routing import G2RoutingCallback
from lightning_g2.errors import ConfigurationError, G2Error, PeerFailedError, ServerLostError, TransportError
from lightning_g2.routing import GateContext, GateDecision
from lightning_g2.server import ServerSnapshot, inner_optimizers
from lightning_g2.strategy.client import RankClient
from lightning_g2.strategy.launcher import G2ScriptLauncher
from lightning_g2.strategy.lockstep import Lockstep
from lightning_g2.strategy.nonfinite import FiniteStatistics, NonFiniteGradients
from lightning_g2.strategy.optimizer_proxy import OptimizerProxy
from lightning_g2.strategy.optimizer_state import borrowed_state, dtype_of, give_state, load_exactly
from lightning_g2.strategy.options import G2AsyncOptions, TransportName
from lightning_g2.strategy.ownership import uninitialised
from lightning_g2.strategy.refusal import refuse_environment, refuse_optimizers
from lightning_g2.strategy.schedule import ServerClock
from lightning_g2.strategy.session import Session
from lightning_g2.strategy.skipped_step import SKIPPED, SkippedSteps
from lightning_g2.strategy.sync_points import (
    SyncPointCallback,
    SyncPoints,
    average_buffers,
    batch_size,
    sync_metrics,
)
from lightning_g2.values import PushRecord, RankTotals, ServerView

T = TypeVar("T")

_log = logging.getLogger("lightning.pytorch.g2async")  # a child of Lightning's, so that it appears where Lightning's do

_LEAVE_LIMIT_S = 10.0
"""After a failure: how long rank 0 keeps the server up for other ranks to learn why the job ends."""

_BLAME_LIMIT_S = 5.0
"""How long to wait, after a collective broke, for the server to learn which rank has failed."""


class G2AsyncStrategy(DDPStrategy):
    """Asynchronous training: each rank pushes gradients to, and pulls weights from, a parameter server.

    No rank waits for another between sync points (validation, epoch ends, the end of training). The base class gives
    devices, samplers and collectives; no module is ever wrapped for all-reduce.

    Args:
        **options: the options of :class:`~lightning_g2.strategy.options.G2AsyncOptions`, and these of Lightning's
            ``DDPStrategy``: ``accelerator``, ``parallel_devices``, ``cluster_environment``, ``checkpoint_io``,
            ``precision_plugin``, ``process_group_backend``, ``timeout``.

    Raises:
        ConfigurationError: an unknown option, or a value out of range.

    Example::

        import lightning_g2
        Trainer(strategy="g2async", devices=2)
        Trainer(strategy=lightning_g2.G2AsyncStrategy(gate="none", pull="prefetch"), devices=2)
    """

    strategy_name = "g2async"
    _BASE_OPTIONS = frozenset({
        "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin",
        "process_group_backend", "timeout",
    })  # fmt: skip

    def __init__(self, **options: Any) -> None:
        base = {name: value for name, value in options.items() if name in self._BASE_OPTIONS}
        super().__init__(**base)
        self.options = G2AsyncOptions.parse({k: v for k, v in options.items() if k not in self._BASE_OPTIONS})
        if self.options.gate is not None:
            self.options.build_routing()  # an option that the gate refuses is refused here
        self._session: Session | None = None
        self._client: RankClient | None = None
        self._clock: ServerClock | None = None
        self._routing: G2RoutingCallback | None = None
        self._lockstep: Lockstep | None = None
        self._proxies: list[OptimizerProxy] = []
        self._points = SyncPoints(self._arrive)
        self._window_samples = 0
        self._window_open = False
        self._rejection_seen = False
        self._nonfinite: NonFiniteGradients | None = None
        self._skipped: SkippedSteps | None = None
        self._saved: ServerSnapshot | None = None

    # --- before training ----------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        refuse_environment(self.accelerator, sync_batchnorm=self._layer_sync is not None)
        assert self.cluster_environment is not None
        self._launcher = G2ScriptLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, on_child_exit=self._on_child_exit
        )

    def connect(self, model: LightningModule) -> None:
        """Attach the module, and give the trainer the callbacks that this strategy works through."""
        super().connect(model)
        trainer = model.trainer
        if self.world_size == 1:
            # A distributed sampler draws other orders than the user's own; alone, a rank trains as without us.
            trainer._accelerator_connector.use_distributed_sampler = False
        if trainer.state.fn != "fit":
            return
        given: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks = [c for c in given if not isinstance(c, (SyncPointCallback, FiniteStatistics))]
        added: list[Callback] = []
        if any(isinstance(c, G2RoutingCallback) for c in callbacks):
            self._find_routing(trainer)  # refuses a second gate before anything has started
        else:
            self._routing = self.options.build_routing()
            added.append(self._routing)
        if not any(isinstance(c, G2MonitorCallback) for c in callbacks):
            added.append(G2MonitorCallback())
        given[:] = [SyncPointCallback(self._points, self.close_window), FiniteStatistics(), *added, *callbacks]

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
        """Start the server, on local rank 0, and the process group."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == "fit" and self._session is None:
            assert self.cluster_environment is not None
            self._session = Session(self.options, self.cluster_environment)
        try:
            # The base class seeds every rank anew; alone, a rank goes on with the random state that the user left.
            with isolate_rng() if self.world_size == 1 else nullcontext():
                super().setup_environment()
            if self._session is not None:
                self._session.start_server(rank=self.global_rank, ranks=self.world_size)
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
        if trainer.state.fn != "fit":
            return
        optimizers = [_bare(o) for o in self.optimizers]
        refuse_optimizers(optimizers)
        assert self._session is not None
        assert self.lightning_module is not None
        self.barrier("g2async-connect")  # the handshake's time limit starts when all ranks are here
        transport = self._session.connect(self._transport, rank=self.global_rank, ranks=self.world_size)
        self._client = RankClient(
            transport,
            rank=self.global_rank,
            ranks=self.world_size,
            named_parameters=self.lightning_module.named_parameters,
            optimizers=optimizers,
            prefetch=self._pull == "prefetch",
            master_dtype=dtype_of(self.options.master_dtype),
        )
        if self.options.lr_clock == "server" and self.world_size > 1:
            self._clock = ServerClock(trainer)
            self._clock.install()
        self._routing = self._find_routing(trainer)
        self._proxies = [
            OptimizerProxy(stepped, partial(self._push, index, inner))
            for index, optimizer in enumerate(optimizers)
            for inner, stepped in {"": optimizer, **inner_optimizers(optimizer)}.items()
        ]
        for proxy in self._proxies:
            proxy.install()
        self._lockstep = Lockstep(trainer, self._kill_children)
        self._lockstep.defuse()
        self._skipped = SkippedSteps(trainer)
        self._skipped.allow()
        self._nonfinite = NonFiniteGradients(self.options.on_nonfinite, self.global_rank)
        if self.global_rank == 0:
            _log.info(self._start_line())

    def on_train_start(self) -> None:
        """Hand the module over to the server; all ranks start from one version."""
        client = self._require_client()
        if self.global_rank == 0:
            client.configure()
        self.barrier("g2async-configured")
        client.begin()
        self._window_samples, self._window_open = 0, False
        self._points.leave()

    # --- training -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One training step; where it returns None, nothing is pushed for the batch."""
        output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        skipped = output is None and self.lightning_module.automatic_optimization
        return SKIPPED if skipped and self._skipped is not None else output

    def post_backward(self, closure_loss: Tensor) -> None:
        """Remember which weights the new gradients belong to, before another optimizer's push brings newer ones."""
        if self._client is not None:
            self._client.note_gradients()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Leave a sync point; at the start of an accumulation window load arrived weights and set the clock."""
        self._points.leave()
        client = self._require_client()
        if not self._window_open:
            self._window_open = True
            client.load_if_arrived()
            if self._clock is not None:
                self._clock.advance_to(client.base_version)
        self._window_samples += batch_size(batch)

    def close_window(self) -> None:
        """An accumulation window has ended, with or without a push (a GradScaler may have skipped the step)."""
        self._window_samples, self._window_open = 0, False

    def on_train_end(self) -> None:
        """Bring the optimizer state back, so that the trainer can still write checkpoints."""
        self._saved = None
        if self.global_rank == 0:
            client = self._require_client()
            _, snapshot = client.snapshot()
            parts = snapshot.parts(client.server_parameters(snapshot.layout))
            for optimizer, own, evolved in zip(self.optimizers, parts, snapshot.evolved, strict=True):
                give_state(_bare(optimizer), own, evolved)

    def _push(self, optimizer: int, inner: str = "") -> None:
        assert self._routing is not None
        samples, self._window_samples = self._window_samples, 0
        self._require_client().push(
            optimizer,
            partial(self._route, optimizer),
            samples=samples,
            needs_view=self._routing.gate.needs_view,
            inner=inner,
        )

    def _route(self, optimizer: int, gradients: Mapping[str, Tensor], view: ServerView, staleness: int) -> GateDecision:
        assert self._routing is not None
        assert self.lightning_module is not None
        client = self._require_client()
        context = GateContext(
            rank=self.global_rank,
            staleness=staleness,
            concurrency=self.world_size,
            lr=client.learning_rate(optimizer),
            step=self.lightning_module.trainer.global_step,
            version=view.version,
            window=view.window,
            scale=view.scale,
            weights=client.weights() if "weights" in self._routing.gate.needs else None,
        )
        decision = self._routing.route(gradients, context)
        judge = None if self._nonfinite is None or not decision.rejected else self._nonfinite.judge
        if judge is not None and (warning := judge(gradients, context.step)):
            self._rejection_seen = True
            _log.warning(warning)
        if decision.rejected and not self._rejection_seen:
            self._rejection_seen = True
            _log.warning(
                f"rank {self.global_rank}: a push was rejected ({decision.reason}); g2/rejected counts all of them"
            )
        return decision

    # --- sync points and collectives ----------------------------------------------------------------------------------

    def _arrive(self, point: str) -> bool:
        if self._client is None:
            return True
        assert self.lightning_module is not None
        module = self.lightning_module
        release = self._client.sync(point)
        if self._clock is not None:
            self._clock.advance_to(release.version)
        together = len(release.participants) == self.world_size
        sync_metrics(module, together)
        if not together:
            _log.warning(
                f"sync point {point!r}: rank {self.global_rank} goes on without the other ranks, which have another "
                "number of batches; its metrics are its own"
            )
        elif self.world_size > 1:
            self._collective(lambda: average_buffers(module))
        return together

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over ranks at a sync point; between them the rank's own value."""
        if not self._points.together:
            return tensor
        return self._collective(lambda: super(G2AsyncStrategy, self).reduce(tensor, group, reduce_op))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Reduce a decision over ranks at a sync point; between them the rank's own."""
        if not self._points.together:
            return decision
        return super().reduce_boolean_decision(decision, all)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from ranks at a sync point, shape (ranks, ...); between them from this rank alone, shape (1, ...)."""
        if not self._points.together:
            rank_zero_warn("all_gather between sync points sees this rank only; gather in validation hooks")
            return tensor.unsqueeze(0)
        return self._collective(lambda: super(G2AsyncStrategy, self).all_gather(tensor, group, sync_grads))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast at a sync point; between them the rank's own object."""
        if not self._points.together:
            return obj
        return self._collective(lambda: super(G2AsyncStrategy, self).broadcast(obj, src))

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks at a sync point; between them go on."""
        if self._points.together:
            self._collective(lambda: super(G2AsyncStrategy, self).barrier(*args, **kwargs))

    def _collective(self, run: Callable[[], T]) -> T:
        try:
            return run()
        except RuntimeError:
            # A peer that has died breaks collectives with a message about sockets; the server knows whose error it was.
            self._raise_peer_failure()
            raise

    def _raise_peer_failure(self) -> None:
        deadline = time.monotonic() + _BLAME_LIMIT_S
        while time.monotonic() < deadline:
            if self._client is not None:
                self._client.transport.check()
            elif isinstance(self._launcher, G2ScriptLauncher) and (how := self._launcher.failed_child()):
                raise PeerFailedError(f"{how} before training had started; its own error is printed with its output")
            time.sleep(0.1)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state; on rank 0, while training, with weights and optimizer state of one server version."""
        state: dict[str, Any] = super().lightning_module_state_dict()
        if self._client is None or not self._client.configured or self.global_rank != 0:
            return state
        try:
            weights, self._saved = self._client.snapshot()
        except ServerLostError as error:
            _log.warning(f"checkpoint: this rank's own weights, without optimizer state: {error}")
            return state
        by_address = {
            p.data_ptr(): weights[name] for name, p in self._client.named_parameters().items() if p.numel() > 0
        }
        for key, value in state.items():
            fresh = by_address.get(value.data_ptr()) if isinstance(value, Tensor) else None
            if fresh is not None and fresh.shape == value.shape:
                state[key] = fresh.to(value.device)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State of an optimizer, of the version that :meth:`lightning_module_state_dict` has just returned."""
        bare, snapshot = _bare(optimizer), self._saved
        if snapshot is None:
            return super().optimizer_state(optimizer)
        mine = next(i for i, o in enumerate(self.optimizers) if _bare(o) is bare)
        parameters = self._require_client().server_parameters(snapshot.layout)
        try:
            with borrowed_state(bare, snapshot.parts(parameters)[mine], snapshot.evolved[mine]):
                return super().optimizer_state(optimizer)
        finally:
            if mine == len(self.optimizers) - 1:
                self._saved = None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states; the server's masters, and moments of their dtype, keep it."""
        super().load_optimizer_state_dict(checkpoint)
        if self.options.master_dtype is not None:
            for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                load_exactly(_bare(optimizer), saved)

    # --- the end ------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Tell the server, so that every other rank ends with this rank's error."""
        if self._client is not None and not isinstance(exception, PeerFailedError):
            with suppress(G2Error):  # where the server is gone, the others learn that by themselves
                self._client.transport.fail(self.global_rank, _describe(exception))
        if dist.is_initialized() and self.world_size > 1:
            # Ranks that wait for this one in a collective would wait until its process has ended.
            dist.destroy_process_group()

    def teardown(self) -> None:
        """Leave the server; rank 0 stops it once the others have left."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        failed = trainer is not None and trainer.state.status == "interrupted"
        for proxy in self._proxies:
            proxy.remove()
        self._proxies = []
        if self._clock is not None:
            self._clock.remove()
            self._clock = None
        if self._lockstep is not None:
            self._lockstep.restore()
        if self._skipped is not None:
            self._skipped.restore()
            self._skipped = None
        try:
            if self._session is not None:
                self._session.close(limit_s=_LEAVE_LIMIT_S if failed else None)
        finally:
            self._session = self._client = self._saved = self._nonfinite = None
        if failed and isinstance(self._launcher, G2ScriptLauncher):
            self._launcher.end_children()
        self._points.end()
        super().teardown()

    def _kill_children(self, signum: Any) -> None:
        if self._launcher is not None:
            self._launcher.kill(signum)

    def _on_child_exit(self, local_rank: int, how: str) -> None:
        if self._client is None:
            return
        with suppress(G2Error):  # the job may be ending already
            self._client.transport.fail(self.node_rank * self.num_processes + local_rank, how)

    # --- what the monitor reads ---------------------------------------------------------------------------------------

    @property
    def wait_s(self) -> float:
        """Seconds this rank has spent waiting for the server since the start of the fit."""
        return 0.0 if self._client is None else self._client.wait_s

    def drain(self) -> list[PushRecord]:
        """Push records of all ranks since the last call."""
        return self._require_client().transport.drain()

    def view(self) -> ServerView:
        """The server's version, window and scales."""
        return self._require_client().transport.view()

    def totals(self) -> dict[int, RankTotals]:
        """Totals by rank since the start of the fit."""
        return self._require_client().transport.totals()

    # --- helpers ------------------------------------------------------------------------------------------------------

    @property
    def _pull(self) -> str:
        return self.options.pull or ("fresh" if self.num_nodes == 1 else "prefetch")

    @property
    def _transport(self) -> TransportName:
        return self.options.transport or ("shm" if self.num_nodes == 1 else "rpc")

    def _require_client(self) -> RankClient:
        if self._client is None:
            raise TransportError("g2async is not training: there is a server only while trainer.fit runs")
        return self._client

    def _start_line(self) -> str:
        assert self._routing is not None
        clock = self.options.lr_clock if self.world_size > 1 else "local"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return (
            f"g2async: {ranks}, 1 server, transport {self._transport}, gate {self._routing.gate.describe()}, "
            f"pull {self._pull}, lr clock {clock}"
        )


def _bare(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _describe(exception: BaseException) -> str:
    text = "".join(traceback.format_exception(exception))
    return f"{type(exception).__name__}: {exception}\n{text}"
