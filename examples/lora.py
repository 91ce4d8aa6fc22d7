"""Train a small language model on Python sources, then adapt it to English with LoRA, on two CPU ranks.

Only the adapters are trained in the second part, so only they travel between ranks and server. ``--hf`` takes a Llama
of Hugging Face's transformers, built from a configuration, instead of the package's own GPT.
"""

import argparse
import pydoc_data.topics

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only

import lightning_g2  # noqa: F401  registers the strategy
from lightning_g2.tasks.byte_text import ByteTextDataModule
from lightning_g2.tasks.gpt import ByteGPT
from lightning_g2.tasks.hugging_face import HuggingFaceByteLM
from lightning_g2.tasks.lora import add_adapters


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="steps of each part")
    parser.add_argument("--rank", type=int, default=8, help="inner extent of the adapters")
    parser.add_argument("--hf", action="store_true", help="a model of transformers")
    parser.add_argument("--strategy", default="g2async", help="g2async, ddp")
    parser.add_argument("--smoke", action="store_true", help="seconds long: shows that it runs")
    return parser.parse_args()


def fit(model: pl.LightningModule, data: ByteTextDataModule, args: argparse.Namespace) -> float:
    """Train, and return the last validation loss, nats a byte."""
    trainer = pl.Trainer(
        strategy=args.strategy, accelerator="cpu", devices=2, max_steps=args.steps, val_check_interval=args.steps,
        gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    return float(trainer.callback_metrics["val_loss"])


def main() -> None:
    args = arguments()
    if args.smoke:
        args.steps = 8
    pl.seed_everything(1, verbose=False)
    sizes = {"width": 32, "layers": 1} if args.smoke else {"width": 128, "layers": 2}
    model = (HuggingFaceByteLM if args.hf else ByteGPT)(**sizes, lr=3e-3)
    sources = ByteTextDataModule(batch_size=24, val_batches=16, max_bytes=4_000_000)  # ends long before pydoc_data
    english = ByteTextDataModule(path=pydoc_data.topics.__file__, batch_size=24, val_batches=16, val_fraction=0.1)
    say = rank_zero_only(print)
    say(f"val_loss {fit(model, sources, args):.4f} nats a byte of Python sources")

    add_adapters(model, names={"qkv", "attention_out", "q_proj", "v_proj"}, rank=args.rank)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = trained / sum(p.numel() for p in model.parameters())
    say(f"val_loss {fit(model, english, args):.4f} nats a byte of English, {share:.1%} of the parameters trained")


if __name__ == "__main__":
    main()
