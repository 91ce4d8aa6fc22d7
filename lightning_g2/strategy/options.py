"""Options of the strategy, checked before anything starts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from lightning_g2.callbacks.routing import G2RoutingCallback
from lightning_g2.decoupled import DecoupledOptions
from lightning_g2.decoupled.options import ClipScope, Correction, UpdateUnit, Weights
from lightning_g2.errors import ConfigurationError
from lightning_g2.server import Aggregation, Criterion, OuterName, OuterStep
from lightning_g2.server.aggregate import BufferWeights
from lightning_g2.strategy.thread_options import check_threads
from lightning_g2.values import Late

DEFAULT_GATE = "g2_spectral"
"""What routes where the user names no gate; why, is in docs/decisions/2026-11-30-bounded-delay.md."""

TransportName = Literal["shm", "rpc"]
Pull = Literal["fresh", "prefetch"]
Push = Literal["whole", "layerwise"]
Consistency = Literal["atomic", "layerwise"]
WireDtype = Literal["float32", "bf16", "fp16"]
LrClock = Literal["server", "local"]
Dispatch = Literal["dynamic", "static"]
StartMethod = Literal["popen", "spawn", "fork"]

BUCKET_BYTES = 4 * 2**20
"""Bucket of layer-wise pushes; measured in docs/decisions/2026-11-30-layer-wise-push.md."""

_DDP_OPTIONS = frozenset({
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin",
    "process_group_backend", "timeout",
})  # fmt: skip
OnNonfinite = Literal["reject", "stop"]
OnSigterm = Literal["stop", "leave"]
MasterDtype = Literal["float32"]

_DDP_ADVICE = {
    "find_unused_parameters": "parameters without a gradient are allowed as they are; leave the option out",
    "static_graph": "there is no reducer to tell about the graph; leave the option out",
    "gradient_as_bucket_view": "there are no buckets; leave the option out",
    "ddp_comm_hook": "there is no all-reduce to hook into; use a gate to change what is pushed",
    "ddp_comm_state": "there is no all-reduce to hook into; use a gate to change what is pushed",
    "ddp_comm_wrapper": "there is no all-reduce to hook into; use a gate to change what is pushed",
    "model_averaging_period": "weights are not averaged but pulled; leave the option out",
}


@dataclass(frozen=True, kw_only=True)
class G2AsyncOptions:
    """How ranks and servers work together.

    Attributes:
        gate: name of the gate that routes each push, see ``lightning_g2.routing.available_gates()``; ``"none"`` turns
            routing off (NaN and Inf are still rejected). None leaves the choice to a ``G2RoutingCallback`` among the
            trainer's callbacks, or else to the package's default: ``"g2_spectral"``, or ``"none"`` with forward and
            backward threads, as in their paper; there a gate decides layer by layer.
        gate_options: keyword options of the gate; None, for all or for one, is the gate's default.
        transport: what carries gradients and weights: ``"shm"``, shared memory between ranks and a server of one host;
            ``"rpc"``, sockets. None: shm where rank and server share a host, rpc between hosts.
        servers: number of server processes, started by the first rank of each node in turn. Each owns whole parameters,
            balanced by bytes, has versions of its own and steps by itself; what an optimizer computes across parameters
            (a global norm, a step size from all of them) it computes across those of one server: use 1 for such an
            optimizer. None: one for each node.
        server_device: where servers keep weights and moments, and step: ``"cpu"``, ``"cuda"`` or ``"cuda:1"`` of the
            server's own host.
        pull: ``"fresh"`` loads the weights after a rank's own push within its ``optimizer.step``; ``"prefetch"`` lets
            push and pull run while the rank goes on, and loads them at the start of the next accumulation window.
            None: fresh on one host, prefetch between hosts.
        push: ``"whole"`` sends a gradient when all of it is there; ``"layerwise"`` sends each bucket of it as soon as
            backward has produced it, and the server applies it while backward goes on. What needs whole gradients
            (accumulation, clipping by norm, hooks between backward and step) is refused.
        bucket_bytes: bytes of gradients in a bucket of layer-wise pushes; a larger parameter is a bucket of its own.
        consistency: ``"atomic"`` gives a rank weights of one version; ``"layerwise"`` lets the server hand them out
            tensor by tensor, each of one version, while it applies other ranks' pushes. None: atomic for whole pushes,
            layerwise for layer-wise ones, whose buckets interleave with those of other ranks.
        wire_dtype: dtype in which dense real gradients of a larger floating dtype travel: ``"float32"``, ``"bf16"`` or
            ``"fp16"``. What rounding takes is kept on the rank and added to the next gradient that is sent, which takes
            as much memory as those gradients. None: each gradient in its own dtype.
        lr_clock: ``"server"`` lets step-wise schedules advance with the optimizer steps of all ranks, so that ranks of
            unequal speed agree on the learning rate; ``"local"`` with the rank's own steps.
        dispatch: ``"dynamic"`` hands the training batches out one by one to whichever rank is free, each once an epoch;
            ``"static"`` splits them beforehand, as DDP does. None: dynamic where the loader allows it.
        weight_by_samples: the server scales each gradient by the samples behind it over the mean of all pushes so far,
            for ranks with batches of different sizes. Adam and its kin undo most of that, since they divide by the
            gradient's size.
        aggregate: K: the mean of K pushes makes one version, whatever weights they were computed from; no rank waits
            for another. 1 applies each push by itself. What a buffer holds at a sync point, or when a rank leaves, is
            applied as it is.
        rounds: m: synchronous rounds. The mean of the first m pushes of the current weights makes the next version;
            ranks whose push is among them wait for it, the others start anew when theirs has come. A round also ends
            when no further rank can join it. None: no rounds; not together with ``aggregate``. ``"auto"``: the server
            measures how long ranks take, and chooses m, or no rounds (then ``aggregate`` holds), anew from time to
            time; see :mod:`lightning_g2.server.cadence`.
        staleness_cost: of ``rounds="auto"``: what a push that is one push old costs beside one more push in the mean,
            ≥ 0. None: 1/(1-β) for momentum β, 1 for others (Adam), a quarter of that under the g2 gate.
        buffer_weights: what a push counts in a buffer of ``aggregate``: ``"equal"``, or ``"fedbuff"``: 1/√(1+τ) with τ
            its staleness in versions, the sum still divided by K (FedBuff, arXiv 2106.06639).
        delayed_nesterov: each push is applied at once at 1/K of the rate, K being ``aggregate``, and momentum moves
            with every K-th push, by the mean of all K (arXiv 2401.09135). For ``torch.optim.SGD`` with ``nesterov``.
        late: what becomes of a push of ``rounds`` whose round had ended: ``"drop"``, its samples are then not trained
            on in this epoch; or ``"gate"``, it counts in the current round if the gate lets it pass.
        record: file on the server's host to write each push to, in the order of application: who, on which version and
            samples, what its gate decided. ``lightning_g2.simulate.trace`` reads it, and a simulation repeats the run.
            For modules with one optimizer, one server, and whole gradients, each applied by itself. None: nothing.
        on_nonfinite: what happens to a gradient with NaN or Inf: ``"reject"`` drops the push, counts it and warns with
            the parameters' names; ``"stop"`` ends the job with that message.
        on_sigterm: what SIGTERM to a rank does: ``"stop"`` stops the job in order; ``"leave"``, for machines that are
            taken away at short notice: the rank ends its window, pushes it, gives back what else it was handed, and
            ends with exit code 0, while the others go on. Rank 0, and ranks that have started a server, stop the job.
        master_dtype: ``"float32"``: the server keeps half-precision parameters (``precision="bf16-true"``,
            ``"16-true"``) and their moments in float32, steps those, and hands out rounded copies; they are kept in
            checkpoints beside the moments. None: as the module has them.
        local_steps: H, optimizer steps that a rank makes itself, with the module's own optimizers, before it pushes
            their sum (loaded weights minus present ones): H times fewer pushes. What is left over is pushed wherever
            ranks meet and before rank 0 writes a checkpoint. 1: each step is a push of a gradient, and the module's
            optimizers run on the server. The options below, None for their defaults, belong to more than 1.
        outer: how the server takes such a sum: ``"delayed_nesterov"`` (the default) counts it as one of K, and its
            momentum moves with every K-th push alone, by their mean; ``"nesterov"`` takes each as a whole step of SGD
            with Nesterov momentum. With one rank they are the same.
        outer_lr: its learning rate, > 0; 0.7 by default. With 1 and no momentum the weights of one rank move as they
            would without a server, up to rounding.
        outer_momentum: its momentum, 0 to below 1; 0.5 by default. 0.9, DiLoCo's, is for H of some hundred.
        outer_delay: K of ``"delayed_nesterov"``, pushes; the number of ranks by default.
        forward_threads: training steps run in so many threads of each rank, ahead of their backward passes (PD-ASGD,
            arXiv 2410.05985). None: no threads, unless ``backward_threads`` is given; then 1.
        backward_threads: backward passes run in so many threads, which update each layer as soon as its gradient
            exists; 2 by default, as a backward pass costs about two forward passes. 0: each forward thread walks back
            itself. The options down to ``correction_steps`` belong to threads.
        max_graphs: most batches under way at once in a rank; None: see
            :class:`~lightning_g2.decoupled.DecoupledOptions`, as for the next two.
        weights: ``"current"`` or ``"stashed"``, what backward passes multiply with.
        update: ``"layer"`` or ``"block"``, what is updated, or pushed, at once.
        clip_scope: what ``gradient_clip_val`` bounds the norm of: the ``"global"`` gradient, as ever, which only
            ``update="block"`` knows in time, or each ``"layer"`` by itself.
        correction: ``"pipemare"`` corrects for delays, see :class:`~lightning_g2.decoupled.correction.PipeMare`.
        correction_steps: updates over which its smaller learning rates give way to the full one.
        server_threads: intra-op threads of the server process.
        timeout_s: limit of one call to the server, seconds.
        heartbeat_timeout_s: a rank that is not heard of for so long, seconds, is dropped, and the job goes on without
            it; rank 0 ends the job. Being slow is not being silent.
        start_timeout_s: limit of the server's start and of the handshake of all processes, seconds.
    """

    gate: str | None = None
    gate_options: Mapping[str, Any] | None = None
    transport: TransportName | None = None
    servers: int | None = None
    server_device: str = "cpu"
    pull: Pull | None = None
    push: Push = "whole"
    bucket_bytes: int = BUCKET_BYTES
    consistency: Consistency | None = None
    wire_dtype: WireDtype | None = None
    lr_clock: LrClock = "server"
    dispatch: Dispatch | None = None
    weight_by_samples: bool = False
    aggregate: int = 1
    rounds: int | Literal["auto"] | None = None
    late: Late = "drop"
    staleness_cost: float | None = None
    buffer_weights: BufferWeights = "equal"
    delayed_nesterov: bool = False
    record: str | None = None
    on_nonfinite: OnNonfinite = "reject"
    on_sigterm: OnSigterm = "stop"
    master_dtype: MasterDtype | None = None
    local_steps: int = 1
    outer: OuterName | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    outer_delay: int | None = None
    forward_threads: int | None = None
    backward_threads: int | None = None
    max_graphs: int | None = None
    weights: Weights = "current"
    update: UpdateUnit = "layer"
    clip_scope: ClipScope = "global"
    correction: Correction = "none"
    correction_steps: int = 1000
    server_threads: int = 1
    timeout_s: float = 60.0
    heartbeat_timeout_s: float = 10.0
    start_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        _one_of("transport", self.transport, (*get_args(TransportName), None))
        _one_of("pull", self.pull, (*get_args(Pull), None))
        _one_of("push", self.push, get_args(Push))
        _one_of("consistency", self.consistency, (*get_args(Consistency), None))
        _one_of("wire_dtype", self.wire_dtype, (*get_args(WireDtype), None))
        _one_of("lr_clock", self.lr_clock, get_args(LrClock))
        _one_of("dispatch", self.dispatch, (*get_args(Dispatch), None))
        _one_of("on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))
        _one_of("on_sigterm", self.on_sigterm, get_args(OnSigterm))
        _one_of("master_dtype", self.master_dtype, (*get_args(MasterDtype), None))
        _one_of("weight_by_samples", self.weight_by_samples, (True, False))
        self._check_aggregation()
        self._check_local_steps()
        check_threads(self)
        least = int(not self.threaded)
        if self.servers is not None and (type(self.servers) is not int or self.servers < least):
            raise ConfigurationError(
                f"servers={self.servers!r}: must be an integer ≥ 1, or None for one server on each node; 0 is for one "
                "rank with forward and backward threads"
            )
        if not re.fullmatch(r"cpu|cuda(:\d+)?", str(self.server_device)):
            raise ConfigurationError(
                f"server_device={self.server_device!r}: must be 'cpu', 'cuda' or, of several devices, 'cuda:<index>'"
            )
        self._check_layerwise()
        self._check_record()
        for name in ("server_threads", "bucket_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name}={value!r}: must be an integer ≥ 1")
        for name in ("timeout_s", "start_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not value > 0:
                raise ConfigurationError(f"{name}={value!r}: must be a number of seconds > 0")
        if not _is_number(self.heartbeat_timeout_s) or self.heartbeat_timeout_s < 1:
            raise ConfigurationError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s!r}: must be a number of seconds ≥ 1; a busy host may "
                "leave a healthy rank without its turn for less"
            )
        if self.gate_options and self.gate is None:
            raise ConfigurationError(
                f"gate_options={dict(self.gate_options)!r} without gate: name the gate that they are for, or give the "
                "options to your G2RoutingCallback"
            )

    def _check_layerwise(self) -> None:
        if self.push != "layerwise":
            return
        if self.consistency == "atomic":
            raise ConfigurationError(
                "consistency='atomic' with push='layerwise': buckets of several ranks' pushes interleave at the "
                "server, so there is no moment at which every push is whole; leave consistency out, or use push='whole'"
            )
        if self.aggregate != 1 or self.rounds is not None:
            what = f"aggregate={self.aggregate}" if self.rounds is None else f"rounds={self.rounds!r}"
            raise ConfigurationError(
                f"{what} with push='layerwise': a mean of several pushes is applied when they have all come, a bucket "
                "at once; use push='whole'"
            )

    def _check_aggregation(self) -> None:
        _one_of("late", self.late, get_args(Late))
        auto = self.rounds == "auto"
        given: dict[str, Any] = {"aggregate": self.aggregate, "rounds": self.rounds}
        for name, value in given.items():
            if (type(value) is not int or value < 1) and not (name == "rounds" and (value is None or auto)):
                rule = "must be an integer ≥ 1 and at most the number of ranks"
                raise ConfigurationError(f"{name}={value!r}: {rule}{', or auto' if name == 'rounds' else ''}")
        if self.rounds is not None and not auto and self.aggregate != 1:
            raise ConfigurationError(
                f"aggregate={self.aggregate} beside rounds={self.rounds}: pushes are gathered either in buffers, for "
                "which no rank waits, or in rounds; leave one of them out"
            )
        if self.late == "gate" and self.rounds is None:
            raise ConfigurationError("late='gate' without rounds: no push is late; give rounds, or leave late out")
        if self.staleness_cost is not None and not auto:
            raise ConfigurationError(
                f"staleness_cost={self.staleness_cost!r} with rounds={self.rounds!r}: only rounds='auto' weighs it; "
                "leave one of the two out"
            )
        if self.staleness_cost is not None and not (_is_number(self.staleness_cost) and self.staleness_cost >= 0):
            raise ConfigurationError(
                f"staleness_cost={self.staleness_cost!r}: must be a number ≥ 0; 1 counts age like size, 0 not at all"
            )
        self.aggregation(1.0)  # refuses what does not go together

    def _check_record(self) -> None:
        """What a trace cannot say, and a simulation not repeat."""
        if self.record is None:
            return
        simple = {
            "aggregate": self.aggregate == 1, "rounds": self.rounds is None, "push": self.push == "whole",
            "wire_dtype": self.wire_dtype is None, "local_steps": self.local_steps == 1,
            "servers": self.servers in (None, 1),
        }  # fmt: skip
        for name, alone in simple.items():
            if not alone:
                raise ConfigurationError(
                    f"record={self.record!r} beside {name}={getattr(self, name)!r}: a trace holds whole gradients, "
                    f"each applied by itself on one server; leave {name} out to record"
                )

    def server_count(self, nodes: int) -> int:
        """Number of servers of a job on so many nodes."""
        return nodes if self.servers is None else self.servers

    @property
    def threaded(self) -> bool:
        """Whether forward and backward passes run in threads of their own."""
        return self.forward_threads is not None or self.backward_threads is not None

    def threads(self, **training: Any) -> DecoupledOptions:
        """The options of the threads.

        Args:
            training: further ones, that the trainer knows.
        """
        return DecoupledOptions(
            forward_threads=1 if self.forward_threads is None else self.forward_threads,
            backward_threads=2 if self.backward_threads is None else self.backward_threads,
            max_graphs=self.max_graphs, weights=self.weights, update=self.update, clip_scope=self.clip_scope,
            correction=self.correction, correction_steps=self.correction_steps, **training,
        )  # fmt: skip

    def check_ranks(self, ranks: int) -> None:
        """Check what depends on the number of ranks.

        Raises:
            ConfigurationError: more pushes a version than there are ranks.
        """
        if self.servers == 0 and ranks > 1:
            raise ConfigurationError(
                f"servers=0 with {ranks} ranks: they share weights through servers alone; leave servers out"
            )
        for name, value in (("aggregate", self.aggregate), ("rounds", self.rounds)):
            if isinstance(value, int) and value > ranks:
                raise ConfigurationError(
                    f"{name}={value}: must be at most the number of ranks, which is {ranks}; a version of more pushes "
                    "than ranks would make each rank push twice to weights that it knows already"
                )

    def aggregation(self, staleness_cost: float) -> Aggregation:
        """How many pushes make one version.

        Args:
            staleness_cost: for rounds that are chosen by themselves, where no option gives it.
        """
        cost = staleness_cost if self.staleness_cost is None else self.staleness_cost
        return Aggregation(
            aggregate=self.aggregate,
            rounds=self.rounds if isinstance(self.rounds, int) else None,
            late=self.late,
            buffer_weights=self.buffer_weights,
            delayed_nesterov=self.delayed_nesterov,
            auto=Criterion(staleness_cost=cost) if self.rounds == "auto" else None,
        )

    def describe_aggregation(self) -> str:
        """How many pushes make one version, for the strategy's start-up line; empty where each makes one."""
        late = f"late pushes {'dropped' if self.late == 'drop' else 'gated'}"
        weights = "" if self.buffer_weights == "equal" else ", weighted by 1/√(1+τ)"
        if self.delayed_nesterov:
            return f", momentum delayed over {self.aggregate} pushes{weights}"
        buffers = "" if self.aggregate == 1 else f", {self.aggregate} pushes a version{weights}"
        if self.rounds == "auto":
            return f"{buffers}, or rounds as times of arrival say, {late}"
        return buffers if self.rounds is None else f", rounds of {self.rounds}, {late}"

    @property
    def by_tensor(self) -> bool:
        """Whether the server may hand weights out tensor by tensor."""
        in_parts = self.push == "layerwise" or (self.threaded and self.update == "layer")
        return (self.consistency or ("layerwise" if in_parts else "atomic")) == "layerwise"

    def outer_step(self, ranks: int) -> OuterStep | None:
        """How the server takes differences; None where it takes gradients."""
        if self.local_steps == 1:
            return None
        default = OuterStep()
        return OuterStep(
            name=default.name if self.outer is None else self.outer,
            lr=default.lr if self.outer_lr is None else self.outer_lr,
            momentum=default.momentum if self.outer_momentum is None else self.outer_momentum,
            delay=ranks if self.outer_delay is None else self.outer_delay,
        )

    def _check_local_steps(self) -> None:
        steps = self.local_steps
        if not _is_integer(steps) or steps < 1:
            raise ConfigurationError(
                f"local_steps={steps!r}: must be an integer ≥ 1; 1 pushes the gradient of every step"
            )
        if steps == 1:
            self._refuse_outer_options()
            return
        self._check_outer_options()
        if self.pull == "prefetch":
            raise ConfigurationError(
                f"pull='prefetch' with local_steps={steps}: steps that a rank makes while its push is under way would "
                "be lost when the weights come; leave pull out, a rank waits only once in so many steps"
            )
        if self.push == "layerwise":
            raise ConfigurationError(
                f"push='layerwise' with local_steps={steps}: a sum of steps is not made by one backward; leave push out"
            )
        for name, value in (("aggregate", self.aggregate), ("rounds", self.rounds)):
            if value is not None and (name, value) != ("aggregate", 1):
                raise ConfigurationError(
                    f"{name}={value!r} with local_steps={steps}: the outer step gathers differences itself; leave "
                    f"{name} out, and give outer_delay for the number of pushes that move the momentum"
                )
        if self.master_dtype is not None:
            raise ConfigurationError(
                f"master_dtype={self.master_dtype!r} with local_steps={steps}: the module's optimizer steps on the "
                "rank, on the module's own parameters; leave one of the two out"
            )

    def _refuse_outer_options(self) -> None:
        names = ("outer", "outer_lr", "outer_momentum", "outer_delay")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if given:
            raise ConfigurationError(
                f"{', '.join(f'{name}={value!r}' for name, value in given.items())} with local_steps=1: the server "
                "steps the module's own optimizer; give local_steps=2 or more, or leave the outer options out"
            )

    def _check_outer_options(self) -> None:
        _one_of("outer", self.outer, (*get_args(OuterName), None))
        lr, momentum, delay = self.outer_lr, self.outer_momentum, self.outer_delay
        if lr is not None and not (_is_number(lr) and lr > 0):
            raise ConfigurationError(f"outer_lr={lr!r}: must be a number > 0; 1 takes differences as they are")
        if momentum is not None and not (_is_number(momentum) and 0 <= momentum < 1):
            raise ConfigurationError(f"outer_momentum={momentum!r}: must be a number ≥ 0 and < 1; 0 is none")
        if delay is not None and (not _is_integer(delay) or delay < 1):
            raise ConfigurationError(f"outer_delay={delay!r}: must be an integer ≥ 1, in pushes")
        if delay is not None and self.outer == "nesterov":
            raise ConfigurationError(
                f"outer_delay={delay!r} with outer='nesterov': only the delayed form waits; leave one of the two out"
            )

    def build_routing(self) -> G2RoutingCallback:
        """The callback that routes by this gate, or by the package's default."""
        options = {name: value for name, value in (self.gate_options or {}).items() if value is not None}
        if self.gate is None and self.threaded:
            return G2RoutingCallback("none")
        if self.gate is None:
            return G2RoutingCallback(DEFAULT_GATE)
        return G2RoutingCallback(self.gate, **options)


OPTION_NAMES = tuple(field.name for field in fields(G2AsyncOptions))


def accept_options(ddp: Mapping[str, Any], *, start_method: str) -> dict[str, Any]:
    """The options for ``DDPStrategy``, without those that mean nothing here or that nobody knows.

    Raises:
        ConfigurationError: an unknown option, or a value out of range.
    """
    _one_of("start_method", start_method, get_args(StartMethod))
    for name, value in ddp.items():
        if name not in _DDP_OPTIONS:
            advice = _DDP_ADVICE.get(name, f"the options of g2async are {', '.join(OPTION_NAMES)}")
            raise ConfigurationError(f"{name}={value!r}: not an option of g2async; {advice}")
    return dict(ddp)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
