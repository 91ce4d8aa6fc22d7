"""Arrivals of a run in a file, and runs that repeat them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from random import Random
from types import TracebackType
from typing import IO, Any

from lightning_g2.errors import ConfigurationError
from lightning_g2.simulate.delay import Delays
from lightning_g2.simulate.job import Gradient, Job
from lightning_g2.values import GateDecision, PushReceipt

FORMAT = "lightning_g2 trace 1"


@dataclass(frozen=True)
class TraceEntry:
    """One push, in the order in which pushes were taken in.

    Attributes:
        rank: who pushed.
        k: gradients that this rank had begun before.
        number: gradients that all ranks had begun before; also the number of the batch in a sequence.
        read: pushes that had been taken in when the weights were read.
        base: version of those weights.
        seed: of the gradient's randomness.
        lr_factor: factor of the learning rate.
        time: of arrival.
        rejected: the gate's decision.
        energy: friction.
        weight: weight.
        version: version after the push.
    """

    rank: int
    k: int
    number: int
    read: int
    base: int
    seed: int
    lr_factor: float
    time: float
    rejected: bool
    energy: float
    weight: float
    version: int


class TraceWriter:
    """Writes entries as lines of JSON, the first line a header.

    Args:
        path: the file; replaced.
        ranks: number of ranks.
    """

    def __init__(self, path: str | PathLike[str], ranks: int) -> None:
        self._file: IO[str] = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed by the context
        self._line({"format": FORMAT, "ranks": ranks})

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, gradient: Gradient, decision: GateDecision, receipt: PushReceipt, time: float) -> None:
        """Add one push."""
        self._line(
            asdict(
                TraceEntry(
                    rank=gradient.rank,
                    k=gradient.k,
                    number=gradient.number,
                    read=gradient.read,
                    base=gradient.versions[0],
                    seed=gradient.seed,
                    lr_factor=gradient.lr_factor,
                    time=time,
                    rejected=decision.rejected,
                    energy=decision.energy,
                    weight=decision.weight,
                    version=receipt.version,
                )
            )
        )

    def _line(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")


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


def trace(path: str | PathLike[str]) -> Trace:
    """Delays that repeat a recorded run: the same ranks read and arrive in the same order, on the same batches.

    With the model, gate, optimizer and rate of the recorded run the weights come out the same, bit for bit at the same
    number of threads. With another gate or optimizer the arrivals stay and the rest follows from them: what was read
    after so many arrivals is read after as many. The schedule's factors are those recorded, unless a schedule is given.

    Args:
        path: what ``record=`` has written.

    Raises:
        ConfigurationError: the file is no trace.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    try:
        header = json.loads(lines[0])
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}")
        entries = tuple(TraceEntry(**json.loads(line)) for line in lines[1:])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigurationError(
            f"trace {str(path)!r}: must be what record= has written ({error}); record the run again"
        ) from error
    return Trace(ranks=int(header["ranks"]), entries=entries)


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
        schedule: takes the place of the recorded factors; None keeps them.
        pushes: end after so many; None after all.
        time_limit: end before the first arrival after it.
        writer: takes what is recorded anew.
    """
    kept = [e for e in recorded.entries[:pushes] if time_limit is None or e.time <= time_limit]
    readers: dict[int, int] = {}
    for entry in kept:
        readers[entry.read] = readers.get(entry.read, 0) + 1
    version_at: dict[int, int] = {}
    for arrival, entry in enumerate(kept):
        version_at[arrival] = job.versions.hold(readers.get(arrival, 0))
        factor = entry.lr_factor if schedule is None else float(schedule(entry.read / len(kept)))
        gradient = Gradient(
            rank=entry.rank,
            k=entry.k,
            number=entry.number,
            read=entry.read,
            versions=(version_at[entry.read],),
            lr_factor=factor,
            seed=entry.seed,
        )
        decision, receipt = job.arrive(gradient, entry.time)
        job.released()
        if writer is not None:
            writer.write(gradient, decision, receipt, entry.time)
