"""Age or topology: which of the two tells whether a push does harm, by the loss change that this push alone causes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_g2.cli.bench.sources.association import auc, interval, multiple_correlation, rank_correlation
from lightning_g2.cli.bench.sources.output import Row, add_output_arguments, mean, present
from lightning_g2.cli.bench.sources.training import SMALL_MLP, Training, add_training_arguments
from lightning_g2.cli.bench.task import terminal_loss
from lightning_g2.cli.bench.trial import check_rule
from lightning_g2.routing import Gate, build_gate
from lightning_g2.routing.option import require
from lightning_g2.simulate import Observation
from lightning_g2.tasks.schedule import warmup_cosine

SUMMARY = "age or topology: AUC and partial correlation of τ, E and both with the held-out loss change of each push"

FRAMES: dict[str, dict[str, Any]] = {
    "random": {"frame": "random", "action": "scalar", "weight_rule": "relative", "scale": "unit"},
    "adaptive": {"frame": "adaptive", "scale": "unit"},
}
"""Options of gates that look at every push and decide on none; their energies are what is tested."""

PHASES = ("first third", "second third", "last third")
WHOLE = "whole run"
Series = dict[str, Tensor]
"""By name, one number a push, in order of arrival, shape (n,), float64."""

Statistic = Callable[[Series, str, Tensor], float]
"""Of a series, a cause and the coefficients of the regression of harm."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the experiment's options.

    Args:
        parser: of the experiment.
    """
    add_training_arguments(parser, task=SMALL_MLP, pushes=600, delays="pareto(1.3)", optimizer="sgd")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate, at its peak; then half a cosine to zero")
    parser.add_argument("--rule", default="none", help="gate that the run itself is under")
    parser.add_argument("--draws", type=int, default=200, help="bootstrap samples")
    add_output_arguments(parser, "age")


def run(args: argparse.Namespace) -> None:
    """Train, print, write, draw.

    Args:
        args: what :func:`add_arguments` declares.
    """
    check_rule(args.rule, args.ranks)
    require(args.draws >= 20, "draws", args.draws, "be ≥ 20", "200 will do")
    training = Training.of(args)
    records = [
        training.row(partial(_logged, training, seed), seed=seed, lr=args.lr, rule=args.rule) for seed in args.seeds
    ]
    runs = [{n: torch.tensor(record[n], dtype=torch.float64) for n in _FIELDS} for record in records]
    rows = [row for phase in (WHOLE, *PHASES) for row in analysed([part(r, phase) for r in runs], phase, args.draws)]
    harmful = mean([float((r["change"] > 0).double().mean()) for r in runs])
    present(
        args,
        title=f"{training.title}, rate {args.lr:g}, gate {args.rule}, {len(runs)} seeds",
        records=records,
        rows=rows,
        columns={
            "phase": lambda r: r["phase"],
            "of": lambda r: _NAMES[r["cause"]],
            "AUC for harm": lambda r: _cell(r, "auc"),
            "rank correlation with the change": lambda r: _cell(r, "correlation"),
            "with the other one fixed": lambda r: _cell(r, "partial"),
        },
        draw=lambda figure: _draw(figure, rows, runs),
        notes=[
            f"Harm: the held-out loss is higher after the push than before it; {harmful:.0%} of "
            f"{sum(len(r['change']) for r in runs)} pushes. Means over seeds; in brackets 95% of {args.draws} "
            "bootstrap samples of blocks of 16 pushes. For two causes together, the AUC is of a regression fitted on "
            "the other seeds, and the correlation the multiple one. Partial: of τ with the adaptive frame's E fixed, "
            "of an E with τ fixed."
        ],
    )


_FIELDS = ("staleness", *FRAMES, "change")
_NAMES = {
    "staleness": "age τ", "random": "E, random frame", "adaptive": "E, adaptive frame", "both": "τ and E, adaptive",
}  # fmt: skip


class Watcher:
    """Notes of each push its age, its energies, and the held-out loss change that it alone causes.

    What the server made of the push is put into a module of the watcher's own and evaluated; the run goes on with what
    it had. Under an optimizer with momentum that step contains what earlier pushes left in its state, too.

    Args:
        module: takes the weights.
        evaluate: held-out loss of the module as it is.
        seed: of the frames.
    """

    def __init__(self, module: nn.Module, evaluate: Callable[[nn.Module], float], *, seed: int = 0) -> None:
        self._module, self._evaluate, self._seed = module, evaluate, seed
        self._parameters = dict(module.named_parameters())
        self._gates: dict[tuple[str, int], Gate] = {}
        self._loss: float | None = None
        self.rows: list[Row] = []

    def __call__(self, push: Observation) -> None:
        """Note one push."""
        context = replace(push.context, weights=push.before, staleness=push.receipt.staleness)
        energies = {}
        for name, options in FRAMES.items():
            key = name, context.rank
            if key not in self._gates:
                self._gates[key] = build_gate("g2", seed=self._seed, **options)
            energies[name] = self._gates[key].decide(push.gradients, context).energy
        before = self._of(push.before) if self._loss is None else self._loss
        self._loss = self._of(push.after)
        self.rows.append({
            "staleness": context.staleness, **energies, "change": self._loss - before, "step": context.step,
        })  # fmt: skip

    def _of(self, weights: Any) -> float:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
        return self._evaluate(self._module)


def part(series: Series, phase: str) -> Series:
    """A third of a run, or all of it."""
    if phase == WHOLE:
        return series
    n, third = len(series["change"]), PHASES.index(phase)
    return {name: values[n * third // 3 : n * (third + 1) // 3] for name, values in series.items()}


def analysed(runs: Sequence[Series], phase: str, draws: int) -> list[Row]:
    """Rows for age, each energy, and age with energy.

    Args:
        runs: the same phase of each seed's run.
        phase: its name.
        draws: bootstrap samples.
    """
    rows = []
    for cause in _NAMES:
        fits = [_fitted([other for other in runs if other is not own] or [own]) for own in runs]
        row: Row = {"phase": phase, "cause": cause, "runs": len(runs), "pushes": sum(len(r["change"]) for r in runs)}
        for name, of in _STATISTICS.items():
            values = [of(own, cause, fit) for own, fit in zip(runs, fits, strict=True)]
            bounds = [
                interval(partial(_resampled, of, own, cause, fit), len(own["change"]), draws=draws, seed=seed)
                for seed, (own, fit) in enumerate(zip(runs, fits, strict=True))
            ]
            row[name] = mean([value for value in values if math.isfinite(value)])
            # Runs are independent: the half-widths of their mean add in squares.
            row[f"{name}_low"] = row[name] - _half([v - low for v, (low, _) in zip(values, bounds, strict=True)])
            row[f"{name}_high"] = row[name] + _half([high - v for v, (_, high) in zip(values, bounds, strict=True)])
        rows.append(row)
    return rows


def _half(widths: Sequence[float]) -> float:
    finite = [max(0.0, width) for width in widths if math.isfinite(width)]
    return math.sqrt(sum(width**2 for width in finite)) / len(finite) if finite else math.nan


def _resampled(of: Statistic, series: Series, cause: str, fit: Tensor, index: Tensor) -> float:
    return of({name: values[index] for name, values in series.items()}, cause, fit)


def _fitted(runs: Sequence[Series]) -> Tensor:
    """Coefficients of τ and the adaptive frame's E for harm, by least squares on standardised values."""
    causes = torch.cat([_standard(r) for r in runs])
    harm = torch.cat([(r["change"] > 0).double() for r in runs])
    solved: Tensor = torch.linalg.lstsq(causes, (harm - harm.mean()).unsqueeze(1), driver="gelsd").solution[:, 0]
    return solved


def _standard(series: Series) -> Tensor:
    """Logarithm of 1+τ, and E, each with mean 0 and deviation 1, shape (n, 2)."""
    causes = torch.stack([series["staleness"].log1p(), series["adaptive"]], dim=1)
    return (causes - causes.mean(dim=0)) / causes.std(dim=0).clamp_min(1e-12)


def _auc(series: Series, cause: str, fit: Tensor) -> float:
    scores = _standard(series) @ fit if cause == "both" else series[cause]
    return auc(scores, series["change"] > 0)


def _correlation(series: Series, cause: str, fit: Tensor) -> float:
    if cause == "both":
        return multiple_correlation(series["change"], [series["staleness"], series["adaptive"]])
    return rank_correlation(series[cause], series["change"])


def _partial(series: Series, cause: str, fit: Tensor) -> float:
    if cause == "both":
        return math.nan
    fixed = "adaptive" if cause == "staleness" else "staleness"
    return rank_correlation(series[cause], series["change"], given=[series[fixed]])


_STATISTICS: dict[str, Statistic] = {"auc": _auc, "correlation": _correlation, "partial": _partial}


def _logged(training: Training, seed: int) -> Row:
    args, task = training.args, training.task(seed)
    watcher = Watcher(task.model(), lambda module: terminal_loss(module, [*task.validation, *task.test]), seed=seed)
    schedule = partial(warmup_cosine, warmup=0.0)
    result = training.run(seed, args.rule, lr=args.lr, schedule=schedule, observe=watcher)
    # On a rank's first push its frame follows that very drift, and there is no reference yet.
    kept = [row for row in watcher.rows if row["step"] > 0 and math.isfinite(row["change"])]
    columns = {name: [row[name] for row in kept] for name in _FIELDS}
    return {"seed": seed, "lr": args.lr, "rule": args.rule, "terminal_loss": result.loss, **columns}


def _cell(row: Row, name: str) -> str:
    if not math.isfinite(row[name]):
        return ""
    return f"{row[name]:.2f} [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]"


def _draw(figure: Any, rows: Sequence[Row], runs: Sequence[Series]) -> None:
    aucs, ages, frames = figure.subplots(1, 3)
    phases = (WHOLE, *PHASES)
    for number, (cause, name) in enumerate(_NAMES.items()):
        own = [next(r for r in rows if r["phase"] == phase and r["cause"] == cause) for phase in phases]
        places = [place + 0.15 * (number - 1.5) for place in range(len(phases))]
        errors = [[r["auc"] - r["auc_low"] for r in own], [r["auc_high"] - r["auc"] for r in own]]
        aucs.errorbar(places, [r["auc"] for r in own], errors, fmt="o", capsize=3, label=name)
    aucs.axhline(0.5, color="#777777", linewidth=1, linestyle="--")
    aucs.set_xticks(range(len(phases)), [phase.replace(" ", "\n") for phase in phases])
    aucs.set(ylabel="AUC for a rise of the held-out loss", title="who tells harm")
    aucs.margins(y=0.35)
    aucs.legend(fontsize=7, loc="upper right")
    for axes, cause in ((ages, "staleness"), (frames, "adaptive")):
        for series in runs:
            axes.plot(series[cause], series["change"], ".", markersize=3, alpha=0.4)
        axes.axhline(0.0, color="#777777", linewidth=1)
        axes.set(xlabel=_NAMES[cause], ylabel="held-out loss change of the push", title=f"by {_NAMES[cause]}")
        axes.set_yscale("symlog", linthresh=1e-3)
    ages.set_xscale("symlog")
    ages.set_xlim(left=-0.5)
