"""A job that loses ranks, each in its own way, and ends well. The first argument says which:

silent: of four ranks, rank 2 is frozen in its first step, and woken once the job has gone on without it; rank 1 is
killed in a collective of the second epoch's validation.
gone: of three ranks, rank 2 is killed in its first step, and rank 1 is told to end there and leaves.

Marks in the working directory, not clocks, say what comes after what.
"""

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import lightning_g2

CASE = sys.argv[1]
RANKS = {"silent": 4, "gone": 3}[CASE]
BATCHES, EPOCHS = 24, 3
LIMIT_S = 120.0


def mark(name: str, text: str = "") -> None:
    Path(f"{name}.{os.getpid()}").write_text(text)
    os.replace(f"{name}.{os.getpid()}", f"{name}.mark")


def await_mark(name: str) -> str:
    deadline = time.monotonic() + LIMIT_S
    while not Path(f"{name}.mark").exists():
        assert time.monotonic() < deadline, f"{name} did not happen"
        time.sleep(0.01)
    return Path(f"{name}.mark").read_text()


class Numbers(Dataset):
    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.begun = False
        self.met: list[tuple[int, int, int]] = []
        self.tested: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if not self.begun:
            self.begun = True
            self.begin(self.global_rank)
        return self.layer(batch / BATCHES).square().mean()

    def begin(self, rank: int) -> None:
        """In its first step each rank waits until all have a batch, so that those that are lost have one to lose."""
        mark(f"begun-{rank}", str(os.getpid()))
        for other in range(RANKS):
            await_mark(f"begun-{other}")
        if (CASE, rank) == ("silent", 2):
            os.kill(os.getpid(), signal.SIGSTOP)
        if (CASE, rank) == ("gone", 2):
            os.kill(os.getpid(), signal.SIGKILL)
        if (CASE, rank) == ("gone", 1):
            os.kill(os.getpid(), signal.SIGTERM)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("v", self.layer(batch).square().mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if CASE == "silent" and self.current_epoch == 1:
            if self.global_rank == 1:
                for other in (0, 3):
                    await_mark(f"in-collective-{other}")
                os.kill(os.getpid(), signal.SIGKILL)
            mark(f"in-collective-{self.global_rank}")
        total = torch.ones(())
        dist.all_reduce(total)
        self.met.append((self.current_epoch, int(total), dist.get_world_size()))

    def on_train_epoch_end(self) -> None:
        if CASE == "silent" and self.global_rank == 0 and self.current_epoch == 0:
            os.kill(int(await_mark("begun-2")), signal.SIGCONT)
            await_mark("ended-2")

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.tested.append(int(batch.item()))
        self.log("t", batch.mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Tell(pl.Callback):
    def on_exception(self, trainer: pl.Trainer, module: Net, exception: BaseException) -> None:
        mark(f"ended-{trainer.global_rank}", f"{type(exception).__name__}: {exception}")


def main(*options: str) -> None:
    strategy = lightning_g2.G2AsyncStrategy(on_sigterm="leave", **dict(option.split("=") for option in options))
    trainer = pl.Trainer(
        strategy=strategy, devices=RANKS, accelerator="cpu", max_epochs=EPOCHS, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Tell()],
        logger=pl.loggers.CSVLogger(".", name="log", version="0"),
    )  # fmt: skip
    model, data = Net(), DataLoader(Numbers(), batch_size=1, shuffle=True)
    trainer.fit(model, data, DataLoader(Numbers(), batch_size=1))
    epochs = [asdict(record) | {"exact": record.exact} for record in strategy.epochs]
    mean = trainer.test(model, DataLoader(Numbers(), batch_size=1), verbose=False)[0]["t"]
    report = {"met": model.met, "steps": trainer.global_step, "epochs": epochs, "tested": model.tested, "mean": mean}
    mark(f"report-{trainer.global_rank}", json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[2:])
