"""Every count of the Trainer means under two ranks what it means for one process (``tests/scripts/counts.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


class Facts:
    """What both ranks wrote about one fit."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.ranks = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]

    def __getitem__(self, key: str) -> object:
        values = [rank[key] for rank in self.ranks]
        assert values[0] == values[1], f"ranks disagree on {key}: {values}"
        return values[0]

    @property
    def epochs(self) -> list[list[int]]:
        """Samples of each epoch, of both ranks, ascending."""
        return [sorted(a + b) for a, b in zip(*(rank["seen"] for rank in self.ranks), strict=True)]

    @property
    def validations(self) -> list[int]:
        """Samples that both ranks had trained on at each validation."""
        first, second = (rank["validations"] for rank in self.ranks)
        assert [step for step, _ in first] == [step for step, _ in second]
        return [a + b for (_, a), (_, b) in zip(first, second, strict=True)]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("counts")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "counts.py"), str(out)]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return lambda name: Facts(out, name)


@pytest.mark.parametrize(
    ("case", "samples", "epochs"),
    [("shuffled", 50, 3), ("workers", 40, 2), ("accumulate", 20, 2), ("static", 30, 2), ("fewer_than_ranks", 1, 2)],
)
def test_an_epoch_is_every_sample_once(facts, case, samples, epochs):
    assert facts(case).epochs == [list(range(samples))] * epochs


def test_the_order_is_shuffled_anew_each_epoch(facts):
    first, second, third = facts("shuffled").ranks[0]["seen"]
    assert len({tuple(first), tuple(second), tuple(third), tuple(sorted(first))}) == 4


def test_the_fast_rank_does_more(facts):
    """In each epoch rank 1 ends its first batch when rank 0 has had twenty of the 25."""
    for fast, slow in zip(*(rank["seen"] for rank in facts("shuffled").ranks), strict=True):
        assert len(fast) >= 2 * 20
        assert slow


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        ("shuffled", 75), ("workers", 80), ("accumulate", 14), ("validate", 20), ("limit", 9), ("limit_share", 10),
        ("overfit", 12), ("max_steps", 13), ("weighted", 12), ("static", 60), ("one_cycle", 40), ("stream_limit", 11),
    ],
)  # fmt: skip
def test_global_step_and_its_estimate_are_those_of_one_process(facts, case, steps):
    fit = facts(case)
    assert fit["global_step"] == fit["total"] == fit["applied"] == steps


def test_a_rank_counts_its_own_batches_without_gaps(facts):
    for rank in facts("shuffled").ranks:
        assert rank["indices"] == [i for epoch in rank["seen"] for i in range(len(epoch) // 2)]


@pytest.mark.parametrize(
    ("case", "at"),
    [
        ("workers", list(range(10, 81, 10))), ("validate", [5, 10, 15, 20]), ("validate_over_epochs", [15, 30]),
        ("uneven", [10, 20]), ("nothing", [5, 10]), ("endless", [4, 8, 12]), ("stream_limit", [4, 8]),
        ("static", [20, 50]),        ("fewer_than_ranks", [1, 2]),
    ],
)  # fmt: skip
def test_validation_comes_after_so_many_batches_of_all_ranks(facts, case, at):
    assert facts(case).validations == at


@pytest.mark.parametrize(("case", "batches"), [("limit", 9), ("limit_share", 10), ("stream_limit", 11)])
def test_limits_are_limits_of_the_job(facts, case, batches):
    assert [len(epoch) for epoch in facts(case).epochs] == [batches]


def test_overfitting_sees_the_same_few_batches_in_every_epoch(facts):
    assert facts("overfit").epochs == [list(range(6))] * 2


def test_max_steps_ends_within_an_epoch(facts):
    assert [len(epoch) for epoch in facts("max_steps").epochs] == [10, 3]


def test_a_sampler_of_the_users_own_decides_what_is_drawn(facts):
    (drawn,) = facts("weighted").epochs
    assert len(drawn) == 24
    assert Counter(drawn)[9] >= 12, "the last sample has 50 times the weight of the others"


@pytest.mark.parametrize(("case", "split"), [("uneven", (3, 7)), ("nothing", (5, 0))])
def test_ranks_may_bring_different_numbers_of_batches_or_none(facts, case, split):
    assert [tuple(map(len, rank["seen"])) for rank in facts(case).ranks] == [(count,) * 2 for count in split]
    assert facts(case)["global_step"] == facts(case)["applied"] == 2 * sum(split)


def test_what_is_left_over_of_a_window_is_pushed(facts):
    fit = facts("uneven_accumulate")  # 3 batches and 8: windows of 3, and 3 + 3 + 2
    assert fit["global_step"] == fit["applied"] == 4
    assert fit["weight"] == pytest.approx(-(3 + 2 / 3))


def test_one_cycle_over_the_estimated_steps_ends_where_it_should(facts):
    rates = [rate for rank in facts("one_cycle").ranks for rate in rank["rates"]]
    assert max(rates) > 0.95
    assert min(rates) < 0.02, "it starts at 0.04 and ends near 0"


def test_a_resumed_epoch_trains_on_what_the_checkpoints_weights_have_not_seen(facts):
    saved = torch.load(facts("resumed").folder / "middle.ckpt", weights_only=True)
    trained = -int(saved["state_dict"]["weight"])  # every push moves the weight by one
    assert 6 <= trained < 40
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] == trained
    assert saved["global_step"] == trained
    (rest,) = facts("resumed").epochs
    assert len(set(rest)) == len(rest) == 40 - trained
    assert facts("resumed")["weight"] == -40
    assert facts("resumed")["global_step"] == 40


def test_pushes_can_be_weighted_by_their_samples(facts):
    sizes = facts("sizes").ranks[0]["sizes"]
    assert sorted(sizes) == [1] * 6 + [3] * 6
    expected = sum(size * (i + 1) / sum(sizes[: i + 1]) for i, size in enumerate(sizes))
    assert facts("sizes")["weight"] == pytest.approx(-expected)


def test_optimizer_steps_by_hand_count_each(facts):
    assert facts("gan")["global_step"] == 20
    assert [len(epoch) for epoch in facts("gan").epochs] == [10]


def test_max_time_stops_all_ranks_after_a_validation(facts):
    fit = facts("max_time")
    assert fit["global_step"] == fit["applied"] == sum(map(len, fit.epochs)) == fit.validations[-1] > 0
