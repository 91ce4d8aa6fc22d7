"""The study of rules: small, real, and resumable."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_g2.cli.bench import main
from lightning_g2.cli.bench.screen import quality, screen
from lightning_g2.cli.bench.spec import optimizer_of, parse_spec
from lightning_g2.cli.bench.stable import stable_range, stable_table
from lightning_g2.cli.bench.table import markdown, rows_of
from lightning_g2.cli.bench.trial import Record
from lightning_g2.errors import ConfigurationError
from lightning_g2.simulate import simulate
from lightning_g2.simulate.source import build_optimizer

SMALL = [
    "routing", "model=mlp", "data=digits", "model.width=16", "model.layers=1", "--most-rates", "2",
    "--rules", "none", "g2(beta=4.0)", "floor", "--rates", "1e-3", "4e-3", "--ranks", "4", "--pushes", "30",
]  # fmt: skip


def record(rule: str, lr: float, loss: float, seed: int = 1) -> Record:
    return Record("t", rule, "adam", lr, seed, loss, loss, 3.0, 0.2, 0.8, 0.0, 30, 9.0)


def test_a_study_is_written_and_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, listed = tmp_path / "out", tmp_path / "records.json"
    assert main([*SMALL, "--seeds", "1", "--out", str(out)]) == 0
    trials = (out / "trials.jsonl").read_text().splitlines()
    assert len(trials) == 3 * 2
    assert main([*SMALL, "--seeds", "1", "2", "--out", str(out), "--json", str(listed)]) == 0
    again = (out / "trials.jsonl").read_text().splitlines()
    assert again[:6] == trials  # none of them was trained again
    assert len(again) == 3 * 2 + 3
    records = json.loads(listed.read_text())
    assert len(records) == 9
    assert {"task", "rule", "optimizer", "lr", "seed", "terminal_loss", "staleness_mean", "openness_first", "openness_last"} <= set(records[0])  # noqa: E501 # fmt: skip
    by_rule = {r["rule"]: r for r in records}
    assert by_rule["floor"]["staleness_mean"] == 0.0
    assert by_rule["none"]["staleness_mean"] > 1.0
    assert by_rule["none"]["openness_last"] == 1.0 > by_rule["g2(beta=4.0)"]["openness_first"]
    table = (out / "table.md").read_text()
    assert table in capsys.readouterr().out
    rows_part, openness_part = table.split("\n\n")
    assert rows_part.count("\n") == 1 + 3
    assert "| g2(beta=4.0) | 0" in openness_part
    assert "none" not in openness_part
    g2 = by_rule["g2(beta=4.0)"]
    assert (g2["openness"][0], g2["openness"][-1]) == (g2["openness_first"], g2["openness_last"])
    assert g2["openness_stale"][0] < g2["openness"][0]  # the first pushes of all are fresh, and pass
    assert by_rule["floor"]["openness_stale"] == [None] * 5
    with (out / "table.csv").open() as file:
        rows = {row["rule"]: row for row in csv.DictReader(file)}
    losses = [r["terminal_loss"] for r in records if r["rule"] == "none" and r["lr"] == float(rows["none"]["lr"])]
    assert float(rows["none"]["loss"]) == pytest.approx(sum(losses) / 2)
    assert (out / "table.png").stat().st_size > 10_000


def test_rounds_and_floor_at_equal_time(tmp_path: Path) -> None:
    rules = ["none", "rounds(m=3)", 'buffer(k=2, weights="fedbuff")', "floor", "drop", 'rounds(m="auto", gate="g2")']
    options = [
        "--time-limit",
        "20",
        "--rates",
        "1e-3",
        "--seeds",
        "1",
        "--ranks",
        "4",
        "--delays",
        "straggler(0.25, 4)",
    ]
    listed = tmp_path / "records.json"
    task = ["model=mlp", "data=digits", "model.width=16", "--delays", "straggler(0.25, 4)", "--overhead", "drop=0.5"]
    assert main(["routing", *task, "--rules", *rules, *options, "--out", str(tmp_path), "--json", str(listed)]) == 0
    none, rounds, buffer, floor, drop, auto = json.loads(listed.read_text())
    assert none["pushes"] == floor["pushes"] == buffer["pushes"] > rounds["pushes"]
    assert drop["pushes"] < 0.8 * none["pushes"]  # each takes half a gradient longer
    assert floor["staleness_mean"] == 0.0
    assert rounds["unused"] > 0.0 == none["unused"]
    assert rounds["time"] <= 20.0
    assert (rounds["rounds_last"], none["rounds_last"]) == (3, 0)
    assert auto["pushes"] == none["pushes"]
    assert auto["rounds_last"] == 0, "Adam and the gate: nobody waits"


def test_measured_costs_are_charged_and_kept(tmp_path: Path) -> None:
    options = [*SMALL, "--seeds", "1", "--time-limit", "300", "--overhead", "auto", "--out", str(tmp_path)]
    assert main(options) == 0
    costs = (tmp_path / "costs.json").read_text()
    assert json.loads(costs)["model=mlp data=digits model.width=16 model.layers=1 | g2(beta=4.0)"] > 0.0
    trials = (tmp_path / "trials.jsonl").read_text()
    assert main(options) == 0
    assert (tmp_path / "costs.json").read_text() == costs
    assert (tmp_path / "trials.jsonl").read_text() == trials


def test_a_thermal_gate_opens_further_where_the_rate_falls(tmp_path: Path) -> None:
    opened = {}
    for schedule in ("cosine", "constant"):
        listed = tmp_path / f"{schedule}.json"
        options = [*SMALL[:5], "--rules", 'g2(scale="thermal", weight_rule="local", beta=8.0)', "--rates", "4e-3"]
        options += ["--schedule", schedule, "--ranks", "4", "--pushes", "60", "--seeds", "1", "--out", str(tmp_path)]
        assert main([*options, "--json", str(listed)]) == 0
        (trained,) = json.loads(listed.read_text())
        opened[schedule] = trained["openness_last"]
    assert opened["cosine"] > opened["constant"] + 0.2


def test_a_gate_may_act_without_staleness(tmp_path: Path) -> None:
    listed = tmp_path / "records.json"
    acting, idle = """floor(gate='g2(weight_rule="constant")')""", "floor(gate='none')"
    options = [*SMALL[:5], "--rules", "floor", acting, idle, "--rates", "4e-3", "--pushes", "40", "--seeds", "1"]
    assert main([*options, "--out", str(tmp_path), "--json", str(listed)]) == 0
    floor, acted, idled = json.loads(listed.read_text())
    assert floor["terminal_loss"] == idled["terminal_loss"] != acted["terminal_loss"]
    assert (acted["staleness_mean"], acted["openness_last"]) == (0.0, 0.0)


def bowl(best: float) -> Callable[[str, float], Record]:
    """Trials whose loss grows with the distance from a best rate, and diverge far above it."""

    def trial(rule: str, lr: float) -> Record:
        return record(rule, lr, 1.0 + abs(math.log2(lr / best)) if lr < 20 * best else math.nan)

    return trial


def test_grids_grow_until_the_best_rate_is_inside_and_are_of_one_size() -> None:
    near, far = bowl(0.02), bowl(0.16)

    def trial(rule: str, lr: float) -> Record:
        return (far if rule == "far" else near)(rule, lr)

    tried = screen(trial, ["near", "far", "floor"], [0.01, 0.02, 0.04], most=8)
    assert [r.lr for r in tried["far"]] == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32]
    assert len(tried["near"]) == 6
    assert {0.01, 0.02, 0.04} < {r.lr for r in tried["near"]}
    assert len(tried["floor"]) == 3  # the floor does not compete
    assert [r.lr for r in screen(trial, ["far"], [0.01, 0.02], most=3)["far"]] == [0.01, 0.02, 0.04]
    assert len(screen(trial, ["far"], [0.01], most=8)["far"]) == 1
    falling = screen(bowl(0.001), ["low"], [0.004, 0.008], most=8)["low"]
    assert [r.lr for r in falling] == [0.0005, 0.001, 0.002, 0.004, 0.008]


@pytest.mark.parametrize("start", [0.01, 0.1, 1.0, 100.0])
def test_the_largest_stable_rate_is_found_from_either_side(start: float) -> None:
    def trial(rule: str, lr: float) -> Record:
        loss = 1.0 + abs(math.log2(lr / 0.1)) / 8 if lr < 3.0 else math.nan
        return record(rule, lr, loss)

    found = stable_range(trial, "r", start)
    assert found.best.lr == pytest.approx(0.1, rel=0.2)
    assert found.largest.lr == pytest.approx(1.6, rel=0.45)  # log2(1.6 / 0.1) = 4, the grid steps by the root of two
    assert quality(found.largest) <= 1.5 * quality(found.best)
    assert "| r | " in stable_table([found])


def test_rows() -> None:
    finals = {
        "none": [record("none", 0.1, 2.0), record("none", 0.1, 3.0, seed=2)],
        "floor": [record("floor", 0.2, 1.0)],
        "g2": [record("g2", 0.4, 1.3)],
        "bad": [record("bad", 0.4, math.nan)],
    }
    grid = [record(rule, lr, 9.0) for rule in ("g2", "none", "floor") for lr in (0.1, 0.2, 0.4)]
    rows = rows_of(finals, grid)
    assert [row.rule for row in rows] == ["floor", "g2", "none", "bad"]
    assert [row.at_edge for row in rows[:3]] == [False, True, True]
    assert rows[1].gap_closed == pytest.approx(0.8)
    assert rows[2].spread == pytest.approx(math.sqrt(0.5))
    assert "| g2 | 0.4 (edge of the grid) | 1.3000 | 1 | 80% | 3.0 | 0.20 / 0.80 | 0.0% |" in markdown(rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rules", "g3"], "gate='g3': must be one of"),
        (["--rules", "g2(gamma=1)"], "gamma=1: an option of gate 'g2' must be one of"),
        (["--rules", "rounds(m=17)"], r"rule='rounds\(m=17\)': must be rounds\(m=...\) with 1 to 16 pushes"),
        (["--rules", 'buffer(k="auto")'], r"rule='buffer\(k=\"auto\"\)': must be buffer\(k=...\) with 1 to 16"),
        (["--rules", "rounds(m=2, weights=1)"], r"give their number, and of late, k, staleness_cost, gate what you"),
        (["--rules", 'buffer(k=4, weights="old")'], "buffer_weights='old': must be one of equal"),
        (["--rules", "floor(gat='g2')"], r"rule=.*: must be floor or floor\(gate=...\)"),
        (["--rules", "floor(gate='g3')"], "gate='g3': must be one of"),
        (["--rules", "none", "none"], "rules=.*: must differ from each other"),
        (["--overhead", "g3=0.1"], "overhead='g3=0.1': must be RULE=UNITS"),
        (["--delays", "slow"], "delays='slow': must be one of"),
        (["--optimizer", "sgdd(momentum=1)"], "no class of torch.optim is called 'sgdd'"),
    ],
)
def test_bad_options_end_before_anything_is_trained(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["routing", "--out", str(tmp_path / "out"), *options]) == 2
    captured = capsys.readouterr().err
    assert re.search(message, captured)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["g2(4)", "g2(beta", "a.b", "g2(beta=x)"])
def test_what_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="must be a name, with options as"):
        parse_spec(text)


def test_muon_steps_matrices_and_adamw_the_rest() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    batches = [torch.randn(8, 6) for _ in range(5)]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - batch[:, :2]).square().mean()

    result = simulate(
        net, loss, batches, ranks=1, pushes=12, optimizer=optimizer_of("muon(adamw_share=0.1)"), lr=0.02,
        schedule=lambda fraction: 1 - fraction, delays="uniform", seed=0,
    )  # fmt: skip
    parameters = list(net.parameters())
    muon = torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02)
    adamw = torch.optim.AdamW([p for p in parameters if p.dim() != 2], lr=0.002)
    for k in range(12):
        muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = 0.02 * (1 - k / 12), 0.02 * 0.1 * (1 - k / 12)
        net.zero_grad()
        loss(net, batches[k % 5]).backward()
        muon.step()
        adamw.step()
    assert all(torch.equal(p, result.weights[name]) for name, p in net.named_parameters())


@pytest.mark.parametrize("text", ["adam", "SGD", "sgd(momentum=0.9)", "adamw(betas=(0.5, 0.9))"])
def test_optimizers_by_text(text: str) -> None:
    made = build_optimizer(optimizer_of(text), [nn.Parameter(torch.ones(2))], 0.5)
    assert type(made).__name__.lower() == text.split("(")[0].lower()
    assert made.param_groups[0]["lr"] == 0.5
