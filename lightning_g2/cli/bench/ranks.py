"""The processes of a benchmark: each runs the fits of a plan one after another, as one of the ranks.

    python -m lightning_g2.cli.bench.ranks PLAN.json RESULTS

Rank r writes what it has read, a list with an entry for each fit, to ``RESULTS/rank<r>.json``. All fits of a plan run
in the same processes, so that they can be interleaved without paying for new interpreters.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy

from lightning_g2.cli.bench.meter import Meter
from lightning_g2.cli.bench.workload import build
from lightning_g2.strategy import G2AsyncStrategy
from lightning_g2.strategy.ddp import MeteredDDPStrategy


def strategy_of(fit: Mapping[str, Any]) -> str | Strategy:
    """The strategy of a fit: ``strategy`` ("g2async", "ddp" or "plain") and its ``options``."""
    if fit["strategy"] == "g2async":
        return G2AsyncStrategy(**fit.get("options", {}))
    return MeteredDDPStrategy() if fit["strategy"] == "ddp" else "auto"


def run_fit(plan: Mapping[str, Any], fit: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Run one fit; returns this process's rank and what it has read."""
    module, data = build(plan["workload"], fit)
    meter = Meter(fit.get("memory_at"))
    trainer = pl.Trainer(
        strategy=strategy_of(fit), devices=plan["ranks"], accelerator="cpu", max_steps=fit["max_steps"],
        max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[meter],
    )  # fmt: skip
    trainer.fit(module, data)
    result = {"start_s": meter.start_s, "batches": meter.batches, "losses": module.losses, **meter.facts}
    return trainer.global_rank, result


def main(plan_path: str, results: str) -> None:
    """Run all fits of a plan."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    plan = json.loads(Path(plan_path).read_text(encoding="utf-8"))
    entries = []
    rank = 0
    for number, fit in enumerate(plan["fits"]):
        rank, entry = run_fit(plan, fit)
        entries.append(entry)
        if rank == 0:
            print(f"fit {number + 1} of {len(plan['fits'])}", file=sys.stderr, flush=True)
        # After each fit: what is there when a later one fails tells how far the ranks came.
        Path(results, f"rank{rank}.json").write_text(json.dumps(entries), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
