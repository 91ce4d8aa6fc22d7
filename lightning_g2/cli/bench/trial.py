"""One simulated training of the routing study, its record, and the file that remembers all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_g2.cli.bench.kept import KeptRows
from lightning_g2.cli.bench.spec import Spec, optimizer_of, parse_spec
from lightning_g2.cli.bench.task import Task, loss_of, terminal_loss
from lightning_g2.routing import Gate, GateContext, GateDecision, build_gate
from lightning_g2.routing.option import require
from lightning_g2.simulate import charged, parse_delays, simulate
from lightning_g2.simulate.simulation import aggregation_of
from lightning_g2.simulate.source import GateLike
from lightning_g2.tasks.schedule import warmup_constant, warmup_cosine

FLOOR = "floor"
"""One rank with as many pushes as asynchronous ranks make: no staleness at all.

With a gate, ``floor(gate="g2")``, that is told that each push is as many versions old as there are ranks in the study:
what a rule does for training that has no staleness, as an optimizer.
"""

_GATHERED: Mapping[str, Mapping[str, str]] = {
    "rounds": {"m": "rounds", "late": "late", "k": "aggregate", "staleness_cost": "staleness_cost", "gate": "gate"},
    "buffer": {"k": "aggregate", "weights": "buffer_weights", "delayed": "delayed_nesterov", "gate": "gate"},
}
"""Rules that gather pushes, and what their options are for :func:`simulate`: ``rounds(m=8)``, ``rounds(m="auto",
gate="g2")``, ``buffer(k=4, weights="fedbuff")``, ``buffer(k=4, delayed=True)``; the first has to be given."""

_SCHEDULES: Mapping[str, Callable[..., float]] = {"cosine": warmup_cosine, "constant": warmup_constant}
SCHEDULES = tuple(_SCHEDULES)


@dataclass(frozen=True)
class Setting:
    """What is common to all trials of a study.

    Attributes:
        task: its name.
        optimizer: with its options.
        ranks: number of ranks.
        pushes: arrivals a training; None where time ends it.
        time_limit: end of a training, in the units of the delays; None where pushes end it.
        delays: their law.
        clip: largest norm of a gradient.
        warmup: share of the run spent warming up.
        schedule: ``"cosine"``, falling to zero after the warm-up, or ``"constant"``.
        overhead: by rule, what its decision costs, in gradients of an ordinary rank.
    """

    task: str
    optimizer: str
    ranks: int
    pushes: int | None
    time_limit: float | None
    delays: str
    clip: float | None
    warmup: float
    schedule: str = "cosine"
    overhead: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """What a trial has shown.

    Attributes:
        task: its name.
        rule: see :func:`check_rule`.
        optimizer: with its options.
        lr: peak learning rate.
        seed: of weights, batches, durations.
        terminal_loss: on the test batches.
        validation_loss: on the batches that rates are chosen on.
        staleness_mean: versions.
        openness_first: mean weight over the first fifth of the pushes.
        openness_last: the same over the last fifth.
        unused: share of pushes that were rejected, or late for their round.
        pushes: that arrived.
        time: simulated time of the last arrival.
        rounds_last: size of the synchronous rounds in force at the end; 0 where nobody waited.
        openness: mean weight over each fifth of the pushes.
        openness_stale: the same over pushes with τ > 0; None for a fifth without any.
    """

    task: str
    rule: str
    optimizer: str
    lr: float
    seed: int
    terminal_loss: float
    validation_loss: float
    staleness_mean: float
    openness_first: float
    openness_last: float
    unused: float
    pushes: int
    time: float
    rounds_last: int = 0
    openness: Sequence[float] = ()
    openness_stale: Sequence[float | None] = ()


def check_rule(rule: str, ranks: int) -> None:
    """Refuse a rule that no trial can follow.

    Args:
        rule: the gate with its options, ``rounds(m=...)``, ``buffer(k=...)`` with theirs, ``floor`` or
            ``floor(gate="...")``.
        ranks: number of ranks.

    Raises:
        ConfigurationError: it is unknown, or an option is out of range.
    """
    spec = parse_spec(rule)
    if spec.name in _GATHERED:
        first, *others = _GATHERED[spec.name]
        size = spec.options.get(first)
        sound = 1 <= size <= ranks if isinstance(size, int) else (spec.name, size) == ("rounds", "auto")
        sound = sound and {first, *others} >= set(spec.options)
        remedy = f"give their number, and of {', '.join(others)} what you need"
        require(sound, "rule", rule, f"be {spec.name}({first}=...) with 1 to {ranks} pushes", remedy)
        options = _gathered(spec)
        build_gate(options.pop("gate", "none"))
        options.pop("staleness_cost", None)
        aggregation_of(ranks, **options)
    elif spec.name == FLOOR:
        require(set(spec.options) <= {"gate"}, "rule", rule, "be floor or floor(gate=...)", "leave other options out")
        if "gate" in spec.options:
            _as_if_stale(spec.options["gate"], ranks)
    else:
        build_gate(spec.name, **spec.options)


def gate_of(rule: str) -> tuple[str, dict[str, Any]] | None:
    """Gate and options of a rule; None for one without any.

    Args:
        rule: see :func:`check_rule`.
    """
    spec = parse_spec(rule)
    if spec.name in _GATHERED:
        return (spec.options["gate"], {}) if "gate" in spec.options else None
    return None if spec.name == FLOOR else (spec.name, spec.options)


def _gathered(spec: Spec) -> dict[str, Any]:
    """Options of a simulation for a rule that gathers pushes."""
    return {_GATHERED[spec.name][option]: value for option, value in spec.options.items()}


def run_trial(task: Task, setting: Setting, rule: str, lr: float, seed: int) -> Record:
    """Train once.

    Args:
        task: module and data.
        setting: what is common to all trials.
        rule: see :func:`check_rule`.
        lr: peak learning rate.
        seed: of weights, batches, durations.
    """
    spec, delays = parse_spec(rule), charged(parse_delays(setting.delays), setting.overhead.get(rule, 0.0))
    floor = spec.name == FLOOR
    options = _gathered(spec) if spec.name in _GATHERED else {"gate": _gate(rule, setting.ranks)}
    pushes, time_limit = setting.pushes, setting.time_limit
    if floor and time_limit is not None:
        pushes, time_limit = delays.arrivals(ranks=setting.ranks, seed=seed, time_limit=time_limit), None
    result = simulate(
        task.model,
        loss_of,
        task.batches(),
        ranks=1 if floor else setting.ranks,
        pushes=pushes,
        time_limit=time_limit,
        optimizer=optimizer_of(setting.optimizer),
        lr=lr,
        schedule=partial(_SCHEDULES[setting.schedule], warmup=setting.warmup),
        clip=setting.clip,
        delays=delays,
        seed=seed,
        evaluation=task.validation,
        **options,
    )
    arrived = bool(result.rank)
    require(arrived, "time_limit", time_limit, f"let a push arrive under rule {rule}", "give more time")
    unused = [rejected or late for rejected, late in zip(result.rejected, result.late, strict=True)]
    openness = _fifths(result.weight)
    stale = [weight if staleness else None for weight, staleness in zip(result.weight, result.staleness, strict=True)]
    return Record(
        task=setting.task,
        rule=rule,
        optimizer=setting.optimizer,
        lr=lr,
        seed=seed,
        terminal_loss=terminal_loss(result.model, task.test),
        validation_loss=result.loss,
        staleness_mean=_mean(result.staleness),
        openness_first=openness[0] or 0.0,
        openness_last=openness[-1] or 0.0,
        unused=_mean(unused),
        pushes=len(result.rank),
        time=result.time[-1],
        rounds_last=result.rounds[-1],
        openness=[value or 0.0 for value in openness],
        openness_stale=_fifths(stale),
    )


def _gate(rule: str, ranks: int) -> GateLike:
    """What a simulation is given for a rule."""
    options = parse_spec(rule).options
    return partial(_as_if_stale, options["gate"], ranks) if "gate" in options else gate_of(rule) or "none"


def _as_if_stale(rule: str, ranks: int) -> Gate:
    """A gate that takes fresh pushes for pushes of relative age 1."""
    spec = parse_spec(rule)
    gate = build_gate(spec.name, **spec.options)
    decide = gate.decide

    def decide_as_if(gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        return decide(gradients, replace(context, staleness=ranks, concurrency=ranks))

    gate.decide = decide_as_if  # type: ignore[method-assign]
    return gate


class TrialFile:
    """Trials on disk, see :class:`KeptRows`.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._kept = KeptRows(path)

    def known(self, setting: Setting, rule: str, lr: float, seed: int) -> Record | None:
        """The record of a trial that was made before; None for a new one."""
        row = self._kept.known(_settings(setting, rule, lr, seed))
        return None if row is None else Record(**row)

    def add(self, setting: Setting, record: Record) -> None:
        """Write a trial down."""
        self._kept.add(_settings(setting, record.rule, record.lr, record.seed), asdict(record))


def _settings(setting: Setting, rule: str, lr: float, seed: int) -> dict[str, Any]:
    own = {"rule": rule, "lr": lr, "seed": seed, "overhead": setting.overhead.get(rule, 0.0)}
    return {**asdict(setting), **own}


def _mean(values: Sequence[Any]) -> float:
    return math.fsum(values) / len(values)


def _fifths(weights: Sequence[float | None]) -> list[float | None]:
    """Mean over each fifth of the pushes, those without a value left out; None for a fifth without any."""
    ends = [round(k * len(weights) / 5) for k in range(6)]
    parts = [[w for w in weights[begin:end] if w is not None] for begin, end in pairwise(ends)]
    return [_mean(part) if part else None for part in parts]
