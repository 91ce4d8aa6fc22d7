"""The pictures of a run, one panel each; a panel that has nothing to show says what the log lacks."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_g2.cli.report.log import Curve, RunLog
from lightning_g2.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#2f5d8a", "#d1722e", "#4f8f5b", "#8a4f8f", "#b0413e", "#6b6b6b", "#3d9c9c", "#b79a2e")
_INK, _GRID = "#2b2b2b", "#dddddd"

_BLOCKS = 24
"""Blocks shown by friction; of more, those that were judged hottest."""


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
        title: above it.
        note: how to read it; one sentence.
        draw: draws it; None where the log has nothing for it.
        lacking: why it has nothing; empty where it has.
    """

    title: str
    note: str
    draw: Callable[[Axes], None] | None
    lacking: str = ""


def panels(run: RunLog) -> list[Panel]:
    """All pictures of a run, in the order of the page."""
    pushes = "this log has no telemetry of pushes: the run did not train with g2async, or its loggers took no scalars"
    by_rank = (
        "the log was written by a version that does not log staleness by rank" if run.curve("g2/openness") else pushes
    )
    blocks = (
        "no friction by block: the gate judges none, or the logger is not TensorBoard"
        if run.curve("g2/openness")
        else pushes
    )
    made = [
        Panel("Loss by wall time", "Training and validation loss over the seconds since the log was opened.",
              _loss(run), "this log has no scalar that is called a loss"),
        Panel("Openness", "Mean weight that the gate gave: 1 lets pushes pass as they are, 0 stops or empties them.",
              _openness(run), pushes),
        Panel("Friction of pushes", "Energy E of the pushes of all ranks, 0 to 8/3: median, and 10% to 90%.",
              _friction(run), f"{pushes}; or its logger takes no histograms"),
        Panel("Friction by block", "Mean E of each filtered block over rank 0's own pushes; dark is hot.",
              _blocks(run), blocks),
        Panel("Staleness by rank", "Versions applied between a push's base and its application, mean of each rank.",
              _staleness(run), by_rank),
        Panel("Goodput", "Samples a second behind applied pushes, stacked by rank; late and rejected ones count not.",
              _goodput(run), pushes),
    ]  # fmt: skip
    if run.curve("g2/rounds"):
        note = "Pushes that end a synchronous round, as chosen from the times of arrival; 0: nobody waits."
        made.append(Panel("Rounds in force", note, _rounds(run)))
    return [panel if panel.draw is None else Panel(panel.title, panel.note, panel.draw) for panel in made]


def png(panel: Panel) -> str:
    """One panel's picture, base64.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure = _figure((6.4, 3.6))
    _fill(figure.subplots(), panel, titled=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=140)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def sheet(shown: list[Panel], title: str) -> bytes:
    """All panels on one sheet, as PNG.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    rows = -(-len(shown) // 2)
    figure = _figure((13, 3.7 * rows + 0.5))
    axes = figure.subplots(rows, 2, squeeze=False).flatten()
    for each, panel in zip(axes, shown, strict=False):
        _fill(each, panel, titled=True)
    for each in axes[len(shown) :]:
        each.set_axis_off()
    figure.suptitle(title, color=_INK, fontsize=14)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _figure(size: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "g2-report: matplotlib is not installed; install it with pip install 'lightning_g2[plot]'"
        ) from error
    return Figure(figsize=size, layout="constrained")


def _fill(axes: Axes, panel: Panel, *, titled: bool) -> None:
    if titled:
        axes.set_title(panel.title, loc="left", color=_INK, fontsize=11)
    if panel.draw is None:
        axes.set_axis_off()
        words = panel.lacking.replace(": ", ":\n", 1)
        axes.text(0.5, 0.5, words, ha="center", va="center", color="#777777", wrap=True, transform=axes.transAxes)
        return
    axes.set_prop_cycle(color=_COLOURS)
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    panel.draw(axes)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8, ncols=2)


def _loss(run: RunLog) -> Callable[[Axes], None] | None:
    losses = run.losses()
    if not losses:
        return None

    def draw(axes: Axes) -> None:
        for tag, curve in losses.items():
            dots = "o" if len(curve.steps) == 1 or "val" in tag or "test" in tag else ""
            axes.plot(curve.seconds, curve.values, marker=dots, markersize=4, linewidth=1.4, label=tag)
        axes.set(xlabel="seconds", ylabel="loss")

    return draw


def _openness(run: RunLog) -> Callable[[Axes], None] | None:
    every, stale = run.curve("g2/openness"), run.curve("g2/openness_stale")
    if not every:
        return None

    def draw(axes: Axes) -> None:
        _by_step(axes, every, "all pushes")
        if stale:
            _by_step(axes, stale, "stale pushes (τ > 0)")
        axes.set(ylim=(-0.03, 1.05), ylabel="mean weight")

    return draw


def _friction(run: RunLog) -> Callable[[Axes], None] | None:
    steps, quantiles = run.quantiles("g2/friction")
    if not steps:
        return None

    def draw(axes: Axes) -> None:
        axes.fill_between(steps, quantiles[0], quantiles[2], alpha=0.25, linewidth=0, label="10% to 90%")
        axes.plot(steps, quantiles[1], marker="o" if len(steps) == 1 else "", label="median")
        axes.set(ylim=(-0.05, 8 / 3 + 0.05), xlabel="step of the job", ylabel="E")

    return draw


def _blocks(run: RunLog) -> Callable[[Axes], None] | None:
    curves = run.curves(r"g2/friction/(.+)")
    if not curves:
        return None
    hottest = sorted(curves, key=lambda name: -sum(curves[name].values) / len(curves[name].values))[:_BLOCKS]
    shown = [name for name in run_order(run, curves) if name in hottest]

    def draw(axes: Axes) -> None:
        steps = sorted({step for name in shown for step in curves[name].steps})
        rows = [dict(zip(curves[name].steps, curves[name].values, strict=True)) for name in shown]
        grid = [[row.get(step, float("nan")) for step in steps] for row in rows]
        axes.grid(visible=False)
        image = axes.imshow(grid, aspect="auto", cmap="magma_r", vmin=0.0, vmax=8 / 3, interpolation="nearest")
        axes.set_yticks(
            range(len(shown)), [name if len(name) <= 34 else f"…{name[-33:]}" for name in shown], fontsize=6
        )
        ticks = sorted({round(i * (len(steps) - 1) / 5) for i in range(6)})
        axes.set_xticks(ticks, [str(steps[i]) for i in ticks])
        axes.set(xlabel="step of the job")
        axes.figure.colorbar(image, ax=axes, label="E", pad=0.01)

    return draw


def run_order(run: RunLog, curves: dict[str, Curve]) -> list[str]:
    """Names of blocks as the module has them, which is the order in which they were logged."""
    logged = [tag.removeprefix("g2/friction/") for tag in run.scalars]
    return [name for name in logged if name in curves]


def _staleness(run: RunLog) -> Callable[[Axes], None] | None:
    ranks, most = run.curves(r"g2/rank(\d+)/staleness_mean"), run.curve("g2/staleness_max")
    if not ranks:
        return None

    def draw(axes: Axes) -> None:
        for rank, curve in ranks.items():
            _by_step(axes, curve, f"rank {rank}")
        if most:
            axes.plot(most.steps, most.values, color="#999999", linestyle=":", label="maximum of all")
        axes.set(ylabel="versions")

    return draw


def _goodput(run: RunLog) -> Callable[[Axes], None] | None:
    ranks = run.curves(r"g2/rank(\d+)/samples_per_s")
    if not ranks:
        return None

    def draw(axes: Axes) -> None:
        steps = sorted({step for curve in ranks.values() for step in curve.steps})
        # A rank of which nothing was applied between two entries has none there: it made 0 samples a second.
        series = [dict(zip(curve.steps, curve.values, strict=True)) for curve in ranks.values()]
        if len(steps) == 1:
            axes.bar([f"rank {rank}" for rank in ranks], [values[steps[0]] for values in series], color=_COLOURS[0])
        else:
            heights = [[values.get(step, 0.0) for step in steps] for values in series]
            axes.stackplot(steps, heights, labels=[f"rank {rank}" for rank in ranks], alpha=0.85, colors=_COLOURS)
            axes.set(xlabel="step of the job")
        axes.set(ylabel="samples/s", ylim=(0.0, None))

    return draw


def _rounds(run: RunLog) -> Callable[[Axes], None]:
    curve = run.curve("g2/rounds")

    def draw(axes: Axes) -> None:
        axes.step(curve.steps, curve.values, where="post", linewidth=1.8)
        axes.set(ylim=(-0.2, max(curve.values) + 0.8), xlabel="step of the job", ylabel="pushes of a round")
        axes.locator_params(axis="y", integer=True)

    return draw


def _by_step(axes: Axes, curve: Curve, label: str) -> None:
    axes.plot(curve.steps, curve.values, marker="o" if len(curve.steps) == 1 else "", linewidth=1.4, label=label)
    axes.set(xlabel="step of the job")
