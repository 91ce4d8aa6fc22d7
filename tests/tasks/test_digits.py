from __future__ import annotations

import sys

import pytest
import torch

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.digits import DigitsDataModule


def test_every_fifth_digit_is_held_out():
    data = DigitsDataModule(batch_size=100)
    images, classes = next(iter(data.val_dataloader()))
    assert images.shape == (359, 1, 8, 8)
    assert (float(images.min()), float(images.max())) == (-1.0, 1.0)
    assert classes.unique().tolist() == list(range(10))
    batches = list(data.train_dataloader())
    assert sum(len(labels) for _, labels in batches) == 1797 - 359
    assert batches[0][0].dtype == torch.float32
    held = {image.numpy().tobytes() for image in images}
    assert sum(image.numpy().tobytes() in held for batch, _ in batches for image in batch) == 0


def test_without_scikit_learn_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigurationError, match=r"scikit-learn, .* is not installed; run 'pip install scikit-learn'"):
        DigitsDataModule().setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"batch_size": 0}, r"batch_size=0: must be ≥ 1"), ({"num_workers": -1}, r"num_workers=-1: must be ≥ 0")],
)
def test_a_bad_option_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        DigitsDataModule(**options)
