"""Every pair of data and model that goes together composes, is built, and trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from lightning_g2.cli import train

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [
    ("byte_text", "byte_gpt"), ("digits", "mlp"), ("digits", "resnet18"), ("fashion_mnist", "resnet18"),
    ("fashion_mnist", "mlp"), ("fashion_mnist", "conv_net"), ("wordnet", "gloss_lstm"),
]  # fmt: skip


def choices(group: str) -> set[str]:
    return {path.stem for path in (train.config_dir() / group).glob("*.yaml")}


def test_every_data_and_every_model_is_in_a_pair():
    assert choices("data") == {data for data, _ in PAIRS}
    assert choices("model") == {model for _, model in PAIRS}


@pytest.mark.parametrize(("data", "model"), PAIRS, ids=lambda pair: pair)
def test_a_pair_is_built_with_the_classes_own_defaults_named(data, model):
    with initialize_config_dir(str(train.config_dir()), version_base="1.3"):
        cfg = compose("config", overrides=["output_dir=/o", "strategy_name=x", f"data={data}", f"model={model}"])
    job = train.resolve(cfg)
    module, datamodule = train.build(job["model"]), train.build(job["data"])
    assert type(datamodule).__module__ == f"lightning_g2.tasks.{data}"
    left_out = set(module.hparams) - set(job["model"])
    assert left_out == set(), "every argument of the model has its line in the configuration"


@pytest.mark.timeout(300)
def test_images_train_by_epochs(tmp_path, fashion_mnist_folder):
    done = subprocess.run(
        [
            sys.executable, "-m", "lightning_g2.cli.train", "data=fashion_mnist", "model=resnet18", "model.width=4",
            f"data.path={fashion_mnist_folder}", "data.batch_size=16", "straggler=null", "trainer.max_time=null",
            "trainer.max_epochs=2", "hydra.run.dir=out",
        ],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    assert facts["samples"] + 16 * (facts["rank0_rejected"] + facts["rank1_rejected"]) == 2 * 160
    assert 0.0 < facts["val_loss"] < 10.0
