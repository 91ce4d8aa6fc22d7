"""``g2-report``: one page of one run, from hand-made logs that hold all, some or nothing of what it shows."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from lightning_g2.cli import report
from lightning_g2.cli.report.log import RunLog
from lightning_g2.cli.report.panel import panels

VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """Reads a page: its words, its pictures, what it would load; every element must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.pictures, self.sources, self.open = "", [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href") and not value.startswith("data:")]
        if tag == "img":
            self.pictures.append((dict(attrs)["alt"], base64.b64decode(dict(attrs)["src"].split(",")[1])))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.words += data


def _log(folder: Path, *, pushes: bool = True, decisions: bool = True) -> None:
    writer = SummaryWriter(str(folder))
    for step in range(10, 60, 10):
        writer.add_scalar("train_loss", 1.0 / step, step)
        if not pushes:
            continue
        for tag in ("openness", "staleness_max", "staleness_mean", "rank0/staleness_mean", "rank1/staleness_mean"):
            writer.add_scalar(f"g2/{tag}", 1.0 / step, step)
        writer.add_scalar("g2/rank0/samples_per_s", 40.0, step)
        if step > 20:
            writer.add_scalar("g2/rank1/samples_per_s", 10.0, step)
        writer.add_scalar("g2/friction/layer.<0>.weight", 1.5, step)
        writer.add_histogram("g2/friction", torch.linspace(0.0, 2.0, 101), step)
    if decisions:
        writer.add_scalar("g2/rounds", 3.0, 50)
        writer.add_text("g2/rounds", "rounds of 3 from version 40 on", 50)
    writer.add_scalar("val_loss", 0.5, 50)
    writer.close()


def _job(folder: Path) -> None:
    """A folder as g2-train leaves it."""
    _log(folder / "tensorboard")
    (folder / "tensorboard" / "hparams.yaml").write_text("width: 3\n")
    (folder / "job.yaml").write_text(
        "name: trial <1>\nstrategy:\n  gate: g2\n  gate_options: {beta: 8.0, eta: null}\n  rounds: auto\n"
    )
    facts = {"strategy": "g2async", "ranks": 2, "val_loss": 0.5, "wall_s": 4.0, "idle_fraction": 0.25, "samples": 1200}
    for rank in range(2):
        facts |= {f"rank{rank}_samples": 600 + rank, f"rank{rank}_staleness_mean": 1.25, f"rank{rank}_idle_s": None}
    (folder / "report.json").write_text(json.dumps(facts))


def test_one_page_and_one_picture_hold_all_of_a_run(tmp_path, capsys) -> None:
    _job(tmp_path / "job")
    assert report.main([str(tmp_path / "job"), "--png", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert [Path(line).name for line in capsys.readouterr().out.split()] == ["a.html", "a.png"]
    page = Page((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert page.sources == [], "nothing is loaded from anywhere"
    assert [name for name, _ in page.pictures] == [
        "Loss by wall time", "Openness", "Friction of pushes", "Friction by block", "Staleness by rank", "Goodput",
        "Rounds in force",
    ]  # fmt: skip
    assert all(picture.startswith(b"\x89PNG") for _, picture in page.pictures)
    for said in ("trial <1>", "beta=8.0", "rounds of 3 from version 40 on", "601", "1.25", "n/a", "300.0 /s", "25.0 %"):
        assert said in page.words, said
    assert "gate_options:" in page.words, "the configuration itself, g2-train's before Lightning's"
    assert "width: 3" not in page.words
    assert "Nothing that this page shows." in page.words


def test_the_page_says_what_a_log_lacks(tmp_path) -> None:
    _log(tmp_path / "log", pushes=False, decisions=False)
    assert (
        report.main([str(tmp_path / "log"), "--html", str(tmp_path / "b.html"), "--png", str(tmp_path / "c.png")]) == 0
    )
    page = Page((tmp_path / "b.html").read_text(encoding="utf-8"))
    assert [name for name, _ in page.pictures] == ["Loss by wall time"]
    for said in (
        "Openness: this log has no telemetry of pushes", "The table of ranks, wall time and idle time",
        "The run's configuration.", "does not say how pushes were routed", "None found beside the log",
    ):  # fmt: skip
        assert said in page.words, said
    assert (tmp_path / "c.png").stat().st_size > 10_000


def test_a_resumed_run_of_several_event_files_is_one_run(tmp_path) -> None:
    _log(tmp_path)
    _log(tmp_path)
    assert RunLog(tmp_path).curve("train_loss").steps


def test_curves_have_steps_seconds_and_values_and_ranks_their_order(tmp_path) -> None:
    writer = SummaryWriter(str(tmp_path))
    for rank in (10, 2, 0):
        writer.add_scalar(f"g2/rank{rank}/staleness_mean", float(rank), 7, walltime=None)
    writer.add_scalar("loss_step", 2.0, 1)
    writer.add_scalar("loss_epoch", 3.0, 1)
    writer.add_scalar("g2/rank0/loss", 3.0, 1)
    writer.close()
    run = RunLog(tmp_path)
    ranks = run.curves(r"g2/rank(\d+)/staleness_mean")
    assert list(ranks) == ["0", "2", "10"]
    assert (ranks["10"].steps, ranks["10"].values) == ([7], [10.0])
    assert ranks["10"].seconds[0] >= 0.0
    assert list(run.losses()) == ["loss_step"], "by step rather than by epoch, and none of the telemetry"
    assert [panel.title for panel in panels(run) if panel.draw is None] == [
        "Openness", "Friction of pushes", "Friction by block", "Goodput"
    ]  # fmt: skip


def test_quantiles_of_a_histogram_are_those_of_its_values(tmp_path) -> None:
    _log(tmp_path)
    steps, (low, median, high) = RunLog(tmp_path).quantiles("g2/friction")
    assert steps == [10, 20, 30, 40, 50]
    assert low[0] == pytest.approx(0.2, abs=0.1)
    assert median[0] == pytest.approx(1.0, abs=0.1)
    assert high[0] == pytest.approx(1.8, abs=0.1)


def test_a_folder_that_is_not_one_run_is_named(tmp_path, capsys) -> None:
    assert report.main([str(tmp_path)]) == 2
    assert "holds no event files, must hold those of exactly one run" in capsys.readouterr().err
    for name in ("a", "b"):
        _log(tmp_path / name)
    assert report.main([str(tmp_path)]) == 2
    assert "holds event files in 2 folders" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(tmp_path, capsys) -> None:
    _log(tmp_path / "log")
    assert report.main([str(tmp_path / "log"), "--png", str(tmp_path / "none" / "a.png")]) == 2
    assert "cannot be written (No such file or directory); name another file" in capsys.readouterr().err
