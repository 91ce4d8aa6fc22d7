"""``g2-bench sources``: the arithmetic of each experiment, and each from end to end in small."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_g2.cli.bench import main
from lightning_g2.cli.bench.sources import age, compression, projection, thaw, workers
from lightning_g2.cli.bench.sources.projected import FRICTION_LIMIT, ProjectedGate, readings
from lightning_g2.cli.bench.sources.training import paired, standard_error
from lightning_g2.cli.bench.sources.wire import WHATS
from lightning_g2.routing import GateContext, build_gate
from lightning_g2.simulate import Observation, simulate

TASK = ["--task", "model=mlp", "data=digits", "model.width=8", "--ranks", "4", "--held-out", "2"]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(name: str, out: Path, *options: str) -> list[dict[str, Any]]:
    assert main(["sources", name, "--out", str(out), "--json", str(out / "records.json"), *options]) == 0
    assert (out / "table.md").read_text().count("\n| ") >= 3
    assert (out / "table.png").stat().st_size > 5_000
    with (out / "table.csv").open() as file:
        assert list(csv.DictReader(file))
    records: list[dict[str, Any]] = json.loads((out / "records.json").read_text())
    return records


def test_all_gradients_have_one_length_and_one_cosine_to_their_mean() -> None:
    frame, mean = torch.linalg.qr(noise(12, 4))[0], noise(12, 9, seed=1)
    mean = mean - frame @ (frame.t() @ mean)
    mean = mean / mean.norm()
    generator = torch.Generator().manual_seed(2)
    direction = frame @ noise(4, 9, seed=3)
    halves = [workers._drift(k, mean, frame, direction / direction.norm(), generator) for k in workers._DRIFTS]
    gradients = workers._gradients(mean, halves, 0.3)
    found = torch.stack(gradients).mean(dim=0)
    assert len(gradients) == 6
    for gradient in gradients:
        assert gradient.norm() == pytest.approx(1.0)
        assert float((gradient * found).sum() / found.norm()) == pytest.approx(0.3)
    assert workers._cosine_error(gradients, 0.3) == pytest.approx(0.0, abs=1e-12)
    assert abs(workers._cosine_error(gradients[:-1], 0.3)) > 0.01  # without its partner a drift turns the mean


def test_workers(tmp_path: Path) -> None:
    records = run("A", tmp_path, "--workers", "4", "--pushes", "10", "--shape", "12", "16", "--seeds", "1", "2")
    assert len(records) == 3 * 4 * 2
    assert max(abs(r["cosine_error"]) for r in records) < 1e-12
    by = {(r["drift"], r["rule"], r["seed"]): r for r in records}
    for seed in (1, 2):
        for drift in ("one direction", "four directions"):
            assert by[drift, "adaptive frame", seed]["auc"] > 0.95
        assert by["no difference", "adaptive frame", seed]["auc"] < 0.8


def test_a_mean_over_all_frames_is_the_same_for_every_drift() -> None:
    weights = {"w": noise(30, 20, seed=1)}
    for seed in (2, 3):
        drift = {"w": noise(30, 20, seed=seed) * 10.0**seed}
        friction, ratio = readings(drift, weights, frames=600)
        assert float(friction.mean()) == pytest.approx(FRICTION_LIMIT, abs=4 * 0.43 / math.sqrt(600))
        assert float(ratio.mean()) == pytest.approx(1.0, abs=4 * math.sqrt(2 / 14 / 600))
        assert float(ratio.std()) == pytest.approx(math.sqrt(2 / 14), rel=0.2)
    assert pytest.approx(16 / 21) == FRICTION_LIMIT


@pytest.mark.parametrize("energy", ["friction", "norm"])
def test_many_frames_come_near_the_exact_energy(energy: Any) -> None:
    exact, many = ProjectedGate(energy=energy, frames=0), ProjectedGate(energy=energy, frames=200)
    weights = {"a": noise(9, 8, seed=1), "b": noise(5, seed=2)}
    context = GateContext(staleness=3, concurrency=4, window={1: 0.1, 2: 0.0}, weights=weights)
    for seed, scale in ((3, 3.0), (4, 1.0), (5, 2.0)):
        gradients = {"a": scale * noise(9, 8, seed=seed), "b": scale * noise(5, seed=seed)}
        one, other = exact.decide(gradients, context), many.decide(gradients, context)
        assert other.energy == pytest.approx(one.energy, rel=0.2)
        assert other.weight == pytest.approx(one.weight, abs=0.1)
        assert torch.allclose(one.gradients["a"], gradients["a"] * one.weight)


def test_one_frame_of_friction_is_the_sources_gate() -> None:
    mine = ProjectedGate(energy="friction", frames=1, beta=2.0, seed=7)
    theirs = build_gate(
        "g2", frame="random", action="scalar", weight_rule="relative", scale="unit", beta=2.0, seed=7
    )  # fmt: skip
    context = GateContext(staleness=5, concurrency=4, window={1: 0.3}, weights={"w": noise(6, 7)})
    for seed in range(3):
        one, other = (gate.decide({"w": noise(6, 7, seed=seed)}, context) for gate in (mine, theirs))
        assert (one.energy, one.weight) == (other.energy, other.weight)


def test_shares_and_noise() -> None:
    groups = noise(50, 1)
    assert projection.share_of_groups(groups.expand(50, 8)) == pytest.approx(1.0)
    assert projection.share_of_groups(noise(50, 40)) == pytest.approx(0.0, abs=0.05)
    assert projection.share_of_groups(groups + noise(50, 40, seed=1)) == pytest.approx(0.5, abs=0.12)
    values = noise(60, 64, seed=2)
    for m in (1, 4, 16):
        assert projection.noise_of_means(values, m) == pytest.approx(1 / math.sqrt(m), rel=0.1)


def test_projection(tmp_path: Path) -> None:
    options = ["--pushes", "8", "--seeds", "1", "2", "--rates", "4e-3", "--frames", "1", "2", "--drifts", "3"]
    records = run("projection", tmp_path, *TASK, *options, "--estimates", "8")
    assert records[0]["drifts"] == 3
    assert set(records[0]["norm"]) == {"1", "2"}
    assert len(records) == 1 + 2 * 3 * 2
    assert "2/0.055² = 661 dimensions, 48 frames" in (tmp_path / "table.md").read_text()


def test_pairs_are_made_by_seed() -> None:
    ours = [SimpleNamespace(seed=s, terminal_loss=loss) for s, loss in ((1, 2.0), (2, 3.0), (3, 9.0))]
    others = [SimpleNamespace(seed=s, terminal_loss=loss) for s, loss in ((2, 2.5), (1, 1.0))]
    assert paired(ours, others) == [1.0, 0.5]  # type: ignore[arg-type]
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)
    assert math.isinf(standard_error([1.0]))


def test_gpt(tmp_path: Path) -> None:
    options = ["--pushes", "8", "--seeds", "1", "2", "--rates", "2e-3", "4e-3", "--rules", "floor"]
    records = run("B", tmp_path, *TASK, *options)
    assert len(records) == 3 * (2 + 1)
    text = (tmp_path / "table.md").read_text()
    assert "| none (Hogwild) |" in text
    assert "| sources' gate |" in text
    assert "Sources' gate less Hogwild" in text


def test_fifths_and_what_a_thaw_is_called() -> None:
    weights = [1.0, 0.0, 0.5, 0.5, 1.0, 0.25, 1.0, 0.75, 1.0, 1.0]
    ages = [0, 3, 0, 2, 0, 2, 0, 2, 0, 0]
    assert thaw.fifths(weights, ages, stale_only=False) == [0.5, 0.5, 0.625, 0.875, 1.0]
    stale = thaw.fifths(weights, ages, stale_only=True)
    assert stale[:4] == [0.0, 0.5, 0.25, 0.75]
    assert math.isnan(stale[4])
    assert thaw.rise([0.2, 0.9, 0.5]) == pytest.approx(0.3)
    assert thaw.verdict([0.3, 0.3], [0.6, 0.6]).startswith("spontaneous; 50%")
    assert thaw.verdict([0.1, 0.1], [0.5, 0.5]).startswith("opens with the learning rate; 20% of the rise is spont")
    assert thaw.verdict([0.0, 0.3], [0.6, 0.6]) == "opens with the learning rate"  # it may be chance
    assert thaw.verdict([0.01, 0.01], [0.04, 0.04]) == "does not thaw"
    assert thaw.verdict([0.3], [0.3]).startswith("spontaneous")


def test_thaw_goes_on_where_it_stopped(tmp_path: Path) -> None:
    options = [*TASK, "--pushes", "20", "--rules", "g2", 'g2(weight_rule="constant", constant=0.5)']
    run("thaw", tmp_path, *options, "--seeds", "1")
    first = (tmp_path / "trainings.jsonl").read_text()
    records = run("thaw", tmp_path, *options, "--seeds", "1", "2")
    again = (tmp_path / "trainings.jsonl").read_text()
    assert again.startswith(first)
    assert again.count("\n") == 2 * first.count("\n") == 8
    flat = [r for r in records if r["rule"] != "g2"]
    assert all(value == pytest.approx(0.5) for r in flat for value in r["stale"])
    assert {r["schedule"] for r in records} == {"cosine", "constant"}
    assert "does not thaw" in (tmp_path / "table.md").read_text()


RESCUE = ["--rules", "none", "drop(limit=4)", "--limit", "1", "--pushes", "60", "--seeds", "1", "2", "--draws", "2"]


def test_rescue_drops_as_many_at_random(tmp_path: Path) -> None:
    records = run("rescue", tmp_path, *TASK, *RESCUE)
    assert "`drop(limit=4)` has rescued no push" in (tmp_path / "table.md").read_text()
    assert sum(r["rule"] != "none" for r in records) == 2
    for seed in (1, 2):
        own = [r for r in records if r["seed"] == seed and r["rule"] == "none"]
        first = own[0]
        assert first["dropped"] == 0 < first["rescued"] == first["old"]  # without a gate each old push is let through
        assert [r["dropped"] for r in own[1:]] == [first["rescued"]] * 5
        assert own[1]["rescued"] == 0
        assert own[1]["old"] == first["old"]
        losses = {r["arm"]: r["terminal_loss"] for r in own}
        # All that is old was rescued: dropping as many old ones at random drops the same ones.
        assert losses["without the rescued"] == losses["without as many random old ones"] != losses["as it is"]
        assert losses["without as many random ones"] != losses["without the rescued"]


def test_a_watcher_s_changes_add_up_to_what_the_run_has_gained() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    batches = [noise(8, 6, seed=seed).float() for seed in range(5)]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - batch).square().mean()

    def held_out(model: nn.Module) -> float:
        with torch.no_grad():
            return float(loss(model, batches[4]))

    watcher = age.Watcher(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), held_out)
    seen: list[Observation] = []

    def observe(push: Observation) -> None:
        watcher(push)
        seen.append(push)

    result = simulate(
        net, loss, batches[:4], ranks=4, pushes=30, gate=("drop", {"limit": 4}), optimizer="sgd", lr=0.3,
        delays="straggler(0.25, 4)", seed=1, evaluation=[batches[4]], observe=observe,
    )  # fmt: skip
    start = held_out(net)
    assert sum(row["change"] for row in watcher.rows) == pytest.approx(result.loss - start, abs=1e-6)
    assert [row["staleness"] for row in watcher.rows] == result.staleness
    assert any(result.rejected)
    assert all(row["change"] == 0.0 for row, gone in zip(watcher.rows, result.rejected, strict=True) if gone)
    assert all(0.0 <= row[name] <= 8 / 3 for row in watcher.rows for name in age.FRAMES)


def test_age_finds_out_which_of_the_two_it_is() -> None:
    def series(seed: int) -> dict[str, Tensor]:
        ages, energy = noise(300, seed=seed).exp().round(), noise(300, seed=seed + 100)
        adaptive = energy + 0.5 * ages.log1p()  # tells of age what it shares with it, and nothing more
        change = ages.log1p() + 0.5 * noise(300, seed=seed + 200) - 0.8
        return {"staleness": ages, "random": noise(300, seed=seed + 300), "adaptive": adaptive, "change": change}

    runs = [series(seed) for seed in (1, 2, 3)]
    rows = {row["cause"]: row for row in age.analysed(runs, age.WHOLE, 40)}
    assert rows["staleness"]["auc"] > 0.75
    assert rows["both"]["auc"] > 0.75
    assert rows["random"]["auc_low"] < 0.5 < rows["random"]["auc_high"]
    assert rows["staleness"]["partial"] > 0.5
    assert rows["adaptive"]["correlation"] > 0.1 > abs(rows["adaptive"]["partial"])
    thirds = [age.part(runs[0], phase)["change"] for phase in age.PHASES]
    assert torch.equal(torch.cat(thirds), runs[0]["change"])


def test_age(tmp_path: Path) -> None:
    records = run("age", tmp_path, *TASK, "--pushes", "40", "--seeds", "1", "2", "--draws", "20")
    assert len(records) == 2
    assert len(records[0]["change"]) == len(records[0]["staleness"]) == 36  # each rank's first push is left out
    assert "| whole run | age τ |" in (tmp_path / "table.md").read_text()


def test_what_fourteen_numbers_save() -> None:
    rows = [{"gradient_bytes": 20_000_000.0, "wire_bytes_out": 20_001_000.0}]
    rows.append({"gradient_bytes": 56.0, "wire_bytes_out": 1_056.0})
    whole, vector = compression.ratios(rows)
    assert whole["ratio"] == whole["wire_ratio"] == 1.0
    assert round(vector["ratio"]) == 357_143
    assert vector["wire_ratio"] == pytest.approx(18_940, abs=1)
    assert "5,000,000 numbers over 14 are 357,143×" in compression.arithmetic()


def test_bytes_of_a_real_push() -> None:
    config = compression.config_of("8x1", 2) | {"whats": [WHATS[2]]}
    (row,) = compression.measured(config)["rows"]
    assert row["blocks"] == 12
    # The server's layout puts each tensor on a boundary of 64 bytes.
    assert row["gradient_bytes"] == 64 * row["blocks"]
    assert row["gradient_bytes"] < row["wire_bytes_out"] < row["gradient_bytes"] + 10_000
    assert 0.0 < row["kept"] < 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compression(tmp_path: Path) -> None:
    records = run("compression", tmp_path, "--sizes", "8x1", "--pushes", "2")
    assert [r["what"] for r in records] == list(WHATS)
    assert records[0]["gradient_bytes"] > records[2]["gradient_bytes"] > records[1]["gradient_bytes"]
    assert records[0]["wire_bytes_out"] > records[0]["gradient_bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["workers", "--workers", "6"], "workers=6: must be a multiple of 4"),
        (["workers", "--cosine", "1.5"], r"cosine=1.5: must lie in \[0, 0.99\]"),
        (["compression", "--sizes", "10x1"], "sizes='10x1': must be WIDTHxLAYERS"),
        (["projection", *TASK, "--frames", "0"], r"frames=\[0\]: must be ≥ 1"),
        (["thaw", *TASK, "--rules", "g3"], "gate='g3': must be one of"),
        (["rescue", *TASK, "--limit", "0"], "limit=0.0: must be > 0"),
        (["age", *TASK, "--ranks", "1"], "ranks=1: must be ≥ 2"),
        (["gpt", *TASK, "--seeds", "1", "1"], r"seeds=\[1, 1\]: must differ"),
    ],
)
def test_bad_options_end_before_anything_is_made(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sources", *options, "--out", str(tmp_path / "out")]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
