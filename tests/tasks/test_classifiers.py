"""The two classifiers, ResNet-18 and the gloss LSTM."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.conv_net import ConvNet
from lightning_g2.tasks.fashion_mnist import FashionMNISTDataModule
from lightning_g2.tasks.gloss_lstm import GlossLSTM
from lightning_g2.tasks.resnet import ResNet18
from lightning_g2.tasks.wordnet import WordNetDataModule

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


def fitted(tmp_path, model: pl.LightningModule, data: pl.LightningDataModule, epochs: int) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, num_sanity_val_steps=0, max_epochs=epochs,
        log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    return trainer


def test_resnet_18_has_the_parameters_of_the_paper():
    parameters = sum(p.numel() for p in ResNet18(channels=3, classes=1000).parameters())
    stem = 64 * 3 * (7 * 7 - 3 * 3)  # the paper's stem is 7x7
    assert parameters + stem == 11_689_512
    convolutions = [
        m for m in ResNet18(width=4).modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size != (1, 1)
    ]
    assert len(convolutions) + 1 == 18, "with the linear layer"


@pytest.mark.parametrize("size", [8, 28, 32])
def test_resnet_takes_small_images_of_any_size(size):
    assert ResNet18(width=4)(torch.zeros(2, 1, size, size)).shape == (2, 10)


def test_resnet_learns(tmp_path, fashion_mnist_folder):
    pl.seed_everything(1, verbose=False)
    data = FashionMNISTDataModule(path=str(fashion_mnist_folder), batch_size=16)
    trainer = fitted(tmp_path, ResNet18(width=4, lr=1e-2), data, epochs=4)
    assert trainer.callback_metrics["val_loss"] < 1.0  # log 10 = 2.3 by chance
    assert trainer.callback_metrics["val_acc"] > 0.8
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("size", [1, 8, 28])
def test_the_conv_net_takes_images_of_its_size(size):
    assert ConvNet(width=4, size=size)(torch.zeros(2, 1, size, size)).shape == (2, 10)


def test_the_conv_net_learns(tmp_path, fashion_mnist_folder):
    pl.seed_everything(1, verbose=False)
    data = FashionMNISTDataModule(path=str(fashion_mnist_folder), batch_size=16)
    trainer = fitted(tmp_path, ConvNet(width=8, lr=1e-2), data, epochs=4)
    assert trainer.callback_metrics["val_loss"] < 1.0  # log 10 = 2.3 by chance
    assert trainer.callback_metrics["val_acc"] > 0.8


def test_the_lstm_learns(tmp_path, wordnet_folder):
    pl.seed_everything(1, verbose=False)
    data = WordNetDataModule(path=str(wordnet_folder), val_fraction=0.1, batch_size=16)
    model = GlossLSTM(vocabulary=data.vocabulary, hidden=16, embedding=16, dropout=0.0, lr=3e-2)
    trainer = fitted(tmp_path, model, data, epochs=6)
    assert trainer.callback_metrics["val_loss"] < 1.0  # log 45 = 3.8 by chance
    assert trainer.callback_metrics["val_acc"] > 0.8


def test_the_lstm_does_not_see_how_far_a_gloss_is_padded():
    torch.manual_seed(0)
    model = GlossLSTM(vocabulary=50, hidden=8, embedding=8).eval()
    words = torch.randint(2, 50, (3, 5))
    padded = torch.nn.functional.pad(words, (0, 4))
    torch.testing.assert_close(model(padded), model(words))


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (ResNet18, {"width": 0}, r"width=0: must be ≥ 1"),
        (ConvNet, {"size": 0}, r"size=0: must be ≥ 1"),
        (ResNet18, {"lr": 0.0}, r"lr=0.0: must be > 0"),
        (ResNet18, {"classes": 0}, r"classes=0: must be ≥ 1"),
        (GlossLSTM, {"hidden": 0}, r"hidden=0: must be ≥ 1"),
        (GlossLSTM, {"dropout": 1.0}, r"dropout=1.0: must be ≥ 0 and < 1"),
        (GlossLSTM, {"schedule": "linear"}, r"schedule='linear': must be"),
    ],
)
def test_a_bad_option_is_refused(build, options, message):
    with pytest.raises(ConfigurationError, match=message):
        build(**options)
