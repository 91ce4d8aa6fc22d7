"""A project that is run by LightningCLI."""

import lightning.pytorch as pl
from launchers import Net, data
from lightning.pytorch.cli import LightningCLI

import lightning_g2  # noqa: F401 - registers the strategies


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return data()

    def val_dataloader(self):
        return data()


if __name__ == "__main__":
    LightningCLI(Net, Data, save_config_callback=None)
