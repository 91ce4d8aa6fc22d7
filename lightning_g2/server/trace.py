"""A run's pushes in a file, one line each, in the order in which the server took them in."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any

from lightning_g2.errors import ConfigurationError
from lightning_g2.values import PushPacket, PushReceipt

FORMAT = "lightning_g2 trace 1"


@dataclass(frozen=True)
class TraceEntry:
    """One push.

    Attributes:
        rank: who pushed.
        k: pushes of this rank before it.
        number: gradients that all ranks had begun before it, in a simulation; in a real run, pushes taken in before it.
        read: pushes that had been taken in when its weights were read.
        viewed: pushes that had been taken in when its gate decided.
        base: version of the weights that were read.
        version: version after the push.
        time: of arrival, in the units of the delays, or seconds.
        rejected: the gate's decision.
        energy: friction.
        weight: weight.
        seed: of its randomness, in a simulation.
        rng: state of torch's generator on the CPU before its first batch, in a real run; base64.
        lr_factor: factor of the learning rate, in a simulation.
        rates: learning rate of each group, in a real run.
        samples: indices in the data set of each of its batches, in a real run; None where ranks bring their own data.
    """

    rank: int
    k: int
    number: int
    read: int
    viewed: int
    base: int
    version: int
    time: float
    rejected: bool
    energy: float
    weight: float
    seed: int = 0
    rng: str = ""
    lr_factor: float = 1.0
    rates: list[float] | None = None
    samples: list[list[int]] | None = None


class TraceWriter:
    """Writes entries as lines of JSON, the first line a header; each push is on disk when it has been answered.

    Args:
        path: the file; replaced.
        ranks: number of ranks.

    Raises:
        ConfigurationError: the file cannot be written.
    """

    def __init__(self, path: str | PathLike[str], ranks: int) -> None:
        try:
            self._file: IO[str] = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115 - see close
        except OSError as error:
            raise ConfigurationError(
                f"record={str(path)!r}: must be a file that can be written ({error.strerror}); make its folder first"
            ) from error
        self._line({"format": FORMAT, "ranks": ranks})
        self._arrivals = 0
        self._read_at = {0: 0}

    def write(self, entry: TraceEntry) -> None:
        """Add one push."""
        self._line(asdict(entry))

    def take(self, packet: PushPacket, receipt: PushReceipt, time_s: float) -> None:
        """Add one push that a server has taken in, if its rank has made notes for it."""
        if packet.note is not None:
            self.write(
                TraceEntry(
                    rank=packet.rank,
                    k=packet.sequence,
                    number=self._arrivals,
                    read=self._read_at[packet.base_version],
                    viewed=packet.note.viewed,
                    base=packet.base_version,
                    version=receipt.version,
                    time=time_s,
                    rejected=packet.rejected,
                    energy=packet.energy,
                    weight=packet.weight,
                    rng=base64.b64encode(packet.note.rng).decode(),
                    rates=list(packet.note.rates),
                    samples=None if packet.note.samples is None else [list(batch) for batch in packet.note.samples],
                )
            )
        self._arrivals += 1
        self._read_at.setdefault(receipt.version, self._arrivals)

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def _line(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")


def read_trace(path: str | PathLike[str]) -> tuple[int, tuple[TraceEntry, ...]]:
    """Number of ranks, and pushes, of a recorded run.

    Raises:
        ConfigurationError: the file is no trace.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        header = json.loads(lines[0])
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}")
        return int(header["ranks"]), tuple(TraceEntry(**json.loads(line)) for line in lines[1:])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigurationError(
            f"trace {str(path)!r}: must be what record= has written ({error}); record the run again"
        ) from error
