from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.byte_text import ByteTextDataModule
from lightning_g2.tasks.gpt import ByteGPT
from lightning_g2.tasks.lora import LoRALinear, add_adapters


def gpt(**options) -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(**{"width": 16, "layers": 2, "heads": 2, "block_size": 8, **options})


def test_fresh_adapters_change_nothing():
    model, tokens = gpt(), torch.randint(256, (2, 8))
    before = model(tokens)
    assert add_adapters(model, names={"qkv"}) == ["blocks.0.qkv", "blocks.1.qkv"]
    assert torch.equal(model(tokens), before)


def test_an_adapter_adds_its_scaled_product():
    layer = LoRALinear(torch.nn.Linear(3, 5), rank=2, alpha=8.0)
    layer.up.data.normal_()
    x = torch.randn(4, 3)
    weight = layer.base.weight + 4.0 * layer.up @ layer.down
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, layer.base.bias))


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_only_adapters_are_trained(tmp_path):
    model = gpt(schedule="constant", lr=1e-2)
    add_adapters(model, names={"qkv", "attention_out"}, rank=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, num_sanity_val_steps=0, max_steps=3,
    )  # fmt: skip
    data = ByteTextDataModule(block_size=8, batch_size=4, val_batches=2, max_bytes=300_000)
    trainer.fit(model, datamodule=data)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    adapters = {
        f"blocks.{block}.{layer}.{part}"
        for block in range(2) for layer in ("qkv", "attention_out") for part in ("up", "down")
    }  # fmt: skip
    assert changed == adapters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"rank=0: must be ≥ 1"),
        ({"alpha": 0.0}, r"alpha=0.0: must be > 0"),
        (
            {"names": {"q"}},
            r"names=\['q'\]: no linear layer is called so; there are attention_out, mlp_in, mlp_out, qkv",
        ),
    ],
)
def test_a_bad_option_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        add_adapters(gpt(), **{"names": {"qkv"}, **options})
