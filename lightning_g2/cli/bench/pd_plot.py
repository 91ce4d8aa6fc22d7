"""Picture of the records of ``g2-bench pd``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_g2.cli.bench.record import Record
from lightning_g2.errors import ConfigurationError


def draw(records: Sequence[Record], path: Path) -> None:
    """Pace of thread ratios, time over a straggler's slowness, staleness of layers.

    Args:
        records: of the benchmark.
        path: the PNG to write.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "g2-bench --plot: matplotlib is not installed; install it with pip install 'lightning_g2[plot]'"
        ) from error
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    paces, delays, lags = figure.subplots(1, 3)
    alone = [r for r in records if r["workers"] == 1]
    _paces(paces, alone)
    _delays(delays, [r for r in records if r["workers"] > 1])
    for record in alone:
        if record["backward_threads"] > 1:
            lags.plot(range(1, len(record["layer_lags"]) + 1), record["layer_lags"], "o-", label=_name(record))
    lags.set(title="lag within the backward pass", xlabel="layer", ylabel="versions of the layer")
    for axes in (paces, delays, lags):
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    first = records[0]
    note = f"{first['machine']}; {first['compute']} compute; medians of {first['repeats']} repeats"
    figure.suptitle(note, fontsize=8, color="#666666")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _paces(axes: Any, records: Sequence[Record]) -> None:
    bars = axes.bar([_name(r) for r in records], [r["ratio_to_plain"] for r in records], 0.6, color="#1f77b4")
    for bar, record in zip(bars, records, strict=True):
        if record["of_ideal"] is not None:
            place = (bar.get_x() + bar.get_width() / 2, record["ratio_to_plain"])
            share = f"{record['of_ideal']:.0%}"
            axes.annotate(share, place, (0, 4), textcoords="offset points", ha="center", fontsize=7)
    axes.tick_params(axis="x", labelrotation=45, labelsize=8)
    axes.set(title="samples a second over plain; share of the ideal", ylabel="times plain")


def _delays(axes: Any, records: Sequence[Record]) -> None:
    for mode in dict.fromkeys(r["mode"] for r in records):
        rows = [r for r in records if r["mode"] == mode]
        axes.plot([r["delay"] for r in rows], [1e3 * r["batch_s"] for r in rows], "o-", label=mode)
    axes.set(title="time per batch, one of the workers slowed", xlabel="times slower", ylabel="ms", ylim=(0, None))


def _name(record: Record) -> str:
    forward, backward = record["forward_threads"], record["backward_threads"]
    return str(record["mode"]) + (f" {forward}:{backward}" if backward else "")
