"""What rescued pushes are worth: a run with them, without them, and without as many others."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

from torch import Tensor

from lightning_g2.cli.bench.sources.output import Row, add_output_arguments, grouped, mean, plus_minus, present
from lightning_g2.cli.bench.sources.training import SMALL_MLP, SOURCE_RULE, Training, add_training_arguments, gate_maker
from lightning_g2.cli.bench.task import terminal_loss
from lightning_g2.cli.bench.trial import check_rule
from lightning_g2.routing import Gate, GateContext, GateDecision
from lightning_g2.routing.gate import Need, rejection
from lightning_g2.routing.option import require
from lightning_g2.routing.rules.g2 import RESCUE_WEIGHT
from lightning_g2.simulate import Observation
from lightning_g2.tasks.schedule import warmup_cosine

SUMMARY = "loss without the rescued pushes (old, yet let through), against as many random drops"

PushName = tuple[int, int]
"""Rank, and gradients it had begun before: names a push alike in all runs of a seed."""

Drops = Callable[[GateDecision, GateContext], bool]
ARMS = ("as it is", "without the rescued", "without as many random ones", "without as many random old ones")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the experiment's options.

    Args:
        parser: of the experiment.
    """
    add_training_arguments(parser, task=SMALL_MLP, pushes=400, seeds=(1, 2, 3, 4), delays="straggler(0.5, 5)")
    rules = ["g2", "g2(beta=2)", SOURCE_RULE.format(beta=0.5)]
    parser.add_argument("--rules", nargs="+", default=rules, help="gates")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate, at its peak; then half a cosine to zero")
    parser.add_argument("--limit", type=float, default=2.0, help="a push is old above this multiple of N versions")
    parser.add_argument("--draws", type=int, default=1, help="random drops a seed")
    add_output_arguments(parser, "rescue")


def run(args: argparse.Namespace) -> None:
    """Train, print, write, draw.

    Args:
        args: what :func:`add_arguments` declares.
    """
    for rule in args.rules:
        check_rule(rule, args.ranks)
    require(args.limit > 0.0, "limit", args.limit, "be > 0", "2 is what the rule `drop` takes")
    require(args.draws >= 1, "draws", args.draws, "be ≥ 1", "1 will do")
    training = Training.of(args)
    records = [record for rule in args.rules for seed in args.seeds for record in _arms(training, rule, seed)]
    as_is = {(r["rule"], r["seed"]): r for r in records if r["arm"] == ARMS[0]}
    rows = []
    for (rule, arm), group in grouped(records, "rule", "arm").items():
        firsts = [as_is[rule, r["seed"]] for r in group]
        less = [r["terminal_loss"] - first["terminal_loss"] for r, first in zip(group, firsts, strict=True)]
        rows.append({
            "rule": rule, "arm": arm, "runs": len(group), "old": plus_minus([f["old"] for f in firsts], 1),
            "rescued": plus_minus([f["rescued"] for f in firsts], 1),
            "dropped": plus_minus([r["dropped"] for r in group], 1),
            "loss": plus_minus([r["terminal_loss"] for r in group], 4), "difference": plus_minus(less, 4, sign="+"),
        })  # fmt: skip
    spared = [rule for rule in args.rules if not any(f["rescued"] for (own, _), f in as_is.items() if own == rule)]
    present(
        args,
        title=f"{training.title}, rate {args.lr:g}; old: τ > {args.limit:g}·N; rescued: old and w > {RESCUE_WEIGHT:g}",
        records=records,
        rows=rows,
        columns={
            "rule": lambda r: r["rule"],
            "old, of them rescued": lambda r: f"{r['old']}, {r['rescued']}",
            "run": lambda r: r["arm"],
            "runs": lambda r: str(r["runs"]),
            "pushes dropped": lambda r: r["dropped"],
            "loss": lambda r: r["loss"],
            "less that of the run as it is": lambda r: r["difference"],
        },
        draw=lambda figure: _draw(figure, records),
        notes=[
            f"`{rule}` has rescued no push: there is nothing to leave out."
            if rule in spared
            else f"`{rule}`, loss without the rescued less that without as many random ones: "
            f"{plus_minus(_against(records, rule, ARMS[2]), 4, sign='+')}; less that without as many random old ones: "
            f"{plus_minus(_against(records, rule, ARMS[3]), 4, sign='+')}."
            for rule in args.rules
        ],
    )


class DroppingGate(Gate):
    """Another gate's decisions, but some pushes are not sent.

    Args:
        gate: decides, on dropped pushes, too, so that its state is the same.
        drops: whether a push is dropped, by what was decided.
    """

    def __init__(self, gate: Gate, drops: Drops) -> None:
        self.gate, self.drops, self.dropped = gate, drops, 0

    @property
    def needs(self) -> frozenset[Need]:
        """Those of the other gate."""
        return self.gate.needs

    def decide(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        """See the class.

        Args:
            gradients: gradient of each block by name.
            context: what the other gate needs.

        Returns:
            Its decision, or a rejection.
        """
        decision = self.gate.decide(gradients, context)
        if decision.rejected or not self.drops(decision, context):
            return decision
        self.dropped += 1
        return rejection(gradients, "dropped on purpose", decision.energy)

    def may_begin(self, lead: int) -> bool:
        """See :meth:`Gate.may_begin`."""
        return self.gate.may_begin(lead)

    def look_ahead(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        """See :meth:`Gate.look_ahead`."""
        return self.gate.look_ahead(weights, version)


def is_old(context: GateContext, limit: float) -> bool:
    """Whether a bounded-delay rule would not send a push: τK > limit·N."""
    return context.staleness * context.pushes_per_version > limit * context.concurrency


def is_rescued(decision: GateDecision, context: GateContext, limit: float) -> bool:
    """Whether a push is old and sent all the same, with more than half its weight."""
    return not decision.rejected and is_old(context, limit) and decision.weight > RESCUE_WEIGHT


def _arms(training: Training, rule: str, seed: int) -> list[Row]:
    """All runs of one rule and seed; only the first where it has rescued nothing."""
    args = training.args

    def row(arm: str, draw: int, drops: Drops) -> Row:
        make = partial(_trained, training, rule, arm, seed, draw, drops)
        return training.row(make, arm=arm, seed=seed, draw=draw, rule=rule, lr=args.lr, limit=args.limit)

    first = row(ARMS[0], 0, lambda decision, context: False)
    if not first["rescued"]:
        return [first]
    second = row(ARMS[1], 0, lambda decision, context: is_rescued(decision, context, args.limit))
    records = [first, second]
    for draw in range(args.draws):
        for arm, pool in ((ARMS[2], first["sent"]), (ARMS[3], first["sent_old"])):
            drawn = Random(f"{seed}/{draw}").sample(pool, min(second["dropped"], len(pool)))
            records.append(row(arm, draw, partial(_named, {(rank, k) for rank, k in drawn})))
    return records


def _against(records: list[Row], rule: str, arm: str) -> list[float]:
    """Loss without the rescued less the mean loss of another arm, one number a seed."""
    own = grouped([r for r in records if r["rule"] == rule], "arm", "seed")
    seeds = [seed for name, seed in own if name == arm]
    return [
        own[ARMS[1], seed][0]["terminal_loss"] - mean([r["terminal_loss"] for r in own[arm, seed]]) for seed in seeds
    ]


def _named(names: set[PushName], decision: GateDecision, context: GateContext) -> bool:
    return (context.rank, context.step) in names


def _trained(training: Training, rule: str, arm: str, seed: int, draw: int, drops: Drops) -> Row:
    args, make = training.args, gate_maker(rule)
    gates: list[DroppingGate] = []
    seen: list[tuple[PushName, bool, bool, bool]] = []

    def gate() -> Gate:
        gates.append(DroppingGate(make(), drops))
        return gates[-1]

    def observe(push: Observation) -> None:
        name, old = (push.context.rank, push.context.step), is_old(push.context, args.limit)
        seen.append((name, not push.decision.rejected, old, is_rescued(push.decision, push.context, args.limit)))

    result = training.run(seed, gate, lr=args.lr, schedule=partial(warmup_cosine, warmup=0.0), observe=observe)
    return {
        "arm": arm, "seed": seed, "draw": draw, "rule": rule, "lr": args.lr,
        "terminal_loss": terminal_loss(result.model, training.task(seed).test),
        "dropped": sum(g.dropped for g in gates),
        "old": sum(old for _, _, old, _ in seen), "rescued": sum(rescued for _, _, _, rescued in seen),
        "sent": [list(name) for name, sent, _, _ in seen if sent],
        "sent_old": [list(name) for name, sent, old, _ in seen if sent and old],
    }  # fmt: skip


def _draw(figure: Any, records: list[Row]) -> None:
    rules = list(dict.fromkeys(r["rule"] for r in records if r["arm"] != ARMS[0])) or [records[0]["rule"]]
    for axes, rule in zip(figure.subplots(1, len(rules), squeeze=False)[0], rules, strict=True):
        own = [r for r in records if r["rule"] == rule]
        as_is = {r["seed"]: r["terminal_loss"] for r in own if r["arm"] == ARMS[0]}
        for place, arm in enumerate(ARMS[1:]):
            less = [r["terminal_loss"] - as_is[r["seed"]] for r in own if r["arm"] == arm]
            axes.plot([place] * len(less), less, "o", alpha=0.5, color=f"C{place}")
            axes.plot([place - 0.2, place + 0.2], [mean(less)] * 2, color=f"C{place}", linewidth=2)
        axes.axhline(0.0, color="#777777", linewidth=1)
        axes.set_title(rule, fontsize=8)
        axes.set_ylabel("terminal loss less that of the run as it is")
        labels = [arm.replace(" as many", "\nas many").replace(" the ", "\nthe ") for arm in ARMS[1:]]
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
