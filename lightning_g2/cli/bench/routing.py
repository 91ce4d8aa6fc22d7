"""Every rule at its own best learning rate, on a task of conf/, in simulated time."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

import torch
from tqdm import tqdm

from lightning_g2.cli.bench.cost import CostFile
from lightning_g2.cli.bench.screen import quality, screen
from lightning_g2.cli.bench.spec import optimizer_of, parse_spec
from lightning_g2.cli.bench.stable import stable_range, stable_table
from lightning_g2.cli.bench.table import draw, markdown, openness_table, rows_of, write_csv
from lightning_g2.cli.bench.task import Task, load_task
from lightning_g2.cli.bench.trial import FLOOR, SCHEDULES, Record, Setting, TrialFile, check_rule, run_trial
from lightning_g2.errors import ConfigurationError
from lightning_g2.routing import available_gates
from lightning_g2.simulate import parse_delays
from lightning_g2.simulate.stability import delayed_sgd_limit, largest_stable_rate

SUMMARY = "rules against each other on one task, simulated: terminal loss of each at its own best learning rate"

DEFAULT_TASK = ("model=mlp", "data=digits")
DEFAULT_RULES = (
    "none",
    "concurrency",
    "drop",
    "dc",
    "cosine",
    "g2",
    'g2(weight_rule="constant")',
    'g2(weight_rule="age", beta=4.0)',
    "g2_shuffled",
    "g2_random_subspace",
    'g2(frame="random", action="scalar", weight_rule="relative", beta=4.0)',
    FLOOR,
)
"""The shipped default among plain rules, its controls (constant, age only, shuffled, random), and the floor."""

AUTO = "auto"
"""Overhead that is measured."""

_DELAYS = (0, 1, 2, 4, 8, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options.

    Args:
        parser: of the subcommand.
    """
    parser.add_argument(
        "task", nargs="*", default=list(DEFAULT_TASK), help=f"choices of conf/ (default: {' '.join(DEFAULT_TASK)})"
    )
    parser.add_argument(
        "--rules",
        nargs="+",
        default=list(DEFAULT_RULES),
        help='rules: \'g2(beta=4)\', \'rounds(m="auto", gate="g2")\', \'buffer(k=4, weights="fedbuff")\'; "floor"',
    )
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[5e-4, 1e-3, 2e-3, 4e-3],
        help="learning rates to begin with; a rule whose best one is an end goes on beyond it",
    )  # fmt: skip
    parser.add_argument("--most-rates", type=int, default=8, help="largest number of rates a rule; all have as many")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="the first screens the rates")
    parser.add_argument("--optimizer", default="adam", help="of torch.optim, as in 'sgd(momentum=0.9)'")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--pushes", type=int, default=400, help="arrivals a training")
    parser.add_argument("--time-limit", type=float, default=None, help="end trainings by time instead of arrivals")
    parser.add_argument("--delays", default="straggler(0.25, 10)", help="uniform, straggler, pareto or speeds")
    parser.add_argument(
        "--overhead", nargs="+", default=[], metavar="RULE=UNITS",
        help="cost of a rule's decision, in gradients; auto measures it, and is for --time-limit",
    )  # fmt: skip
    parser.add_argument("--clip", type=float, default=None, help="largest norm of a gradient")
    parser.add_argument("--warmup", type=float, default=0.0, help="share of the run spent warming up")
    parser.add_argument("--schedule", choices=SCHEDULES, default="cosine", help="of the rate after the warm-up")
    parser.add_argument("--held-out", type=int, default=32, help="held-out batches: half choose rates, half report")
    parser.add_argument("--out", type=Path, default=Path("routing"), help="folder; an interrupted study goes on there")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="also write all records here")
    parser.add_argument(
        "--stable-rates", action="store_true",
        help="instead: each rule's largest rate up to which its loss stays below 1.5 times its best, in steps of √2",
    )  # fmt: skip
    parser.add_argument(
        "--stability", action="store_true", help="instead: largest stable rates on the delayed quadratic"
    )


def run(args: argparse.Namespace) -> int:
    """Run the study, or go on with it, and write its table.

    Args:
        args: what :func:`add_arguments` declares.

    Returns:
        Exit code: 0, or 2 for options that make no sense.
    """
    torch.set_num_threads(1)
    try:
        if args.stability:
            return _stability(args.rules)
        _check(args)
        setting = Setting(
            task=" ".join(args.task),
            optimizer=args.optimizer,
            ranks=args.ranks,
            pushes=args.pushes if args.time_limit is None else None,
            time_limit=args.time_limit,
            delays=args.delays,
            clip=args.clip,
            warmup=args.warmup,
            schedule=args.schedule,
            overhead=_overheads([text for text in args.overhead if text != AUTO], args.rules),
        )
        task = cache(partial(load_task, tuple(args.task), args.held_out))
        first = task(args.seeds[0])  # what does not fit together is refused before anything has been trained
        if AUTO in args.overhead:
            setting = _with_costs(first, setting, args)
        file = TrialFile(args.out / "trials.jsonl")
        if args.stable_rates:
            return _stable_rates(first, setting, args, file)
        records, finals = study(task, setting, args.rules, args.rates, args.seeds, file, most=args.most_rates)
    except ConfigurationError as error:
        print(f"g2-bench routing: {error}", file=sys.stderr)
        return 2
    rows = rows_of(finals, records)
    table = f"{markdown(rows)}\n{openness_table(finals)}"
    if setting.overhead:
        table += "\ncharged: " + ", ".join(f"{rule} {cost:g}" for rule, cost in setting.overhead.items()) + "\n"
    (args.out / "table.md").write_text(table, encoding="utf-8")
    write_csv(rows, args.out / "table.csv")
    length = f"{setting.pushes} pushes" if setting.time_limit is None else f"{setting.time_limit:g} units of time"
    title = f"{setting.task}, {setting.optimizer}, {setting.ranks} ranks, {length}, {setting.delays}"
    if setting.schedule != "cosine":
        title += f", {setting.schedule} rate"
    if not draw(rows, records, args.out / "table.png", title=title):
        print("no picture: matplotlib is not installed (pip install 'lightning_g2[plot]')", file=sys.stderr)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(record) for record in records], indent=2) + "\n", encoding="utf-8")
    print(f"{title}\n\n{table}")
    return 0


def study(
    task: Callable[[int], Task],
    setting: Setting,
    rules: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    file: TrialFile,
    *,
    most: int,
) -> tuple[list[Record], dict[str, list[Record]]]:
    """Screen the rates on the first seed, then train each rule at its best rate on all seeds.

    Args:
        task: module and data of a seed.
        setting: what is common to all trials.
        rules: the rules.
        rates: learning rates to begin with, see :func:`lightning_g2.cli.bench.screen.screen`.
        seeds: the first one screens.
        file: remembers trials.
        most: largest number of rates a rule.

    Returns:
        All records, and by rule those at its best rate.
    """
    records: list[Record] = []
    finals: dict[str, list[Record]] = {}
    with tqdm(total=len(rules) * (len(rates) + len(seeds) - 1), unit="training", disable=None) as bar:

        def trial(rule: str, lr: float, seed: int) -> Record:
            bar.set_postfix_str(f"{rule}, {lr:g}", refresh=True)
            record = remembered_trial(task, setting, rule, lr, seed, file)
            records.append(record)
            bar.total = max(bar.total, bar.n + 1)  # grids grow
            bar.update()
            return record

        screened = screen(partial(trial, seed=seeds[0]), rules, rates, most)
        for rule, tried in screened.items():
            best = min(tried, key=quality)
            finals[rule] = [best, *(trial(rule, best.lr, seed) for seed in seeds[1:])]
    return records, finals


def remembered_trial(
    task: Callable[[int], Task], setting: Setting, rule: str, lr: float, seed: int, file: TrialFile
) -> Record:
    """A trial that was made before, or make it now and write it down."""
    record = file.known(setting, rule, lr, seed)
    if record is None:
        record = run_trial(task(seed), setting, rule, lr, seed)
        file.add(setting, record)
    return record


def _check(args: argparse.Namespace) -> None:
    parse_delays(args.delays)
    optimizer_of(args.optimizer)
    for rule in args.rules:
        check_rule(rule, args.ranks)
    for name in ("rules", "rates", "seeds"):
        values = getattr(args, name)
        if len(set(values)) != len(values):
            raise ConfigurationError(f"{name}={values!r}: must differ from each other; leave the second one out")


def _overheads(given: Sequence[str], rules: Sequence[str]) -> dict[str, float]:
    """Overhead by rule, of ``RULE=UNITS``."""
    overheads: dict[str, float] = {}
    for text in given:
        rule, _, units = text.rpartition("=")
        if rule not in rules or not units.replace(".", "", 1).isdigit():
            raise ConfigurationError(f"overhead={text!r}: must be RULE=UNITS for one of the rules; try {rules[0]}=0.05")
        overheads[rule] = float(units)
    return overheads


def _with_costs(task: Task, setting: Setting, args: argparse.Namespace) -> Setting:
    """The setting with the measured cost of each rule whose cost was not given."""
    costs = CostFile(args.out / "costs.json")
    lr = min(args.rates)
    measured = {rule: costs.cost(task, setting, rule, lr) for rule in args.rules if rule not in setting.overhead}
    return replace(setting, overhead={**measured, **setting.overhead})


def _stable_rates(task: Task, setting: Setting, args: argparse.Namespace, file: TrialFile) -> int:
    """Write the table of largest stable rates on the task."""
    with tqdm(unit="training", disable=None) as bar:

        def trial(rule: str, lr: float) -> Record:
            bar.set_postfix_str(f"{rule}, {lr:g}", refresh=True)
            bar.update()
            return remembered_trial(lambda seed: task, setting, rule, lr, args.seeds[0], file)

        table = stable_table([stable_range(trial, rule, args.rates[0]) for rule in args.rules])
    (args.out / "stable.md").write_text(table, encoding="utf-8")
    print(f"{setting.task}, {setting.optimizer}, {setting.delays}: largest stable rates\n\n{table}")
    return 0


def _stability(rules: Sequence[str]) -> int:
    """Print the largest stable rates of rules at fixed delays."""
    chosen = available_gates() if tuple(rules) == DEFAULT_RULES else rules
    print(f"| rule | {' | '.join(f'τ={delay}' for delay in _DELAYS)} |")
    print("|---" * (len(_DELAYS) + 1) + "|")
    print(f"| exact, plain SGD | {' | '.join(f'{delayed_sgd_limit(delay):.4f}' for delay in _DELAYS)} |")
    for rule in chosen:
        spec = parse_spec(rule)
        cells = []
        for delay in _DELAYS:
            # A matrix whose rows differ in curvature: the g2 gate filters no smaller one.
            eigenvalues, columns = ([2.0**-i for i in range(8)], 8) if spec.name.startswith("g2") else ([1.0], 1)
            gate = (spec.name, spec.options)
            limit = largest_stable_rate(
                delay=delay, gate=gate, eigenvalues=eigenvalues, columns=columns, tolerance=0.01
            )
            cells.append("any" if math.isinf(limit) else f"{limit:.4f}")
        print(f"| {rule} | {' | '.join(cells)} |", flush=True)
    return 0
