"""ResNet-18 on Fashion-MNIST: two CPU ranks that never wait for each other.

On Debian ``apt-get install dataset-fashion-mnist`` brings the data; ``--path`` names any folder with the IDX files.
"""

import argparse

import lightning.pytorch as pl

import lightning_g2  # noqa: F401  registers the strategy
from lightning_g2.tasks.fashion_mnist import DEFAULT_PATH, FashionMNISTDataModule
from lightning_g2.tasks.resnet import ResNet18


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", default=DEFAULT_PATH, help="folder with the IDX files")
    parser.add_argument("--slice", type=int, default=12_000, help="training images to use, of 60,000")
    parser.add_argument(
        "--width", type=int, default=16, help="channels of the first stage; 64 is the paper's ResNet-18"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--devices", type=int, default=2, help="ranks")
    parser.add_argument("--strategy", default="g2async", help="g2async, ddp")
    parser.add_argument("--smoke", action="store_true", help="seconds long: shows that it runs")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.smoke:
        args.slice, args.width, args.epochs = 128, 4, 1
    pl.seed_everything(1, verbose=False)
    model = ResNet18(width=args.width, lr=2e-3)
    data = FashionMNISTDataModule(path=args.path, train_samples=args.slice, val_samples=args.slice // 6)
    trainer = pl.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        figures = trainer.callback_metrics
        print(f"val_loss {figures['val_loss']:.4f}  val_acc {figures['val_acc']:.4f}")


if __name__ == "__main__":
    main()
