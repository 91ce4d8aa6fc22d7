"""Runs that repeat the arrivals of a recorded one."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lightning_g2.errors import ConfigurationError
from lightning_g2.server import TraceEntry, TraceWriter, read_trace
from lightning_g2.simulate.delay import Delays
from lightning_g2.simulate.job import Gradient, Job
from lightning_g2.values import GateDecision, PushReceipt, ServerView


@dataclass(frozen=True, kw_only=True)
class Trace(Delays):
    """Arrivals of a recorded run, see :func:`trace`.

    Attributes:
        ranks: of the recorded run.
        entries: its pushes.
    """

    ranks: int
    entries: tuple[TraceEntry, ...] = field(repr=False)

    def sample(self, rank: int, ranks: int, random: Random) -> float:
        """A trace has no durations to draw: who read and who arrived is known."""
        raise ConfigurationError("a trace cannot be layered: it says when whole models were read; give it as it is")

    def batches(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] = default_collate
    ) -> Callable[[int, int], Any]:
        """The batches that the ranks of a real run trained on, as :func:`simulate` takes them.

        Args:
            dataset: the recorded run's data set.
            collate: makes a batch of samples, as the loader's ``collate_fn`` does.

        Raises:
            ConfigurationError: the ranks did not know the indices of their samples, or accumulated several batches.
        """
        known: dict[tuple[int, int], list[int]] = {}
        for entry in self.entries:
            if entry.samples is None or len(entry.samples) != 1:
                what = "no indices" if not entry.samples else f"{len(entry.samples)} batches"
                raise ConfigurationError(
                    f"trace: push {entry.k} of rank {entry.rank} has {what}; only runs whose batches the server "
                    "handed out (dispatch='dynamic'), one batch a step, can be repeated from a data set"
                )
            known[entry.rank, entry.k] = entry.samples[0]
        return lambda rank, k: collate([dataset[index] for index in known[rank, k]])


def trace(path: str | PathLike[str]) -> Trace:
    """Delays that repeat a recorded run: the same ranks read and arrive in the same order, on the same batches.

    With model, gate, optimizer and rate of the recorded run the weights come out the same, bit for bit at the same
    number of threads; in a simulation and in a real run::

        recorded = trace("run.jsonl")
        simulate(model, loss, recorded.batches(dataset), ranks=recorded.ranks, delays=recorded, ...)

    Random numbers that a step draws on the CPU are those of the recorded run, and so are the learning rates unless a
    schedule is given. With another gate or optimizer the arrivals stay and the rest follows from them: what was read
    after so many arrivals is read after as many. Weights that users' code or callbacks changed are not in a trace, nor
    are ranks' buffers (running statistics); a gate that compares base and current weights, in a real run, may have
    fetched the latter some pushes later than its trace says.

    Args:
        path: what ``record=`` has written.

    Raises:
        ConfigurationError: the file is no trace.
    """
    ranks, entries = read_trace(path)
    return Trace(ranks=ranks, entries=entries)


def entry_of(
    gradient: Gradient, decision: GateDecision, receipt: PushReceipt, time: float, *, viewed: int
) -> TraceEntry:
    """What a recording keeps of a simulated push.

    Args:
        gradient: what has arrived.
        decision: its gate's.
        receipt: the server's.
        time: of arrival.
        viewed: pushes that had been taken in before.
    """
    return TraceEntry(
        rank=gradient.rank,
        k=gradient.k,
        number=gradient.number,
        read=gradient.read,
        viewed=viewed,
        base=gradient.versions[0],
        version=receipt.version,
        time=time,
        rejected=decision.rejected,
        energy=decision.energy,
        weight=decision.weight,
        seed=gradient.seed,
        rng="" if gradient.rng is None else base64.b64encode(gradient.rng.numpy().tobytes()).decode(),
        lr_factor=gradient.lr_factor,
        rates=None if gradient.rates is None else list(gradient.rates),
    )


def replay(
    job: Job,
    recorded: Trace,
    *,
    schedule: Callable[[float], float] | None,
    pushes: int | None,
    time_limit: float | None,
    writer: TraceWriter | None,
) -> None:
    """Let recorded pushes arrive.

    Args:
        job: the job.
        recorded: the arrivals.
        schedule: takes the place of the recorded rates; None keeps them.
        pushes: end after so many; None after all.
        time_limit: end before the first arrival after it.
        writer: takes what is recorded anew.
    """
    kept = [e for e in recorded.entries[:pushes] if time_limit is None or e.time <= time_limit]
    readers = Counter(entry.read for entry in kept)
    viewers = Counter(entry.viewed for entry in kept)
    version_at: dict[int, int] = {}
    views: dict[int, ServerView] = {}
    for rank in range(job.ranks):  # a real run's clock began before its first push, at a time that no trace holds
        job.begin(rank, kept[0].time if kept and kept[0].rng else 0.0)
    for arrival, entry in enumerate(kept):
        version_at[arrival] = job.versions.hold(readers[arrival])
        if viewers[arrival]:
            views[arrival] = job.view()
        rates = None if entry.rates is None or schedule is not None else tuple(entry.rates)
        gradient = Gradient(
            rank=entry.rank,
            k=entry.k,
            number=entry.number,
            read=entry.read,
            versions=(version_at[entry.read],),
            lr_factor=entry.lr_factor if schedule is None else float(schedule(entry.read / len(kept))),
            seed=entry.seed,
            rng=_state(entry.rng),
            rates=rates,
            view=views[entry.viewed],
        )
        decision, receipt = job.arrive(gradient, entry.time)
        viewers[entry.viewed] -= 1
        if not viewers[entry.viewed]:
            del views[entry.viewed]
        job.released()
        if writer is not None:
            writer.write(entry_of(gradient, decision, receipt, entry.time, viewed=entry.viewed))


def _state(encoded: str) -> Tensor | None:
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8) if encoded else None
