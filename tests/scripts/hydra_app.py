"""A user's own Hydra app that trains on two ranks; each rank notes what it was told."""

import json
import os
from pathlib import Path

import hydra
import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd, instantiate
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self, cfg: DictConfig) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.cfg.lr)


@hydra.main(version_base="1.3", config_path=None, config_name=None)
def main(cfg: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    folder = hydra_config.runtime.output_dir
    trainer = pl.Trainer(
        strategy=instantiate(OmegaConf.create({"_target_": "lightning_g2.G2AsyncStrategy", "gate": "none"})),
        devices=2, accelerator="cpu", max_epochs=1, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, logger=CSVLogger(cfg.where, name="", version=""),
    )  # fmt: skip
    trainer.fit(Net(cfg), DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=4))
    note = {
        "cfg": OmegaConf.to_container(cfg, resolve=True), "raw": OmegaConf.to_container(cfg)["follows"],
        "cwd": os.getcwd(), "called_from": get_original_cwd(), "job": hydra_config.job.name, "folder": folder,
        "ranks": trainer.world_size,
    }  # fmt: skip
    out = Path(folder, f"rank{trainer.global_rank}.json")
    assert not out.exists(), "each rank runs each job once"
    out.write_text(json.dumps(note))


if __name__ == "__main__":
    main()
