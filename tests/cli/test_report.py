from __future__ import annotations

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from lightning_g2.cli import report


def _run(folder) -> None:
    writer = SummaryWriter(str(folder))
    for step in range(10, 60, 10):
        for tag in ("train_loss", "g2/openness", "g2/staleness_max", "g2/staleness_mean"):
            writer.add_scalar(tag, 1.0 / step, step)
        writer.add_histogram("g2/friction", torch.linspace(0.0, 2.0, 101), step)
    writer.add_scalar("val_loss", 0.5, 50)
    writer.close()


def test_the_picture_is_drawn(tmp_path, capsys) -> None:
    _run(tmp_path / "log")
    assert report.main([str(tmp_path / "log"), "--png", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "a.png" in capsys.readouterr().out


def test_quantiles_of_a_histogram_are_those_of_its_values(tmp_path) -> None:
    _run(tmp_path)
    steps, (low, median, high) = report.histogram_quantiles(report.read_events(tmp_path), "g2/friction")
    assert steps == [10, 20, 30, 40, 50]
    assert low[0] == pytest.approx(0.2, abs=0.1)
    assert median[0] == pytest.approx(1.0, abs=0.1)
    assert high[0] == pytest.approx(1.8, abs=0.1)


def test_a_folder_without_a_run_is_named(tmp_path, capsys) -> None:
    assert report.main([str(tmp_path)]) == 2
    assert "holds 0 event files, must hold exactly one" in capsys.readouterr().err
