"""``simulate``: asynchronous training on one core."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, get_args

import torch

from lightning_g2.errors import ConfigurationError
from lightning_g2.routing.option import require, require_choice
from lightning_g2.server import Aggregation, Criterion, TraceWriter, staleness_cost_of
from lightning_g2.server.aggregate import BufferWeights
from lightning_g2.simulate.clock import Clock
from lightning_g2.simulate.delay import Delays, parse_delays
from lightning_g2.simulate.job import Job
from lightning_g2.simulate.observation import Observer
from lightning_g2.simulate.result import SimulationResult
from lightning_g2.simulate.source import (
    Batches,
    BatchSource,
    GateLike,
    Loss,
    ModelLike,
    OptimizerLike,
    build_model,
    build_optimizer,
    gate_maker,
    seed_torch,
)
from lightning_g2.simulate.trace import Trace, replay
from lightning_g2.values import Late


def simulate(
    model: ModelLike,
    loss: Loss,
    batches: Batches,
    *,
    ranks: int,
    pushes: int | None = None,
    time_limit: float | None = None,
    gate: GateLike = "none",
    optimizer: OptimizerLike,
    lr: float,
    schedule: Callable[[float], float] | None = None,
    clip: float | None = None,
    aggregate: int = 1,
    rounds: int | Literal["auto"] | None = None,
    delays: Delays | str,
    seed: int,
    record: str | PathLike[str] | None = None,
    evaluation: Sequence[Any] | None = None,
    late: Late = "drop",
    buffer_weights: BufferWeights = "equal",
    delayed_nesterov: bool = False,
    staleness_cost: float | None = None,
    observe: Observer | None = None,
) -> SimulationResult:
    """Train asynchronously on one core, in simulated time, with real gradients.

    Each rank reads the weights, takes a time for its gradient that ``delays`` gives, and arrives: its own gate judges
    the gradient, the server applies it, the rank reads again. Gates and server are those of real runs. All of it is
    determined by the arguments: the same ones give the same result, bit for bit at the same number of threads. The
    process's random state is left as it was.

    Cost: one forward and backward pass a push, and a copy of the weights a version. Memory: the weights, once for each
    version that a gradient under way was begun on (``versions_held`` says how many were kept at most), so no more than
    the number of ranks and as few as one; the optimizer's state once; and a gate for each rank that has pushed, which
    for ``"none"`` is nothing and for rules that remember gradients one to two entries a parameter. The ranks share one
    module: its buffers (running statistics) follow the arrivals of all.

    Args:
        model: module to train, which is copied, or what makes one (called under the seed).
        loss: scalar loss of the module on a batch.
        batches: a sequence, handed out in order to whichever rank begins, again and again; or a function of rank and k
            that gives a rank's k-th batch. It may draw from torch's random state, which is seeded anew for each
            gradient.
        ranks: number of ranks, ≥ 1.
        pushes: end after so many arrivals, rejected pushes included; at least one of this and ``time_limit``, unless
            a trace ends by itself.
        time_limit: end before the first arrival later than this, in the units of the delays.
        gate: name of a gate, name and options, or what makes one gate a rank.
        optimizer: name in ``torch.optim``, or what makes an optimizer of a list of parameters: a class, a ``partial``
            of one, a function.
        lr: learning rate.
        schedule: factor of the learning rate by the fraction of the run that was done when the gradient was begun,
            0 to 1: of the pushes or of the time, whichever is further. As in real runs a push carries the rate of its
            beginning.
        clip: largest norm of a gradient; a larger one is scaled to it before the gate sees it.
        aggregate: pushes averaged into one version, at most ``ranks``; nobody waits. 1 applies each by itself.
        rounds: first pushes of a version that make a synchronous round, at most ``ranks``; ranks whose push is among
            them wait for its end. None for no rounds; not together with ``aggregate``. ``"auto"`` chooses their size,
            or buffers of ``aggregate`` without rounds, by the times of arrival, see :mod:`lightning_g2.server.cadence`.
        delays: see :mod:`lightning_g2.simulate.delay`, or its text as :func:`parse_delays` takes it.
        seed: of the module, if it is made, of durations and of each gradient's randomness.
        record: file to write the arrivals to; :func:`lightning_g2.simulate.trace` repeats them.
        evaluation: held-out batches for the terminal loss, and for gates that need an evaluation. None takes all of a
            sequence of training batches, or the first batch of up to 8 ranks.
        late: what becomes of a push whose round had ended: ``"drop"``, or ``"gate"``: it joins the current round if the
            gate lets it pass.
        buffer_weights: what a push counts in a buffer: ``"equal"``, or ``"fedbuff"``, 1/√(1+τ) (arXiv 2106.06639).
        delayed_nesterov: each push is applied at once at 1/``aggregate`` of the rate, and the Nesterov momentum of SGD
            moves with every ``aggregate``-th (arXiv 2401.09135).
        staleness_cost: of ``rounds="auto"``: what a push that is one push old costs beside one more in the mean; None
            takes it from optimizer and gate.
        observe: called with an :class:`Observation` of each push, rejected ones included, right after the server has
            taken it in: its gradients, what the gate knew and decided, the weights before and after. It changes nothing
            in the run.

    Returns:
        Terminal loss, final weights, and what became of each push.

    Raises:
        ConfigurationError: an argument is out of range or of a kind that is not described here.

    Example::

        result = simulate(
            lambda: nn.Linear(8, 1), lambda model, batch: model(batch[0]).sub(batch[1]).square().mean(), batches,
            ranks=16, pushes=1000, gate="g2", optimizer="adam", lr=1e-3, delays=straggler(0.25, 10), seed=0,
        )
    """
    laws = parse_delays(delays) if isinstance(delays, str) else delays
    _check(laws, ranks=ranks, pushes=pushes, time_limit=time_limit, lr=lr, clip=clip)
    aggregation = aggregation_of(
        ranks, aggregate=aggregate, rounds=rounds, late=late, buffer_weights=buffer_weights,
        delayed_nesterov=delayed_nesterov,
    )  # fmt: skip
    if record is not None and laws.reads:
        raise ConfigurationError("record with layered delays: a trace has one read a gradient; leave record out")
    source = BatchSource(batches, evaluation, ranks)
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        module = build_model(model, seed)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        seed_torch(seed)
        fractions = sorted({0.0, *laws.reads.values()})
        made, make_gate = build_optimizer(optimizer, trained, lr), gate_maker(gate)
        if aggregation.auto is not None:
            cost = staleness_cost_of([made], make_gate().staleness_cost) if staleness_cost is None else staleness_cost
            aggregation = replace(aggregation, auto=Criterion(staleness_cost=cost))
        job = Job(
            module,
            loss,
            made,
            make_gate=make_gate,
            source=source,
            ranks=ranks,
            aggregation=aggregation,
            clip=clip,
            groups=lambda names: _groups(names, laws, fractions),
            observe=observe,
        )
        waited = [0.0] * ranks
        with nullcontext() if record is None else closing(TraceWriter(record, ranks)) as writer:
            if isinstance(laws, Trace):
                replay(job, laws, schedule=schedule, pushes=pushes, time_limit=time_limit, writer=writer)
            else:
                clock = Clock(
                    job, laws, seed=seed, schedule=schedule, pushes=pushes, time_limit=time_limit, writer=writer
                )
                clock.run(fractions)
                waited = clock.waited
        terminal = job.finish()
    return SimulationResult(
        loss=terminal,
        **vars(job.arrivals),
        weights=job.weights(),
        model=module,
        waited=waited,
        versions_held=job.versions.most,
    )


def aggregation_of(
    ranks: int,
    *,
    aggregate: int = 1,
    rounds: int | str | None = None,
    late: Late = "drop",
    buffer_weights: BufferWeights = "equal",
    delayed_nesterov: bool = False,
) -> Aggregation:
    """How many pushes make one version, by options of :func:`simulate`.

    Raises:
        ConfigurationError: an option is out of range, or two do not go together.
    """
    auto = rounds == "auto"
    for name, value in (("aggregate", aggregate), ("rounds", 1 if rounds is None or auto else rounds)):
        sound = isinstance(value, int) and 1 <= value <= ranks
        remedy = "give such a number" + (", or 'auto'" if name == "rounds" else "")
        require(sound, name, value, f"be an integer from 1 to the number of ranks, {ranks}", remedy)
    alone = rounds is None or auto or aggregate == 1
    require(alone, "aggregate", aggregate, f"be 1 beside rounds={rounds!r}", "leave one of them out")
    require_choice("late", late, get_args(Late))
    return Aggregation(
        aggregate=aggregate,
        rounds=rounds if isinstance(rounds, int) else None,
        late=late,
        buffer_weights=buffer_weights,
        delayed_nesterov=delayed_nesterov,
        auto=Criterion() if auto else None,
    )


def _groups(names: Sequence[str], laws: Delays, fractions: Sequence[float]) -> list[list[int]]:
    """Indices of the parameters that are read at each fraction."""
    groups: list[list[int]] = [[] for _ in fractions]
    for i, name in enumerate(names):
        fitting = [prefix for prefix in laws.reads if name.startswith(prefix)]
        fraction = laws.reads[max(fitting, key=len)] if fitting else 0.0
        groups[fractions.index(fraction)].append(i)
    return groups


def _check(
    laws: Delays, *, ranks: int, pushes: int | None, time_limit: float | None, lr: float, clip: float | None
) -> None:
    if not isinstance(laws, Delays):
        raise ConfigurationError(f"delays={laws!r}: must be delays, such as straggler(0.25, 10), or their text")
    require(isinstance(ranks, int) and ranks >= 1, "ranks", ranks, "be an integer ≥ 1", "give the number of ranks")
    ends = pushes is not None or time_limit is not None or isinstance(laws, Trace)
    require(ends, "pushes", pushes, "be given where there is no time_limit", "give one of the two")
    require(pushes is None or pushes >= 1, "pushes", pushes, "be ≥ 1", "give the number of arrivals")
    require(time_limit is None or time_limit > 0, "time_limit", time_limit, "be > 0", "give units of the delays")
    require(lr >= 0.0 and math.isfinite(lr), "lr", lr, "be ≥ 0", "give a learning rate")
    require(clip is None or clip > 0.0, "clip", clip, "be > 0", "None does not clip")
    if isinstance(laws, Trace):
        require(ranks == laws.ranks, "ranks", ranks, f"be {laws.ranks}, as in the trace", "give that number")
