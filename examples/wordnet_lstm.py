"""An LSTM reads a gloss of WordNet and names the lexicographer's class, one of 45, on two CPU ranks.

On Debian ``apt-get install wordnet-base`` brings the data; ``--path`` names any folder with WordNet's data files.
"""

import argparse

import lightning.pytorch as pl

import lightning_g2  # noqa: F401  registers the strategy
from lightning_g2.tasks.gloss_lstm import GlossLSTM
from lightning_g2.tasks.wordnet import DEFAULT_PATH, WordNetDataModule


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", default=DEFAULT_PATH, help="folder with WordNet's data files")
    parser.add_argument("--slice", type=int, default=None, help="glosses to use; by default all 117,659")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2, help="ranks")
    parser.add_argument("--strategy", default="g2async", help="g2async, ddp")
    parser.add_argument("--smoke", action="store_true", help="seconds long: shows that it runs")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.smoke:
        args.slice, args.epochs = 400, 1
    pl.seed_everything(1, verbose=False)
    data = WordNetDataModule(path=args.path, max_glosses=args.slice)
    model = GlossLSTM(vocabulary=data.vocabulary, lr=4e-3)
    trainer = pl.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        figures = trainer.callback_metrics
        print(f"val_loss {figures['val_loss']:.4f}  val_acc {figures['val_acc']:.4f}")


if __name__ == "__main__":
    main()
