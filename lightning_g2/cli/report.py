"""``g2-report``: a picture of one run, from its TensorBoard log."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_g2.errors import ConfigurationError

_QUANTILES = (0.1, 0.5, 0.9)


def read_events(log_dir: Path) -> EventAccumulator:
    """Load all scalars and histograms of the one run below a folder.

    Raises:
        ConfigurationError: there is no event file, or there are several.
    """
    found = sorted(log_dir.rglob("events.out.tfevents.*"))
    if len(found) != 1:
        rule = "must hold exactly one event file; name the folder of one run, as g2-train prints it"
        raise ConfigurationError(f"{log_dir}: holds {len(found)} event files, {rule}")
    return EventAccumulator(str(found[0]), size_guidance={"scalars": 0, "histograms": 0}).Reload()


def scalar(events: EventAccumulator, tag: str) -> tuple[list[int], list[float]]:
    """Steps and values of a scalar; empty where the run has none."""
    if tag not in events.Tags()["scalars"]:
        return [], []
    entries = events.Scalars(tag)
    return [entry.step for entry in entries], [entry.value for entry in entries]


def histogram_quantiles(events: EventAccumulator, tag: str) -> tuple[list[int], list[list[float]]]:
    """Steps of a histogram, and for each of the quantiles 0.1, 0.5, 0.9 its values over the steps."""
    if tag not in events.Tags()["histograms"]:
        return [], []
    entries = events.Histograms(tag)
    values = [[_quantile(entry.histogram_value, q) for entry in entries] for q in _QUANTILES]
    return [entry.step for entry in entries], values


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


def draw(events: EventAccumulator, path: Path, *, title: str) -> None:
    """Draw loss, openness, friction and staleness over rank 0's steps.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "g2-report: matplotlib is not installed; install it with pip install 'lightning_g2[plot]'"
        ) from error
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    ((loss, openness), (friction, staleness)) = figure.subplots(2, 2)
    for tag, label in (("train_loss", "training"), ("val_loss", "validation")):
        loss.plot(*scalar(events, tag), "o-" if tag == "val_loss" else "-", label=label)
    loss.set(title="loss", ylabel="nats/byte", xlabel="step of rank 0")
    loss.legend()
    openness.plot(*scalar(events, "g2/openness"), label="all pushes")
    openness.plot(*scalar(events, "g2/openness_stale"), label="stale pushes (τ > 0)")
    openness.set(title="openness: mean weight given by the gate", ylim=(-0.03, 1.03), xlabel="step of the job")
    openness.legend()
    steps, quantiles = histogram_quantiles(events, "g2/friction")
    if steps:
        friction.fill_between(steps, quantiles[0], quantiles[2], alpha=0.3, label="10% to 90% of pushes")
        friction.plot(steps, quantiles[1], label="median")
        friction.legend()
    friction.set(title="friction E of a push", ylim=(-0.05, 8 / 3 + 0.05), xlabel="step of the job")
    staleness.plot(*scalar(events, "g2/staleness_max"), label="maximum")
    staleness.plot(*scalar(events, "g2/staleness_mean"), label="mean")
    staleness.set(title="staleness τ", ylabel="versions", xlabel="step of the job")
    staleness.legend()
    for axes in (loss, openness, friction, staleness):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``g2-report``.

    Args:
        argv: arguments, without the program's name; the process's own by default.

    Returns:
        Exit code.
    """
    parser = argparse.ArgumentParser(prog="g2-report", description="Draw one run from its TensorBoard log.")
    parser.add_argument("log_dir", type=Path, help="folder of the run, as g2-train prints it")
    parser.add_argument("--png", type=Path, default=Path("report.png"), help="picture to write (default: report.png)")
    parser.add_argument("--title", default="", help="title of the picture")
    arguments = parser.parse_args(argv)
    try:
        draw(read_events(arguments.log_dir), arguments.png, title=arguments.title or str(arguments.log_dir))
    except ConfigurationError as error:
        print(f"g2-report: {error}", file=sys.stderr)
        return 2
    print(arguments.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
