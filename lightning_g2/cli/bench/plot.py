"""Pictures of the benchmarks' records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_g2.cli.bench.record import Record
from lightning_g2.errors import ConfigurationError

_COLOURS = {"ddp": "#7f7f7f", "g2async": "#1f77b4"}
_PARTS = {
    "compute_s": ("compute", "#a6bddb"), "gate_s": ("gate", "#2b8cbe"), "copy_s": ("copy", "#fdb863"),
    "wait_s": ("wait", "#d7301f"), "apply_s": ("apply", "#7fbc41"),
}  # fmt: skip


def transport(records: Sequence[Record], path: Path) -> None:
    """Time of a push and pull over its size beside gloo's all-reduce, and their ratio."""
    figure, (times, ratios) = _figure(2)
    for number, name in enumerate(dict.fromkeys(r["transport"] for r in records)):
        rows = [r for r in records if r["transport"] == name]
        sizes = [r["bytes"] / 1e6 for r in rows]
        colour = f"C{number}"
        times.plot(sizes, [1e3 * r["push_pull_s"] for r in rows], "o-", color=colour, label=f"{name}, all of it")
        times.plot(sizes, [1e3 * r["transfer_s"] for r in rows], "o:", color=colour, label=f"{name}, without SGD")
        ratios.plot(sizes, [r["ratio"] for r in rows], "o-", color=colour, label=f"{name}, all of it")
        ratios.plot(sizes, [r["ratio_with_load"] for r in rows], "o:", color=colour, label=f"{name}, into the module")
    rows = [r for r in records if r["transport"] == records[0]["transport"]]
    sizes = [r["bytes"] / 1e6 for r in rows]
    times.plot(sizes, [1e3 * r["gloo_all_reduce_s"] for r in rows], "s-", color="#333333", label="gloo all-reduce, 2")
    times.plot(sizes, [1e3 * r["memcpy_s"] for r in rows], "^--", color="#999999", label="two plain copies")
    times.set(title="push and pull", xlabel="MB", ylabel="ms", xscale="log", yscale="log")
    ratios.axhline(1.0, color="#333333", linewidth=1)
    ratios.set(title="over gloo's all-reduce of two ranks", xlabel="MB", xscale="log", yscale="log")
    _finish(figure, path, records, times, ratios)


def step(records: Sequence[Record], path: Path) -> None:
    """Parts of a step as stacked bars, and samples a second."""
    figure, (parts, paces) = _figure(2)
    names = [_name(r) for r in records]
    bottom = [0.0] * len(records)
    for field, (label, colour) in _PARTS.items():
        values = [1e3 * max(r[field], 0.0) for r in records]
        parts.bar(names, values, 0.6, bottom=bottom, color=colour, label=label)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    parts.set(title="a rank's step", ylabel="ms")
    _bars(paces, records, "samples_per_s")
    paces.set(title="samples a second, over DDP's", ylabel="samples/s")
    _finish(figure, path, records, parts)


def stragglers(records: Sequence[Record], path: Path) -> None:
    """Samples a second, time to the loss and idle share as bars."""
    figure, (paces, times, idle) = _figure(3)
    _bars(paces, records, "samples_per_s")
    paces.set(title="applied samples a second, over DDP's", ylabel="samples/s")
    reached = [r for r in records if r["time_to_loss_s"] is not None]
    _bars(times, reached, "time_to_loss_s", over="time_ratio_to_ddp")
    times.set(title=f"time to a loss of {records[0]['target_loss']:g}, over DDP's", ylabel="s")
    _bars(idle, records, "idle_fraction", over="idle_fraction")
    idle.set(title="share of time that ranks wait", ylim=(0, 1))
    for axes in (paces, times, idle):
        axes.tick_params(axis="x", labelrotation=20)
    _finish(figure, path, records)


def scaling(records: Sequence[Record], path: Path) -> None:
    """Samples a second over ranks, and how much of the ranks' own speed that is."""
    figure, (paces, efficiency) = _figure(2)
    for name in dict.fromkeys(_name(r) for r in records):
        rows = [r for r in records if _name(r) == name]
        ranks, colour = [r["ranks"] for r in rows], _COLOURS[rows[0]["strategy"]]
        low = [r["samples_per_s"] - r["samples_per_s_range"][0] for r in rows]
        high = [r["samples_per_s_range"][1] - r["samples_per_s"] for r in rows]
        values = [r["samples_per_s"] for r in rows]
        paces.errorbar(ranks, values, [low, high], fmt="o-", color=colour, capsize=3, label=name.replace("\n", " "))
        efficiency.plot(ranks, [r["efficiency"] for r in rows], "o-", color=colour, label=name.replace("\n", " "))
    paces.set(title="samples a second", xlabel="ranks", ylabel="samples/s", ylim=(0, None))
    efficiency.set(title="over what the sleeps alone allow", xlabel="ranks", ylim=(0, 1.05))
    for axes in (paces, efficiency):
        axes.set_xticks(sorted({r["ranks"] for r in records}))
    _finish(figure, path, records, paces, efficiency)


def memory(records: Sequence[Record], path: Path) -> None:
    """What a rank and the server hold beside the limits."""
    figure, (axes,) = _figure(1)
    rows = [r for r in records if r["limit_bytes"] is not None]
    places = range(len(rows))
    size = rows[0]["parameter_bytes"]
    axes.bar([p - 0.2 for p in places], [r["beyond_bytes"] / size for r in rows], 0.4, color="#1f77b4", label="held")
    axes.bar([p + 0.2 for p in places], [r["limit_bytes"] / size for r in rows], 0.4, color="#cccccc", label="limit")
    axes.set_xticks(list(places), [r["process"] for r in rows])
    axes.set(title="memory beyond plain Lightning's, beyond a bare server's", ylabel="times the parameters")
    _finish(figure, path, records, axes)


def _figure(panels: int) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "g2-bench --plot: matplotlib is not installed; install it with pip install 'lightning_g2[plot]'"
        ) from error
    figure = Figure(figsize=(1.5 + 4.5 * panels, 4.6), layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _bars(axes: Any, records: Sequence[Record], field: str, *, over: str = "ratio_to_ddp") -> None:
    """One bar a record, with its range over repeats and, above it, its ratio to DDP."""
    names = [_name(r) for r in records]
    values = [r[field] for r in records]
    bars = axes.bar(names, values, 0.6, color=[_COLOURS.get(r["strategy"], "#9ecae1") for r in records])
    tops = [(r.get(f"{field}_range") or [0.0, value])[1] for r, value in zip(records, values, strict=True)]
    if all(r.get(f"{field}_range") for r in records):
        low = [v - r[f"{field}_range"][0] for r, v in zip(records, values, strict=True)]
        high = [t - v for t, v in zip(tops, values, strict=True)]
        axes.errorbar(names, values, [low, high], fmt="none", color="#333333", capsize=3)
    for bar, record, top in zip(bars, records, tops, strict=True):
        axes.annotate(
            f"{record[over]:.2f}", (bar.get_x() + bar.get_width() / 2, top), (0, 4), textcoords="offset points",
            ha="center",
        )  # fmt: skip
    axes.margins(y=0.12)


def _name(record: Record) -> str:
    name, gate = str(record["strategy"]), record["gate"]
    return name.replace(" without", "\nwithout") + (f"\ngate {gate}" if gate else "")


def _finish(figure: Any, path: Path, records: Sequence[Record], *with_legend: Any) -> None:
    for axes in figure.axes:
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in with_legend:
        axes.legend(fontsize=8)
    first = records[0]
    figure.suptitle(f"{first['machine']}; medians of {first['repeats']} repeats", fontsize=8, color="#666666")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
