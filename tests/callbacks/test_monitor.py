import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightning_g2.callbacks.monitor import G2MonitorCallback, _write_histogram, histograms, summarise
from lightning_g2.errors import ConfigurationError
from lightning_g2.values import PushRecord, RoundsChoice, ServerView

VIEW = ServerView(version=12, window={0: 0.0, 1: 2.0}, scale={})


def _record(rank: int, **fields: object) -> PushRecord:
    values = {
        "version": 1, "staleness": 0, "energy": 1.0, "weight": 1.0, "rejected": False, "samples": 4, "time_s": 0.0
    } | fields  # fmt: skip
    return PushRecord(rank=rank, **values)


def test_the_scalars_are_what_their_names_say() -> None:
    records = [
        _record(0, time_s=1.0, bytes_sent=50, bytes_saved=50),
        _record(1, staleness=9, weight=0.6, time_s=2.0, bytes_sent=100),
        _record(0, staleness=1, weight=0.2, time_s=3.0, bytes_sent=50, bytes_saved=50),
        _record(1, rejected=True, weight=0.0, time_s=5.0, bytes_saved=100),
    ]
    scalars = summarise(records, VIEW, ranks=2, beta=1.0, since_s=0.0)
    assert scalars["g2/openness"] == pytest.approx((1.0 + 0.6 + 0.2 + 0.0) / 4), "a rejected push has weight 0"
    assert scalars["g2/openness_stale"] == pytest.approx(0.4)
    assert scalars["g2/staleness_mean"] == pytest.approx(10 / 4)
    assert scalars["g2/staleness_max"] == 9.0
    assert scalars["g2/rescued"] == 1.0, "older than 2(N-1) = 2 versions and yet passed"
    assert scalars["g2/rejected"] == 1.0
    assert scalars["g2/server_version"] == 12.0
    assert (scalars["g2/bytes_sent"], scalars["g2/bytes_saved"]) == (200.0, 200.0)
    assert (scalars["g2/rank0/bytes_sent"], scalars["g2/rank0/bytes_saved"]) == (100.0, 100.0)
    assert (scalars["g2/rank1/bytes_sent"], scalars["g2/rank1/bytes_saved"]) == (100.0, 100.0)
    assert (scalars["g2/rank0/staleness_mean"], scalars["g2/rank1/staleness_mean"]) == (0.5, 4.5)
    assert scalars["g2/pushes_per_s"] == pytest.approx(3 / 5)
    assert scalars["g2/rank0/samples_per_s"] == pytest.approx(8 / 5)
    assert scalars["g2/rank1/samples_per_s"] == pytest.approx(4 / 5)
    weights = torch.softmax(torch.tensor([0.0, -2.0]), 0)
    assert scalars["g2/entropy"] == pytest.approx(float(-(weights * weights.log()).sum() / torch.tensor(2.0).log()))
    assert scalars["g2/ess"] == pytest.approx(float(1 / (2 * weights.square().sum())))


def test_what_is_undefined_is_left_out() -> None:
    scalars = summarise([_record(0, rejected=True)], ServerView(0, {}, {}), ranks=2, beta=1.0)
    assert set(scalars) == {
        "g2/rejected", "g2/late", "g2/rescued", "g2/server_version", "g2/openness", "g2/staleness_mean",
        "g2/staleness_max", "g2/bytes_sent", "g2/bytes_saved", "g2/rank0/bytes_sent", "g2/rank0/bytes_saved",
        "g2/rank0/staleness_mean",
    }  # fmt: skip


def test_histograms_hold_every_push_that_has_the_number() -> None:
    hot = _record(1, rejected=True, energy=2.5, weight=0.0, staleness=4)
    nan = _record(1, rejected=True, energy=0.0, weight=0.0)
    values = histograms([_record(0, energy=2.0), hot, nan])
    assert values["g2/friction"].tolist() == [2.0, 2.5]
    assert values["g2/weight"].tolist() == [1.0, 0.0, 0.0]
    assert values["g2/staleness"].tolist() == [0.0, 4.0, 0.0]
    assert set(values) == {"g2/friction", "g2/weight", "g2/staleness"}


def test_histograms_that_a_writer_cannot_take_break_nothing() -> None:
    written: list[torch.Tensor] = []

    def write(tag: str, values: torch.Tensor, global_step: int) -> None:
        assert values.numel()
        assert values.isfinite().all()
        assert values.dtype == torch.float32
        written.append(values)

    _write_histogram(write, "empty", torch.zeros(0), 1)
    _write_histogram(write, "half", torch.ones(3, dtype=torch.bfloat16), 1)
    with pytest.warns(UserWarning, match="histogram nan: non-finite values are left out"):
        _write_histogram(write, "nan", torch.tensor([1.0, float("nan"), float("inf")]), 1)
    with pytest.warns(UserWarning, match="non-finite"):
        _write_histogram(write, "all", torch.full((2,), float("nan")), 1)
    assert [len(values) for values in written] == [3, 1]


def test_a_change_of_rounds_is_logged_once_and_written_as_text(caplog) -> None:
    class Logger:
        def __init__(self) -> None:
            self.texts: list[tuple[str, str, int]] = []

        @property
        def experiment(self) -> "Logger":
            return self

        def add_text(self, tag: str, text: str, global_step: int) -> None:
            self.texts.append((tag, text, global_step))

    logger = Logger()
    trainer = SimpleNamespace(loggers=[logger, object()])
    monitor = G2MonitorCallback()
    first = RoundsChoice(40, 3, 1.0, 3, 1.5, 4, 1.0)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.g2async"):
        for step, choice in enumerate([None, first, first, replace(first, version=80), replace(first, rounds=None)]):
            monitor._tell(choice, trainer, step)
    assert [(tag, step) for tag, _, step in logger.texts] == [("g2/rounds", 1), ("g2/rounds", 4)]
    assert [record.getMessage() for record in caplog.records] == [
        f"g2async rounds='auto': {text}" for _, text, _ in logger.texts
    ]
    assert "rounds of 3 from version 40 on: of 4 ranks 1 effective versions/s" in logger.texts[0][1]
    scalars = summarise([_record(0)], replace(VIEW, choice=first), ranks=2, beta=1.0)
    assert scalars["g2/rounds"] == 3.0


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="log_every_n_steps=0: must be ≥ 1"):
        G2MonitorCallback(log_every_n_steps=0)
