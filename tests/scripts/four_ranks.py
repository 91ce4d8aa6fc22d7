"""Rules against each other in real runs of four ranks with a straggler, at equal wall time.

    python tests/scripts/four_ranks.py OUT [SECONDS] [RATE,...] [SEED,...] [RULE,...]

Each rule is tried at all rates on the first seed and then trained at its best rate on the others; runs go one after
another through ``g2-train`` and need a machine that does nothing else. What is in OUT already is
not repeated. Prints a table in Markdown: validation loss, mean and spread over seeds. By default 40 s a run, five
rules, four rates, three seeds: thirty runs, half an hour.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RULES = {
    "none": ["gate=none"],
    "rounds of 3": ["gate=none", "strategy.rounds=3"],
    "random subspace": ["gate=g2_spectral", "+gate.options.directions=random"],
    "default gate": ["gate=g2_spectral"],
    "auto": ["gate=g2_spectral", "strategy.rounds=auto"],
}


JOB = [
    "trainer.devices=4", "straggler.rank=3", "straggler.factor=6", "model.width=64", "model.layers=2",
    "callbacks.progress=null",
]  # fmt: skip
"""The last of four ranks six times slower; a model so small that they make some hundred steps on two cores."""


def train(out: Path, rule: str, rate: str, seed: str, seconds: int) -> dict:
    folder = out / f"{rule.replace(' ', '_')}-{rate}-{seed}"
    if not (folder / "report.json").exists():
        limit = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        command = [
            sys.executable, "-m", "lightning_g2.cli.train", *JOB, *RULES[rule], f"model.lr={rate}", f"seed={seed}",
            f"trainer.max_time='00:{limit}'", f"hydra.run.dir='{folder}'",
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    facts = json.loads((folder / "report.json").read_text())
    print(f"{rule}, {rate}, seed {seed}: {facts['val_loss']:.4f}, {facts['samples']} samples", file=sys.stderr)
    return facts


def main(out: str, seconds="40", rates="0.0015,0.003,0.006,0.012", seeds="1,2,3", rules="") -> None:
    first, *others = seeds.split(",")
    print("| rule | rate | validation loss | spread | seeds | samples | idle |\n|---|---|---|---|---|---|---|")
    for rule in rules.split(",") if rules else RULES:
        tried = {rate: train(Path(out), rule, rate, first, int(seconds)) for rate in rates.split(",")}
        best = min(tried, key=lambda rate: tried[rate]["val_loss"])
        runs = [tried[best], *(train(Path(out), rule, best, seed, int(seconds)) for seed in others)]
        losses = [run["val_loss"] for run in runs]
        spread = statistics.stdev(losses) if len(losses) > 1 else float("nan")
        ends = rates.split(",")
        edge = " (edge)" if len(ends) > 1 and best in (ends[0], ends[-1]) else ""
        samples, idle = (statistics.mean(run[name] for run in runs) for name in ("samples", "idle_fraction"))
        print(
            f"| {rule} | {best}{edge} | {statistics.mean(losses):.4f} | {spread:.4f} | {len(losses)} | {samples:.0f} | "
            f"{100 * idle:.1f}% |", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
