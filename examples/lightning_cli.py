"""A plain LightningCLI: ``python examples/lightning_cli.py fit --trainer.max_epochs 5 --model.lr 1e-3``.

Every argument of model, data and Trainer is an option, ``--config file.yaml`` reads them from a file, and ``--help``
lists them. Needs ``pip install 'jsonargparse[signatures]' scikit-learn``.
"""

from lightning.pytorch.cli import LightningCLI

import lightning_g2  # noqa: F401  registers the strategy, so that --trainer.strategy knows its name
from lightning_g2.tasks.digits import DigitsDataModule
from lightning_g2.tasks.resnet import ResNet18


def main() -> None:
    defaults = {
        "strategy": "g2async", "accelerator": "cpu", "devices": 2, "max_epochs": 3,
        "logger": False, "enable_checkpointing": False,
    }  # fmt: skip
    cli = LightningCLI(
        ResNet18, DigitsDataModule, trainer_defaults=defaults, seed_everything_default=1, save_config_callback=None
    )
    if cli.trainer.is_global_zero and "val_loss" in cli.trainer.callback_metrics:
        print(f"val_loss {cli.trainer.callback_metrics['val_loss']:.4f}")


if __name__ == "__main__":
    main()
