"""A GAN that draws 8x8 digits: manual optimization, two optimizers, two CPU ranks. Needs scikit-learn for the data."""

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import lightning_g2  # noqa: F401  registers the strategy
from lightning_g2.tasks.digits import DigitsDataModule


def layers(inputs: int, outputs: int, width: int = 128) -> nn.Sequential:
    hidden = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def energy_distance(x: Tensor, y: Tensor) -> Tensor:
    """Distance between two sets of points, shapes (n, features) and (m, features); 0 where they are spread alike."""
    return 2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean()


class GAN(pl.LightningModule):
    """Generator and discriminator with the non-saturating loss."""

    def __init__(self, noise: int = 32, lr: float = 1e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.noise, self.lr = noise, lr
        self.generator = nn.Sequential(layers(noise, 64), nn.Tanh())
        self.discriminator = layers(64, 1)

    def draw(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, self.noise, device=self.device))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images = batch[0].flatten(1)
        of_generator, of_discriminator = self.optimizers()

        self.toggle_optimizer(of_discriminator)
        drawn = self.draw(len(images)).detach()
        of_discriminator.zero_grad()
        self.manual_backward(softplus(-self.discriminator(images)).mean() + softplus(self.discriminator(drawn)).mean())
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)

        self.toggle_optimizer(of_generator)
        of_generator.zero_grad()
        self.manual_backward(softplus(-self.discriminator(self.draw(len(images)))).mean())
        of_generator.step()
        self.untoggle_optimizer(of_generator)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images = batch[0].flatten(1)
        self.log("val_loss", energy_distance(images, self.draw(len(images))), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        nets = (self.generator, self.discriminator)
        return tuple(torch.optim.Adam(net.parameters(), lr=self.lr, betas=(0.5, 0.99)) for net in nets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--strategy", default="g2async", help="g2async, ddp_find_unused_parameters_true")
    parser.add_argument("--smoke", action="store_true", help="seconds long: shows that it runs")
    args = parser.parse_args()
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy=args.strategy, accelerator="cpu", devices=2, max_epochs=1 if args.smoke else args.epochs,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(GAN(), datamodule=DigitsDataModule())
    if trainer.is_global_zero:
        print(f"val_loss {trainer.callback_metrics['val_loss']:.4f} (energy distance of drawn and held-out digits)")


if __name__ == "__main__":
    main()
