from __future__ import annotations

import sys

import pytest
import torch

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.hugging_face import HuggingFaceByteLM


def test_without_transformers_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigurationError, match=r"transformers is not installed; run 'pip install transformers'"):
        HuggingFaceByteLM()


def test_its_loss_is_that_of_the_next_byte():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = HuggingFaceByteLM(width=16, layers=1, heads=2, block_size=8).eval()
    batch = torch.randint(256, (3, 9))
    logits = model(batch[:, :-1])
    assert logits.shape == (3, 8, 256)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    torch.testing.assert_close(model.loss(batch), expected)
