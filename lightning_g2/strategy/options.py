"""Options of the strategy, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from lightning_g2.callbacks.routing import G2RoutingCallback
from lightning_g2.errors import ConfigurationError
from lightning_g2.server.aggregate import Aggregation, Late

DEFAULT_GATE: tuple[str, Mapping[str, Any]] = ("g2", {"bounded_delay": 2.0})
"""What routes where the user names no gate; why, is in docs/decisions/2026-11-30-bounded-delay.md."""

TransportName = Literal["shm", "rpc"]
Pull = Literal["fresh", "prefetch"]
LrClock = Literal["server", "local"]
Dispatch = Literal["dynamic", "static"]
StartMethod = Literal["popen", "spawn", "fork"]

_DDP_OPTIONS = frozenset({
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin",
    "process_group_backend", "timeout",
})  # fmt: skip
OnNonfinite = Literal["reject", "stop"]
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
            trainer's callbacks, or else to the package's default: ``"g2"`` with ``bounded_delay=2``.
        gate_options: keyword options of the gate; None, for all or for one, is the gate's default.
        transport: what carries gradients and weights: ``"shm"``, shared memory between ranks and a server of one host;
            ``"rpc"``, sockets. None: shm on one host, rpc between hosts.
        pull: ``"fresh"`` loads the weights after a rank's own push within its ``optimizer.step``; ``"prefetch"`` lets
            push and pull run while the rank goes on, and loads them at the start of the next accumulation window.
            None: fresh on one host, prefetch between hosts.
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
            when no further rank can join it. None: no rounds; not together with ``aggregate``.
        late: what becomes of a push of ``rounds`` whose round had ended: ``"drop"``, its samples are then not trained
            on in this epoch; or ``"gate"``, it counts in the current round if the gate lets it pass.
        record: file on the server's host to write each push to, in the order of application: who, on which version and
            samples, what its gate decided. ``lightning_g2.simulate.trace`` reads it, and a simulation repeats the run.
            For modules with one optimizer, and not together with ``aggregate`` or ``rounds``. None: nothing.
        on_nonfinite: what happens to a gradient with NaN or Inf: ``"reject"`` drops the push, counts it and warns with
            the parameters' names; ``"stop"`` ends the job with that message.
        master_dtype: ``"float32"``: the server keeps half-precision parameters (``precision="bf16-true"``,
            ``"16-true"``) and their moments in float32, steps those, and hands out rounded copies; they are kept in
            checkpoints beside the moments. None: as the module has them.
        server_threads: intra-op threads of the server process.
        timeout_s: limit of one call to the server, seconds.
        start_timeout_s: limit of the server's start and of the handshake of all processes, seconds.
    """

    gate: str | None = None
    gate_options: Mapping[str, Any] | None = None
    transport: TransportName | None = None
    pull: Pull | None = None
    lr_clock: LrClock = "server"
    dispatch: Dispatch | None = None
    weight_by_samples: bool = False
    aggregate: int = 1
    rounds: int | None = None
    late: Late = "drop"
    record: str | None = None
    on_nonfinite: OnNonfinite = "reject"
    master_dtype: MasterDtype | None = None
    server_threads: int = 1
    timeout_s: float = 60.0
    start_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        _one_of("transport", self.transport, (*get_args(TransportName), None))
        _one_of("pull", self.pull, (*get_args(Pull), None))
        _one_of("lr_clock", self.lr_clock, get_args(LrClock))
        _one_of("dispatch", self.dispatch, (*get_args(Dispatch), None))
        _one_of("on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))
        _one_of("master_dtype", self.master_dtype, (*get_args(MasterDtype), None))
        _one_of("weight_by_samples", self.weight_by_samples, (True, False))
        self._check_aggregation()
        self._check_record()
        if not isinstance(self.server_threads, int) or self.server_threads < 1:
            raise ConfigurationError(f"server_threads={self.server_threads!r}: must be an integer ≥ 1")
        for name in ("timeout_s", "start_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not value > 0:
                raise ConfigurationError(f"{name}={value!r}: must be a number of seconds > 0")
        if self.gate_options and self.gate is None:
            raise ConfigurationError(
                f"gate_options={dict(self.gate_options)!r} without gate: name the gate that they are for, or give the "
                "options to your G2RoutingCallback"
            )

    def _check_aggregation(self) -> None:
        _one_of("late", self.late, get_args(Late))
        given: dict[str, Any] = {"aggregate": self.aggregate, "rounds": 1 if self.rounds is None else self.rounds}
        for name, value in given.items():
            if name == "rounds" and value == "auto":
                raise ConfigurationError(
                    "rounds='auto': the size of rounds is not chosen by itself yet; give the number of pushes that "
                    "end one"
                )
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"{name}={value!r}: must be an integer ≥ 1 and at most the number of ranks")
        if self.rounds is not None and self.aggregate != 1:
            raise ConfigurationError(
                f"aggregate={self.aggregate} beside rounds={self.rounds}: pushes are gathered either in buffers, for "
                "which no rank waits, or in rounds; leave one of them out"
            )
        if self.late == "gate" and self.rounds is None:
            raise ConfigurationError("late='gate' without rounds: no push is late; give rounds, or leave late out")

    def _check_record(self) -> None:
        if self.record is not None and (self.aggregate != 1 or self.rounds is not None):
            raise ConfigurationError(
                f"record={self.record!r} beside aggregate or rounds: what a buffer holds at a sync point is applied as "
                "it is, and a trace does not say so; record an asynchronous run"
            )

    def check_ranks(self, ranks: int) -> None:
        """Check what depends on the number of ranks.

        Raises:
            ConfigurationError: more pushes a version than there are ranks.
        """
        for name, value in (("aggregate", self.aggregate), ("rounds", self.rounds)):
            if value is not None and value > ranks:
                raise ConfigurationError(
                    f"{name}={value}: must be at most the number of ranks, which is {ranks}; a version of more pushes "
                    "than ranks would make each rank push twice to weights that it knows already"
                )

    @property
    def aggregation(self) -> Aggregation:
        """How many pushes make one version."""
        return Aggregation(aggregate=self.aggregate, rounds=self.rounds, late=self.late)

    def describe_aggregation(self) -> str:
        """How many pushes make one version, for the strategy's start-up line; empty where each makes one."""
        if self.rounds is not None:
            return f", rounds of {self.rounds}, late pushes {'dropped' if self.late == 'drop' else 'gated'}"
        return "" if self.aggregate == 1 else f", {self.aggregate} pushes a version"

    def build_routing(self) -> G2RoutingCallback:
        """The callback that routes by this gate, or by the package's default."""
        options = {name: value for name, value in (self.gate_options or {}).items() if value is not None}
        if self.gate is None:
            return G2RoutingCallback(DEFAULT_GATE[0], **DEFAULT_GATE[1])
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


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
