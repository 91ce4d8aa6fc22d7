"""How noisy an energy seen through m random frames is, and what that noise costs in terminal loss."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from lightning_g2.cli.bench.sources import projected
from lightning_g2.cli.bench.sources.output import Row, add_output_arguments, mean, plus_minus, present
from lightning_g2.cli.bench.sources.projected import readings
from lightning_g2.cli.bench.sources.training import SMALL_MLP, Training, add_training_arguments, paired, standard_error
from lightning_g2.cli.bench.table import rows_of
from lightning_g2.routing.option import require
from lightning_g2.simulate import Observation

SUMMARY = "terminal loss and noise of m random frames against the exact drift energy"
_ENERGIES = ("friction", "norm")
_DIMENSIONS = 14
_DECAY = 0.9  # of the reference, as in the gate
_CLAIM = 0.055


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the experiment's options.

    Args:
        parser: of the experiment.
    """
    add_training_arguments(parser, task=SMALL_MLP, pushes=160)
    parser.add_argument("--frames", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="numbers m of frames")
    parser.add_argument("--beta", type=float, default=4.0, help="inverse temperature of the gate")
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 2e-3, 4e-3], help="screened on the first seed")
    parser.add_argument("--warmup", type=float, default=0.0, help="share of the run; then half a cosine to zero")
    parser.add_argument("--drifts", type=int, default=24, help="drifts of a training that the noise is measured on")
    parser.add_argument("--estimates", type=int, default=64, help="frames that each of them is looked at through")
    add_output_arguments(parser, "projection")


def run(args: argparse.Namespace) -> None:
    """Measure, train, print, write, draw.

    Args:
        args: what :func:`add_arguments` declares.
    """
    require(min(args.frames) >= 1, "frames", args.frames, "be ≥ 1", "the exact energy is always run")
    require(args.estimates >= 2 * max(args.frames), "estimates", args.estimates, "be twice the frames", "64 will do")
    require(args.drifts >= 2, "drifts", args.drifts, "be ≥ 2", "24 will do")
    projected.register()
    training = Training.of(args)
    noise = training.row(
        lambda: _noise(training), what="noise", frames=args.frames, drifts=args.drifts, estimates=args.estimates
    )
    rules = {(e, m): _rule(e, m, args.beta) for e in _ENERGIES for m in (*args.frames, 0)}
    records, finals = training.best_of(list(rules.values()), args.rates)
    by_rule = {row.rule: asdict(row) for row in rows_of(finals, records)}
    rows = []
    for (energy, m), rule in rules.items():
        less = paired(finals[rule], finals[rules[energy, 0]])
        exact = mean([record.terminal_loss for record in finals[rules[energy, 0]]])
        rows.append({
            **by_rule[rule], "energy": energy, "frames": m, "against_exact": less, "relative": mean(less) / exact,
            "noise": noise[energy][str(m)] if m else 0.0,
            "theory": math.sqrt(2.0 / (_DIMENSIONS * m)) if m and energy == "norm" else None,
        })  # fmt: skip
    present(
        args,
        title=training.title,
        records=[noise, *(asdict(record) for record in records)],
        rows=rows,
        columns={
            "energy": lambda r: "friction of the sketch" if r["energy"] == "friction" else "drift energy",
            "frames, dimensions": lambda r: f"{r['frames']}, {_DIMENSIONS * r['frames']}" if r["frames"] else "exact",
            "noise of the energy": _noise_cell,
            "best rate": lambda r: f"{r['lr']:g}{' (edge of the grid)' if r['at_edge'] else ''}",
            "loss": lambda r: f"{r['loss']:.4f} ± {r['spread']:.4f}",
            "less the exact one's": lambda r: plus_minus(r["against_exact"], 4, sign="+") if r["frames"] else "",
            "relative": lambda r: f"{r['relative']:+.1%}" if r["frames"] else "",
        },
        draw=lambda figure: _draw(figure, rows, noise),
        notes=[
            f"Of the variance of friction over {noise['drifts']} drifts and {noise['estimates']} frames, "
            f"{max(0.0, noise['share_friction']):.1%} belongs to the drift, the rest to the frame; of drift energy's "
            f"{noise['share_norm']:.1%}. Mean friction {noise['mean_friction']:.3f} (16/21 = 0.762).",
            _worth(rows),
        ],
    )


def share_of_groups(values: Tensor) -> float:
    """Share of the variance that lies between groups and not within them: intraclass correlation, one-way.

        (B - W) / (B + (k - 1) W),   B, W mean squares between and within, k members a group

    Args:
        values: shape (groups, members), two of each at least.

    Returns:
        At most 1; about 0, or slightly below, where groups do not differ.

    Source:
        P. E. Shrout, J. L. Fleiss, "Intraclass correlations: uses in assessing rater reliability" (1979), ICC(1,1).
    """
    groups, members = values.shape
    means = values.mean(dim=1)
    between = members * (means - values.mean()).square().sum() / (groups - 1)
    within = (values - means.unsqueeze(1)).square().sum() / (groups * (members - 1))
    total = between + (members - 1) * within
    return float((between - within) / total) if total > 0 else 0.0


def noise_of_means(values: Tensor, m: int) -> float:
    """Standard deviation, over frames, of the mean of m frames: root mean square over drifts.

    Args:
        values: of each frame, shape (drifts, frames).
        m: frames that are averaged, at most half of them.
    """
    drifts, frames = values.shape
    means = values[:, : frames // m * m].reshape(drifts, frames // m, m).mean(dim=2)
    return float(means.var(dim=1).mean().sqrt())


def _noise(training: Training) -> Row:
    """What frames make of the drifts of one ungated training."""
    a = training.args
    references: dict[int, dict[str, Tensor]] = {}
    seen: list[tuple[Tensor, Tensor, float]] = []
    every = max(1, a.pushes // (a.drifts + 1))

    def observe(push: Observation) -> None:
        reference = references.setdefault(push.context.rank, {})
        drift = {name: g - reference.get(name, 0.0) for name, g in push.gradients.items()}
        for name, gradient in push.gradients.items():
            reference[name] = _DECAY * reference.get(name, torch.zeros_like(gradient)) + (1 - _DECAY) * gradient
        if (push.number + 1) % every == 0 and len(seen) < a.drifts:
            friction, ratio = readings(drift, push.before, frames=a.estimates, seed=push.number)
            size = sum(float(block.double().square().sum()) for block in drift.values())
            seen.append((friction, ratio, size))

    training.run(a.seeds[0], "none", lr=min(a.rates), schedule=None, observe=observe)
    friction, ratio = torch.stack([f for f, _, _ in seen]), torch.stack([r for _, r, _ in seen])
    sizes = torch.tensor([size for _, _, size in seen], dtype=torch.float64).unsqueeze(1)
    logarithms = (ratio * sizes).log()  # noise, and how sizes differ over a run, are both factors
    return {
        "what": "noise", "drifts": len(seen), "estimates": a.estimates,
        "friction": {str(m): noise_of_means(friction, m) for m in a.frames},
        "norm": {str(m): noise_of_means(ratio, m) for m in a.frames},
        "mean_friction": float(friction.mean()), "mean_ratio": float(ratio.mean()),
        "share_friction": share_of_groups(friction), "share_norm": share_of_groups(logarithms),
    }  # fmt: skip


def _rule(energy: str, frames: int, beta: float) -> str:
    return f'{projected.NAME}(energy="{energy}", frames={frames}, beta={beta:g})'


def _noise_cell(row: Row) -> str:
    if not row["frames"]:
        return ""
    if row["energy"] == "friction":
        return f"± {row['noise']:.3f}"
    return f"± {row['noise']:.1%} (√(2/{_DIMENSIONS * row['frames']}) = {row['theory']:.1%})"


def _worth(rows: Sequence[Row]) -> str:
    """For each energy the number of dimensions from which on the exact one is never better."""
    parts = []
    for energy in _ENERGIES:
        own = [row for row in rows if row["energy"] == energy and row["frames"]]
        worse = [r["frames"] for r in own if mean(r["against_exact"]) > 2 * standard_error(r["against_exact"])]
        enough = [row["frames"] for row in own if row["frames"] > max(worse, default=0)]
        name = "friction" if energy == "friction" else "drift energy"
        first = f"{_DIMENSIONS * min(enough)} dimensions" if enough else "none of these numbers of dimensions"
        parts.append(f"for {name} {first}")
    needed = math.ceil(2.0 / (_DIMENSIONS * _CLAIM**2))
    return (
        f"Fewest dimensions within two standard errors of the exact energy's loss: {', '.join(parts)}. A drift energy "
        f"known to {_CLAIM:.1%} takes 2/{_CLAIM}² = {2.0 / _CLAIM**2:.0f} dimensions, {needed} frames."
    )


def _draw(figure: Any, rows: Sequence[Row], noise: Row) -> None:
    losses, noises = figure.subplots(1, 2)
    for colour, energy in zip(("#4477aa", "#cc6633"), _ENERGIES, strict=True):
        own = [row for row in rows if row["energy"] == energy and row["frames"]]
        name = "friction of the sketch" if energy == "friction" else "drift energy"
        less = [row["against_exact"] for row in own]
        errors = [standard_error(values) if len(values) > 1 else 0.0 for values in less]
        losses.errorbar(
            [_DIMENSIONS * row["frames"] for row in own], [mean(values) for values in less], errors, fmt="o-",
            capsize=3, color=colour, label=name,
        )  # fmt: skip
    losses.axhline(0.0, color="#777777", linewidth=1)
    frames = sorted(int(m) for m in noise["norm"])
    noises.plot([_DIMENSIONS * m for m in frames], [noise["norm"][str(m)] for m in frames], "o", color="#cc6633",
                label="drift energy, relative")  # fmt: skip
    noises.plot([_DIMENSIONS * m for m in frames], [math.sqrt(2 / (_DIMENSIONS * m)) for m in frames], "--",
                color="#cc6633", label="√(2/dimensions)")  # fmt: skip
    noises.plot([_DIMENSIONS * m for m in frames], [noise["friction"][str(m)] for m in frames], "o-", color="#4477aa",
                label="friction, absolute")  # fmt: skip
    losses.set(xscale="log", xlabel="dimensions 14·m", ylabel="terminal loss less the exact energy's ± standard error")
    losses.set_title("each at its own best rate")
    noises.set(xscale="log", yscale="log", xlabel="dimensions 14·m", ylabel="standard deviation over frames")
    noises.set_title("noise of the estimate")
    for axes in (losses, noises):
        axes.set_xticks([_DIMENSIONS * m for m in frames], [str(_DIMENSIONS * m) for m in frames])
        axes.minorticks_off()
        axes.legend(fontsize=8)
