from __future__ import annotations

import json
import math
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_g2.callbacks.report import (
    RankRow,
    Report,
    ReportCallback,
    format_report,
    format_table,
    report_facts,
)
from lightning_g2.values import RankTotals

FAST = RankRow(
    rank=0,
    summary=RankTotals(samples=1200, pushes=101, staleness_mean=0.25, staleness_max=3, weight_mean=0.5, rejected=1),
    train_s=10.0,
    idle_s=0.5,
)
SLOW = RankRow(rank=1, summary=RankTotals(samples=300, pushes=25), train_s=10.0, idle_s=math.nan)


def report(**changes) -> Report:
    facts = {
        "strategy": "g2async", "rows": (FAST, FAST), "val_loss": 1.23456, "wall_s": 12.0, "output_dir": "/o",
        "log_dir": "/o/a b=c",
    }  # fmt: skip
    return Report(**{**facts, **changes})


def test_the_table():
    assert format_table([FAST, SLOW]).splitlines() == [
        "rank  samples  pushes  mean τ  max τ  mean weight  rejected  samples/s  idle %",
        "──────────────────────────────────────────────────────────────────────────────",
        "   0     1200     101    0.25      3        0.500         1      120.0     5.0",
        "   1      300      25    0.00      0        1.000         0       30.0     n/a",
    ]


def test_late_pushes_have_a_column_and_a_line_where_there_are_any():
    late = replace(SLOW, summary=replace(SLOW.summary, late=7, late_samples=84))
    heading, _, *rows = format_table([FAST, late]).splitlines()
    assert heading.split()[-5:] == ["rejected", "late", "samples/s", "idle", "%"]
    assert [row.split()[7] for row in rows] == ["0", "7"]
    assert "late samples     84, not trained on" in format_report(report(rows=(FAST, late)))
    assert "late" not in format_report(report())


def test_a_rank_without_time_divides_nothing_by_zero():
    row = format_table([RankRow(rank=3, summary=RankTotals(), train_s=0.0, idle_s=0.0)]).splitlines()[-1]
    assert row.split() == ["3", "0", "0", "0.00", "0", "1.000", "0", "0.0", "0.0"]


def test_the_report_says_the_totals_and_where_to_look():
    text = format_report(report())
    assert "validation loss  1.2346 nats/byte" in text
    assert "wall time        12.0 s" in text
    assert "idle             5.0 %" in text
    assert "applied samples  2400" in text
    assert text.endswith("tensorboard --logdir '/o/a b=c'")


def test_the_report_without_validation_or_event_file():
    text = format_report(report(val_loss=None, log_dir=None))
    assert "no validation" in text
    assert "tensorboard" not in text


def test_facts_are_flat_and_valid_json():
    facts = report_facts(report(rows=(FAST, SLOW)))
    assert facts["rank0_staleness_max"] == 3
    assert facts["rank1_idle_s"] is None
    assert facts["idle_fraction"] is None
    assert facts["samples"] == 1500
    assert not any(isinstance(value, (dict, list)) for value in facts.values())
    json.dumps(facts, allow_nan=False)


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Server(pl.Callback):
    def __init__(self) -> None:
        self.summary = {0: RankTotals(samples=5, pushes=4, staleness_mean=1.5, rejected=2)}


def fit(tmp_path, *callbacks: pl.Callback) -> pl.Trainer:
    loader = DataLoader(TensorDataset(torch.ones(10, 2)), batch_size=4)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2, num_sanity_val_steps=0,
        default_root_dir=tmp_path, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(Line(), loader, loader)
    return trainer


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*")
def test_one_rank_is_counted(tmp_path):
    callback = ReportCallback(str(tmp_path / "new"), strategy="single")
    fit(tmp_path, callback)
    assert callback.report is not None
    (row,) = callback.report.rows
    assert row.summary == RankTotals(samples=20, pushes=4)
    assert row.idle_s == 0.0
    assert 0.0 < row.train_s < callback.report.wall_s
    facts = json.loads((tmp_path / "new" / "report.json").read_text())
    assert facts["val_loss"] == callback.report.val_loss
    assert facts["samples"] == 20


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*")
def test_a_callback_with_a_summary_is_believed(tmp_path):
    callback = ReportCallback(str(tmp_path))
    server = Server()
    fit(tmp_path, server, callback)
    assert callback.report is not None
    assert callback.report.rows[0].summary == server.summary[0]


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*")
def test_the_wait_that_a_strategy_measured_is_used(tmp_path):
    class Waited(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.strategy.wait_s = 0.125

    callback = ReportCallback(str(tmp_path))
    fit(tmp_path, Waited(), callback)
    assert callback.report is not None
    assert callback.report.rows[0].idle_s == 0.125
