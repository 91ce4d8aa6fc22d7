from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.byte_text import ByteTextDataModule
from lightning_g2.tasks.gpt import ByteGPT


def small(**options) -> ByteGPT:
    return ByteGPT(**{"width": 16, "layers": 1, "heads": 2, "block_size": 8, **options})


def quiet_trainer(tmp_path, **options) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, num_sanity_val_steps=0, **options,
    )  # fmt: skip


def data() -> ByteTextDataModule:
    return ByteTextDataModule(block_size=8, batch_size=4, val_batches=2, max_bytes=300_000)


def test_the_default_has_about_a_million_parameters():
    assert sum(p.numel() for p in ByteGPT().parameters()) == pytest.approx(1_000_000, rel=0.05)


def test_a_prediction_does_not_see_later_bytes():
    torch.manual_seed(0)
    model = small()
    tokens = torch.randint(256, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_embedding_and_head_are_one_tensor():
    model = small()
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    assert [name for name, _ in model.named_parameters() if "embedding" in name or "head" in name] == [
        "byte_embedding.weight",
        "position_embedding.weight",
    ]
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_it_learns_and_the_rate_ends_at_zero(tmp_path, optimizer):
    pl.seed_everything(1, verbose=False)
    model = small(optimizer=optimizer, lr=1e-2 if optimizer == "adamw" else 0.5)
    trainer = quiet_trainer(tmp_path, max_steps=60, max_epochs=-1, val_check_interval=60)
    trainer.fit(model, datamodule=data())
    assert trainer.callback_metrics["val_loss"] < 5.0
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_the_rate_follows_the_time_limit(tmp_path):
    trainer = quiet_trainer(tmp_path, max_time={"seconds": 1}, max_epochs=-1)
    trainer.fit(small(), datamodule=data())
    assert trainer.optimizers[0].param_groups[0]["lr"] < 2e-3 * 0.05
    assert "val_loss" in trainer.callback_metrics


def test_a_cosine_without_an_end_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"schedule='cosine': needs an end"):
        quiet_trainer(tmp_path, max_epochs=-1).fit(small(), datamodule=data())


def test_norms_are_not_decayed():
    model = small(schedule="constant")
    decayed, plain = model.configure_optimizers().param_groups
    assert decayed["weight_decay"] == 0.1
    assert plain["weight_decay"] == 0.0
    assert {p.dim() for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, r"width=0: must be ≥ 1"),
        ({"width": 15}, r"width=15: must be a multiple of heads=2; try 14"),
        ({"lr": 0.0}, r"lr=0.0: must be > 0"),
        ({"lr": float("nan")}, r"lr=nan: must be > 0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\): must be two numbers"),
        ({"weight_decay": -1.0}, r"weight_decay=-1.0: must be ≥ 0"),
        ({"momentum": 1.0}, r"momentum=1.0: must be"),
        ({"warmup": 1.0}, r"warmup=1.0: must be"),
        ({"optimizer": "lion"}, r"optimizer='lion': must be"),
        ({"schedule": "linear"}, r"schedule='linear': must be"),
    ],
)
def test_a_bad_option_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        small(**options)
