"""The ledger of each epoch, where a user finds it: a file of JSON lines beside the other logs, and the log itself."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_g2.strategy.stopping import log
from lightning_g2.values import EpochRecord

FILE_NAME = "ledger.jsonl"
"""In the folder of the trainer's first logger that has one: a line for each epoch."""


class EpochLog:
    """Writes down what was trained on, on rank 0.

    Args:
        trainer: its loggers say where.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.records: list[EpochRecord] = []

    def write(self, record: EpochRecord | None, *, seed: int, over: bool) -> None:
        """Write an epoch down, once.

        Args:
            record: what server 0 has seen of it; None where no epoch has begun.
            seed: what the order of batches was drawn with.
            over: the epoch has ended; otherwise the job has failed within it.
        """
        if record is None or (self.records and self.records[-1].epoch == record.epoch):
            return
        self.records.append(record)
        line = {**asdict(record), "seed": seed, "exact": record.exact, "over": over}
        if (folder := self._folder()) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / FILE_NAME).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if record.again or record.returned:
            log.info(describe(record))

    def _folder(self) -> Path | None:
        loggers: list[Any] = self._trainer.loggers
        found = (getattr(logger, "log_dir", None) for logger in loggers)
        return next((Path(folder) for folder in found if folder), None)


def describe(record: EpochRecord) -> str:
    """An epoch in which ranks were lost, in a line."""
    returned = sum(map(len, record.returned.values()))
    missing = f", {len(record.missing)} not" if record.missing else ""
    return (
        f"epoch {record.epoch}: of {record.batches} batches {record.before + record.once} were trained on once, "
        f"{len(record.again)} again{missing}; {returned} that ranks had left were handed to others"
    )
