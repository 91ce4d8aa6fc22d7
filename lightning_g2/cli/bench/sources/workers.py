"""Workers whose gradients all have the same length and the same cosine to their mean: does friction tell them apart?"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_g2.cli.bench.sources.association import auc
from lightning_g2.cli.bench.sources.output import Row, add_output_arguments, grouped, plus_minus, present
from lightning_g2.routing import Gate, GateContext, build_gate
from lightning_g2.routing.option import require, require_within

SUMMARY = "workers at equal cosine distance from their mean: separation by friction of a random and an adaptive frame"

Drift = Literal["one direction", "four directions", "no difference"]
_DRIFTS: tuple[Drift, ...] = ("one direction", "four directions", "no difference")
_SOURCE = {"frame": "random", "action": "scalar", "weight_rule": "relative", "scale": "unit"}
_RULES: dict[str, Callable[[int], Gate]] = {
    "cosine": lambda seed: build_gate("cosine"),
    "random frame": lambda seed: build_gate("g2", seed=seed, **_SOURCE),
    "16 random frames": lambda seed: build_gate("g2", seed=seed, frames=16, **_SOURCE),
    "adaptive frame": lambda seed: build_gate("g2", seed=seed, scale="unit"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the experiment's options.

    Args:
        parser: of the experiment.
    """
    parser.add_argument("--workers", type=int, default=8, help="a multiple of 4: half of them are odd, all in pairs")
    parser.add_argument("--pushes", type=int, default=30, help="of each worker; the first half is not judged")
    parser.add_argument("--shape", nargs=2, type=int, default=[24, 40], metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--cosine", type=float, default=0.5, help="of every gradient to the mean of all")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1, 11)), help="of drifts, weights, frames")
    add_output_arguments(parser, "workers")


def run(args: argparse.Namespace) -> None:
    """Measure, print, write, draw.

    Args:
        args: what :func:`add_arguments` declares.
    """
    require(args.workers > 0 and args.workers % 4 == 0, "workers", args.workers, "be a multiple of 4", "8 will do")
    require(min(args.shape) > 5, "shape", args.shape, "have more than 5 rows and columns", "24 40 will do")
    require(args.pushes >= 4, "pushes", args.pushes, "be ≥ 4", "the first half only warms the gates up")
    require_within("cosine", args.cosine, 0.0, 0.99, "0.5 puts every gradient at 60 degrees from the mean")
    records = [record for drift in _DRIFTS for seed in args.seeds for record in separation(args, drift, seed)]
    rows = []
    for (drift, rule), group in grouped(records, "drift", "rule").items():
        values = [r["auc"] for r in group]
        rows.append({
            "drift": drift, "rule": rule, "auc": plus_minus(values, 2), "least": min(values), "greatest": max(values),
            "energy_odd": plus_minus([r["energy_odd"] for r in group], 2),
            "energy_other": plus_minus([r["energy_other"] for r in group], 2),
        })  # fmt: skip
    worst = max(abs(r["cosine_error"]) for r in records)
    present(
        args,
        title=f"{args.workers} workers, every gradient of length 1 with cosine {args.cosine:g} to the mean, "
        f"{args.shape[0]}×{args.shape[1]} matrix, {len(args.seeds)} seeds",
        records=records,
        rows=rows,
        columns={
            "odd workers drift in": lambda r: r["drift"],
            "judged by": lambda r: r["rule"],
            "AUC": lambda r: r["auc"],
            "least, greatest": lambda r: f"{r['least']:.2f}, {r['greatest']:.2f}",
            "energy, odd": lambda r: r["energy_odd"],
            "energy, others": lambda r: r["energy_other"],
        },
        draw=lambda figure: _draw(figure, records),
        notes=[f"Largest deviation of a cosine from {args.cosine:g}: {worst:.1e}."],
    )


def separation(args: argparse.Namespace, drift: Drift, seed: int) -> list[Row]:
    """What each rule's energies tell of which workers are odd; one record a rule.

    Args:
        args: ``workers``, ``pushes``, ``shape``, ``cosine``.
        drift: what the odd workers' drift is made of.
        seed: of all that is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, columns = args.shape
    weights = {"w": torch.randn(rows, columns, generator=generator, dtype=torch.float64)}
    frame = torch.linalg.qr(torch.randn(rows, 4, generator=generator, dtype=torch.float64))[0]
    mean = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    mean = _unit(mean - frame @ (frame.t() @ mean))  # orthogonal to whatever lies in the four directions
    direction = _unit(frame @ torch.randn(4, columns, generator=generator, dtype=torch.float64))
    gates = {name: [make(seed) for _ in range(args.workers)] for name, make in _RULES.items()}
    energies: dict[str, list[float]] = {name: [] for name in _RULES}
    odd: list[bool] = []
    error = 0.0
    for push in range(args.pushes):
        kinds = [drift if worker < args.workers // 2 else "no difference" for worker in range(0, args.workers, 2)]
        halves = [_drift(kind, mean, frame, direction, generator) for kind in kinds]
        gradients = _gradients(mean, halves, args.cosine)
        error = max(error, _cosine_error(gradients, args.cosine), key=abs)
        for worker, gradient in enumerate(gradients):
            for name, own in gates.items():
                context = GateContext(rank=worker, concurrency=args.workers, step=push, weights=weights)
                energy = own[worker].decide({"w": gradient}, context).energy
                if push >= args.pushes // 2:
                    energies[name].append(energy)
            if push >= args.pushes // 2:
                odd.append(worker < args.workers // 2)
    positive = torch.tensor(odd)
    records = []
    for name, values in energies.items():
        scores = torch.tensor(values, dtype=torch.float64)
        records.append({
            "drift": drift, "rule": name, "seed": seed, "auc": auc(scores, positive),
            "energy_odd": float(scores[positive].mean()), "energy_other": float(scores[~positive].mean()),
            "cosine_error": error,
        })  # fmt: skip
    return records


def _drift(kind: Drift, mean: Tensor, frame: Tensor, direction: Tensor, generator: torch.Generator) -> Tensor:
    """A unit drift orthogonal to the mean."""
    if kind == "one direction":
        # A drift that kept its sign would soon be part of the worker's own reference.
        return direction if torch.rand((), generator=generator) < 0.5 else -direction
    if kind == "four directions":
        return _unit(frame @ torch.randn(4, mean.shape[1], generator=generator, dtype=mean.dtype))
    noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
    return _unit(noise - (noise * mean).sum() * mean)


def _gradients(mean: Tensor, halves: list[Tensor], cosine: float) -> list[Tensor]:
    """Gradients in pairs with opposite drifts, so that their mean is cosine·mean exactly."""
    sine = math.sqrt(1.0 - cosine**2)
    return [cosine * mean + sign * sine * half for half in halves for sign in (1.0, -1.0)]


def _cosine_error(gradients: list[Tensor], cosine: float) -> float:
    """The largest deviation, with its sign, of a gradient's cosine to the mean of all from what it should be."""
    mean = torch.stack(gradients).mean(dim=0)
    if mean.norm() < 1e-9:  # cosine 0: all gradients are orthogonal to where their mean would point
        return 0.0
    found = [float((g * mean).sum() / (g.norm() * mean.norm())) - cosine for g in gradients]
    return max(found, key=abs)


def _unit(tensor: Tensor) -> Tensor:
    unit: Tensor = tensor / tensor.norm()
    return unit


def _draw(figure: Any, records: list[Row]) -> None:
    panels = figure.subplots(1, len(_DRIFTS), sharey=True)
    for axes, drift in zip(panels, _DRIFTS, strict=True):
        for place, rule in enumerate(_RULES):
            values = [r["auc"] for r in records if r["drift"] == drift and r["rule"] == rule]
            axes.plot([place] * len(values), values, "o", alpha=0.45, color="#4477aa")
            axes.plot([place - 0.25, place + 0.25], [sum(values) / len(values)] * 2, color="#cc3311", linewidth=2)
        axes.axhline(0.5, color="#777777", linewidth=1, linestyle="--")
        axes.set_xticks(range(len(_RULES)), [rule.replace(" ", "\n") for rule in _RULES])
        axes.set(title=f"odd workers drift in: {drift}", ylim=(-0.03, 1.03))
    panels[0].set_ylabel("AUC of the energy (one dot a seed, line: mean)")
