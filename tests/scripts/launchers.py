"""A job of two ranks, however they are started; each rank leaves a note of how it trained."""

import argparse
import json
import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2


class OwnSGD(torch.optim.SGD):
    """An optimizer that only this script knows."""


class Net(pl.LightningModule):
    def __init__(self, folder: str, case: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

    def _loss(self, batch):
        return (self(batch[0]) - 1).square().mean()

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 3:
            if self.hparams.case == "exception":
                raise ZeroDivisionError("boom at batch 3")
            if self.hparams.case == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        if self.hparams.case == "interrupt" and batch_idx == 3 and self.global_rank == 0:
            os.kill(int(os.environ["G2_TEST_MAIN"]), signal.SIGINT)
        return self._loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self._loss(batch), sync_dist=True)

    def on_train_end(self):
        strategy = self.trainer.strategy
        transport = "+".join(dict.fromkeys(strategy._session.transports(strategy.node_rank)))
        note = {"parent": os.getppid(), "ranks": strategy.world_size, "transport": transport}
        Path(self.hparams.folder, f"rank{self.global_rank}.json").write_text(json.dumps(note))

    def configure_optimizers(self):
        return OwnSGD(self.parameters(), lr=0.05)


def data() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)


def trainer(strategy: str = "g2async", **options) -> pl.Trainer:
    return pl.Trainer(
        **{
            "strategy": strategy, "devices": 2, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
            "enable_checkpointing": False, "enable_model_summary": False, "max_epochs": 2, **options,
        }
    )  # fmt: skip


def fit(folder: str, strategy: str = "g2async", *, fits: int = 1, **options) -> None:
    pl.seed_everything(0, verbose=False)
    net = Net(folder)
    with torch.no_grad():
        losses = [float((net(torch.randn(64, 4)) - 1).square().mean())]
    for _ in range(fits):
        before = net.layer.weight.detach().clone()
        run = trainer(strategy, **options)
        run.fit(net, data(), data())
        losses.append(float(run.callback_metrics["loss"]))
        assert not torch.equal(net.layer.weight, before), "the caller's module has the trained weights"
        assert run.state.finished
    assert losses == sorted(losses, reverse=True), losses


def fail(folder: str, strategy: str, case: str) -> None:
    os.environ["G2_TEST_MAIN"] = str(os.getpid())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
    saved = OnExceptionCheckpoint(folder, "exception")
    # Either rank comes to its fourth batch, however fast the other is.
    split = lightning_g2.G2AsyncStrategy(dispatch="static", start_method=strategy.removeprefix("g2async_"))
    run = trainer(split, callbacks=[saved], max_epochs=50, enable_checkpointing=True)
    run.fit(Net(folder, case), data(), data())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--strategy", default="g2async")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--fits", type=int, default=1)
    parser.add_argument("--case", default="")
    given = parser.parse_args()
    if given.case:
        fail(given.folder, given.strategy, given.case)
    else:
        fit(given.folder, given.strategy, fits=given.fits, devices=given.devices, num_nodes=given.nodes)
