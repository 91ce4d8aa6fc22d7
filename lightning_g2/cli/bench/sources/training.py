"""What the experiments that train have in common: their options, a study over rates, a single run."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from lightning_g2.cli.bench.kept import KeptRows
from lightning_g2.cli.bench.routing import study
from lightning_g2.cli.bench.sources.output import Row
from lightning_g2.cli.bench.spec import optimizer_of, parse_spec
from lightning_g2.cli.bench.task import Task, load_task, loss_of
from lightning_g2.cli.bench.trial import Record, Setting, TrialFile, check_rule
from lightning_g2.routing import Gate, build_gate
from lightning_g2.routing.option import require
from lightning_g2.simulate import SimulationResult, parse_delays, simulate
from lightning_g2.simulate.observation import Observer

SOURCE_RULE = 'g2(frame="random", action="scalar", weight_rule="relative", scale="unit", beta={beta:g})'
"""The sources' gate: one random frame, the whole push times a weight, relative to the other ranks."""

SMALL_MLP = ("model=mlp", "data=digits", "model.width=32")
SMALL_GPT = (
    "model=byte_gpt", "data=byte_text", "model.width=48", "model.layers=2", "data.batch_size=4",
    "data.max_bytes=2000000",
)  # fmt: skip


def add_training_arguments(
    parser: argparse.ArgumentParser,
    *,
    task: Sequence[str],
    pushes: int,
    seeds: Sequence[int] = (1, 2, 3),
    delays: str = "straggler(0.25, 10)",
    optimizer: str = "adam",
    clip: float | None = None,
) -> None:
    """Options of everything that trains.

    Args:
        parser: of the experiment.
        task: default choices of conf/.
        pushes: default arrivals a training.
        seeds: default seeds.
        delays: default law.
        optimizer: default optimizer.
        clip: default largest norm of a gradient.
    """
    parser.add_argument("--task", nargs="+", default=list(task), help=f"choices of conf/ (default: {' '.join(task)})")
    parser.add_argument("--optimizer", default=optimizer, help="of torch.optim, as in 'sgd(momentum=0.9)'")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--pushes", type=int, default=pushes, help="arrivals a training")
    parser.add_argument("--delays", default=delays, help="uniform, straggler, pareto or speeds")
    parser.add_argument("--clip", type=float, default=clip, help="largest norm of a gradient")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds), help="of weights, batches and durations")
    parser.add_argument("--held-out", type=int, default=16, help="held-out batches: half choose, half report")


@dataclass(frozen=True)
class Training:
    """A task and how it is trained on, by the options; bad ones are refused before anything is trained.

    Attributes:
        args: what :func:`add_training_arguments` declares.
        task: module and data of a seed.
        kept: rows of trainings made before.
    """

    args: argparse.Namespace
    task: Callable[[int], Task]
    kept: KeptRows

    @classmethod
    def of(cls, args: argparse.Namespace) -> Training:
        """Judge the options and load the first seed's task.

        Raises:
            ConfigurationError: an option makes no sense.
        """
        parse_delays(args.delays)
        optimizer_of(args.optimizer)
        require(args.ranks >= 2, "ranks", args.ranks, "be ≥ 2", "one rank alone has no staleness")
        require(args.pushes >= 5, "pushes", args.pushes, "be ≥ 5", "a run is looked at by fifths")
        require(len(set(args.seeds)) == len(args.seeds), "seeds", args.seeds, "differ", "leave the second one out")
        task = cache(partial(load_task, tuple(args.task), args.held_out))
        task(args.seeds[0])
        return cls(args, task, KeptRows(args.out / "trainings.jsonl"))

    @property
    def title(self) -> str:
        """Task and sizes, in a line."""
        a = self.args
        return f"{' '.join(a.task)}, {a.optimizer}, {a.ranks} ranks, {a.pushes} pushes, {a.delays}"

    def settings(self, **own: Any) -> dict[str, Any]:
        """All that a training depends on."""
        names = ("task", "optimizer", "ranks", "pushes", "delays", "clip", "held_out")
        return {**{name: getattr(self.args, name) for name in names}, **own}

    def row(self, make: Callable[[], Row], **own: Any) -> Row:
        """A training's row, known or made; see :meth:`KeptRows.get`."""
        return self.kept.get(self.settings(**own), make)

    def run(
        self,
        seed: int,
        gate: str | Callable[[], Gate],
        *,
        lr: float,
        schedule: Callable[[float], float] | None,
        observe: Observer | None = None,
    ) -> SimulationResult:
        """Train once; the loss is that on the validation batches.

        Args:
            seed: of weights, batches, durations.
            gate: a rule as on the command line, or what makes a gate.
            lr: learning rate.
            schedule: its factor by the share of the run.
            observe: is shown each push.
        """
        a, task = self.args, self.task(seed)
        return simulate(
            task.model, loss_of, task.batches(), ranks=a.ranks, pushes=a.pushes, gate=gate_maker(gate),
            optimizer=optimizer_of(a.optimizer), lr=lr, schedule=schedule, clip=a.clip, delays=a.delays, seed=seed,
            evaluation=task.validation, observe=observe,
        )  # fmt: skip

    def best_of(self, rules: Sequence[str], rates: Sequence[float]) -> tuple[list[Record], dict[str, list[Record]]]:
        """Each rule at its own best rate on all seeds; see :func:`lightning_g2.cli.bench.routing.study`."""
        a = self.args
        for rule in rules:
            check_rule(rule, a.ranks)
        setting = Setting(
            task=" ".join(a.task), optimizer=a.optimizer, ranks=a.ranks, pushes=a.pushes, time_limit=None,
            delays=a.delays, clip=a.clip, warmup=a.warmup,
        )  # fmt: skip
        return study(self.task, setting, rules, rates, a.seeds, TrialFile(a.out / "trials.jsonl"), most=len(rates))


def gate_maker(gate: str | Callable[[], Gate]) -> Callable[[], Gate]:
    """Makes a gate of a rule as on the command line."""
    if not isinstance(gate, str):
        return gate
    spec = parse_spec(gate)
    return lambda: build_gate(spec.name, **spec.options)


def paired(records: Sequence[Record], others: Sequence[Record]) -> list[float]:
    """Differences of terminal loss, first less second, seed by seed: arrivals of one seed are the same under all rules.

    Args:
        records: of one rule.
        others: of another.
    """
    loss = {record.seed: record.terminal_loss for record in others}
    return [record.terminal_loss - loss[record.seed] for record in records if record.seed in loss]


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; infinite for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("inf")
