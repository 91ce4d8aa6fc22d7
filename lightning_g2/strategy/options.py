"""Options of the strategy, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from lightning_g2.callbacks.routing import G2RoutingCallback
from lightning_g2.errors import ConfigurationError

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
