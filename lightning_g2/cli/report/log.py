"""What a run has left behind: its event files, its configuration, its table of ranks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from yaml import YAMLError  # type: ignore[import-untyped]

from lightning_g2.callbacks.report import REPORT_FILE
from lightning_g2.errors import ConfigurationError

CONFIG_FILES = ("job.yaml", ".hydra/config.yaml", "hparams.yaml")
"""Where a run's configuration is looked for: g2-train's, that of another Hydra app, Lightning's own."""

QUANTILES = (0.1, 0.5, 0.9)

_LEVELS = 2
"""Folders above the event files in which a configuration and a table belong to the run."""


@dataclass(frozen=True)
class Curve:
    """A scalar over a run; one entry a point.

    Attributes:
        steps: of the trainer, or of the job.
        seconds: since the log was opened.
        values: its values.
    """

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.steps)


class RunLog:
    """One run, read from its folder.

    Args:
        log_dir: the run's folder, or that of its event files.

    Attributes:
        folder: of the event files.
        config: configuration, as plain values; empty where there is none.
        config_file: where it was; None without one.
        facts: what ``report.json`` says of the ranks; empty without one.

    Raises:
        ConfigurationError: there is no event file below the folder, or there are several runs.
    """

    def __init__(self, log_dir: Path) -> None:
        folders = sorted({path.parent for path in log_dir.rglob("events.out.tfevents.*")})
        if len(folders) != 1:
            rule = "must hold those of exactly one run; name its folder, as g2-train prints it"
            found = f"event files in {len(folders)} folders" if folders else "no event files"
            raise ConfigurationError(f"{log_dir}: holds {found}, {rule}")
        self.folder = folders[0]
        sizes = {"scalars": 0, "histograms": 0, "tensors": 0}
        self._events = EventAccumulator(str(self.folder), size_guidance=sizes).Reload()
        self._tags: dict[str, Any] = self._events.Tags()
        self._start = self._events.FirstEventTimestamp()
        above = [self.folder.resolve(), *self.folder.resolve().parents][: _LEVELS + 1]
        self.config_file, self.config = _config(above)
        self.facts = _facts(above)

    @property
    def scalars(self) -> list[str]:
        """Tags of all scalars."""
        return list(self._tags["scalars"])

    def curve(self, tag: str) -> Curve:
        """A scalar; empty where the run has none of that tag."""
        if tag not in self._tags["scalars"]:
            return Curve()
        entries = self._events.Scalars(tag)
        return Curve(
            [entry.step for entry in entries],
            [entry.wall_time - self._start for entry in entries],
            [entry.value for entry in entries],
        )

    def curves(self, pattern: str) -> dict[str, Curve]:
        """Scalars whose tags match a regular expression of one group, by what the group is; ranks in their order."""
        found = {match.group(1): tag for tag in self.scalars if (match := re.fullmatch(pattern, tag))}
        ordered = sorted(found, key=lambda name: (int(name) if name.isdigit() else 0, name))
        return {name: self.curve(found[name]) for name in ordered}

    def losses(self) -> dict[str, Curve]:
        """Scalars that are losses, by tag: a loss by step where there is one, else that of epochs."""
        tags = [tag for tag in self.scalars if re.search(r"(^|[_/.-])(loss|nll|perplexity)", tag) and tag[:3] != "g2/"]
        return {
            tag: self.curve(tag) for tag in tags if f"{tag.removesuffix('_epoch')}_step" not in tags or "val" in tag
        }

    def quantiles(self, tag: str) -> tuple[list[int], list[list[float]]]:
        """Steps of a histogram, and for each of the quantiles 0.1, 0.5, 0.9 its values over the steps."""
        if tag not in self._tags["histograms"]:
            return [], []
        entries = self._events.Histograms(tag)
        values = [[_quantile(entry.histogram_value, q) for entry in entries] for q in QUANTILES]
        return [entry.step for entry in entries], values

    def texts(self, tag: str) -> list[tuple[int, float, str]]:
        """Step, seconds and words of each entry of a text."""
        name = f"{tag}/text_summary"
        if name not in self._tags["tensors"]:
            return []
        entries = self._events.Tensors(name)
        return [
            (entry.step, entry.wall_time - self._start, entry.tensor_proto.string_val[0].decode()) for entry in entries
        ]


def _config(folders: list[Path]) -> tuple[Path | None, dict[str, Any]]:
    for name in CONFIG_FILES:
        for folder in folders:
            try:
                loaded = OmegaConf.to_container(OmegaConf.load(folder / name))
            except (OSError, OmegaConfBaseException, YAMLError):
                continue
            if isinstance(loaded, dict) and loaded:
                return folder / name, {str(key): value for key, value in loaded.items()}
    return None, {}


def _facts(folders: list[Path]) -> dict[str, Any]:
    for folder in folders:
        try:
            loaded = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(loaded, dict):
            return loaded
    return {}


def _quantile(histogram: Any, quantile: float) -> float:
    """Quantile of a histogram, linear within its buckets and kept within its extremes."""
    wanted, below, left = quantile * sum(histogram.bucket), 0.0, histogram.min
    for right, count in zip(histogram.bucket_limit, histogram.bucket, strict=True):
        right = min(right, histogram.max)
        if count and below + count >= wanted:
            left = max(left, histogram.min)
            return float(left + (right - left) * (wanted - below) / count)
        below, left = below + count, right
    return float(histogram.max)
