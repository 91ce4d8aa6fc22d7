import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_g2 import G2AsyncStrategy
from lightning_g2.strategy import G2AsyncOptions


def strategy_of(text: str, monkeypatch: pytest.MonkeyPatch) -> G2AsyncStrategy:
    words = [
        "train.py", f"--trainer.strategy={text}", "--trainer.accelerator=cpu", "--trainer.devices=1",
        "--trainer.logger=false", "--trainer.enable_checkpointing=false",
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", words)
    cli = LightningCLI(pl.LightningModule, run=False, save_config_callback=None, seed_everything_default=False)
    assert isinstance(cli.trainer.strategy, G2AsyncStrategy)
    return cli.trainer.strategy


def test_a_strategy_by_name_and_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    assert strategy_of("g2async_spawn", monkeypatch)._start_method == "spawn"
    given = {"gate": "g2", "gate_options": {"beta": 8.0}, "pull": "prefetch", "timeout_s": 30, "start_method": "fork"}
    strategy = strategy_of(json.dumps({"class_path": "lightning_g2.G2AsyncStrategy", "init_args": given}), monkeypatch)
    assert strategy.options == G2AsyncOptions(gate="g2", gate_options={"beta": 8.0}, pull="prefetch", timeout_s=30.0)
    assert strategy._start_method == "fork"


def test_a_project_run_by_the_command_line(run_job: Callable, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n"
        "  strategy: {class_path: lightning_g2.G2AsyncStrategy, init_args: {gate: none}}\n"
        "  devices: 2\n  accelerator: cpu\n  max_epochs: 1\n  logger: false\n  enable_checkpointing: false\n"
        f"model: {{folder: {tmp_path}}}\n"
    )
    job = run_job("lightning_cli.py", "fit", "--config", config)
    assert job.code == 0, job.output
    assert "gate none" in job.output
    assert all((tmp_path / f"rank{rank}.json").exists() for rank in range(2))
    assert job.left == ()


def test_the_signature_is_the_options() -> None:
    parameters = inspect.signature(G2AsyncStrategy).parameters
    hints, options = typing.get_type_hints(G2AsyncStrategy.__init__), typing.get_type_hints(G2AsyncOptions)
    names = [field.name for field in fields(G2AsyncOptions)]
    assert [*parameters] == [*names, "start_method", "ddp"]
    for field in fields(G2AsyncOptions):
        assert (parameters[field.name].default, hints[field.name]) == (field.default, options[field.name])
