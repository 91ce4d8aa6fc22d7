"""Many short fits of two ranks, the second mostly slower: what was trained on, when validation and the end came."""

import json
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from turns import wait_until

import lightning_g2

OUT = Path(sys.argv[1])


class Numbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset):
    """Rank r brings ``lengths[r]`` batches of ``sizes[r]`` samples."""

    def __init__(self, lengths: tuple[int, int], sizes: tuple[int, int] = (1, 1)) -> None:
        self.lengths, self.sizes = lengths, sizes

    def __iter__(self):
        rank = torch.distributed.get_rank()
        return iter(torch.full((self.sizes[rank], 1), 100.0 * rank + i) for i in range(self.lengths[rank]))


class Net(pl.LightningModule):
    """Remembers every sample; the loss moves the weight by exactly the learning rate.

    Args:
        awaits: a file, "{epoch}" for the epoch's number, without which rank 1 does not end a batch.
    """

    def __init__(self, *, loader, val=None, slow=0.03, awaits=None, schedule=None, manual=False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.loader, self.val, self.slow, self.awaits, self.schedule = loader, val, slow, awaits, schedule
        self.automatic_optimization = not manual
        self.seen: list[list[int]] = [[]]
        self.indices: list[int] = []
        self.validations: list[tuple[int, int]] = []  # (global_step, samples this rank has seen)
        self.rates: list[float] = []
        self.total = None

    def train_dataloader(self):
        return self.loader

    def val_dataloader(self):
        return DataLoader(Numbers(4)) if self.val else []

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.awaits is None:
            time.sleep(self.slow)
        elif self.global_rank == 1:
            wait_until((OUT / self.awaits.format(epoch=self.current_epoch)).exists)
        self.seen[-1] += [int(x) for x in batch.flatten()]
        self.indices.append(batch_idx)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.weight + 0)
                optimizer.step()
            return None
        return self.weight + 0

    def validation_step(self, batch, batch_idx):
        self.log("v", self.weight.detach(), sync_dist=True)

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.validations.append((self.trainer.global_step, sum(map(len, self.seen))))

    def on_train_epoch_end(self):
        self.seen.append([])

    def on_train_start(self):
        self.total = self.trainer.estimated_stepping_batches

    def configure_optimizers(self):
        sgd = torch.optim.SGD([self.weight], lr=1.0)
        if not self.automatic_optimization:
            self.other = torch.nn.Parameter(torch.zeros(()))
            return [sgd, torch.optim.SGD([self.other], lr=1.0)]
        if self.schedule is None:
            return sgd
        return {"optimizer": sgd, "lr_scheduler": self.schedule(sgd, self)}


class Totals(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        self.steps = sum(t.pushes for t in trainer.strategy.totals().values())
        self.sizes = [record.samples for record in trainer.strategy.drain()] if trainer.is_global_zero else None


class SaveWithinEpoch(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero and batch_idx == 5:
            trainer.save_checkpoint(OUT / "middle.ckpt")
            (OUT / "saved").touch()


class Lead(pl.Callback):
    """Tells when rank 0 has had twenty batches of an epoch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero and batch_idx == 19:
            (OUT / f"lead-{trainer.current_epoch}").touch()


def fit(name: str, net: Net, *, gate="none", ckpt=None, callbacks=(), options=None, **trainer_options) -> None:
    totals = Totals()
    strategy = lightning_g2.G2AsyncStrategy(gate=gate, **(options or {}))
    defaults = {
        "devices": 2, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_checkpointing": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "max_epochs": 1,
    }  # fmt: skip
    trainer = pl.Trainer(strategy=strategy, callbacks=[totals, *callbacks], **(defaults | trainer_options))
    trainer.fit(net, ckpt_path=ckpt)
    facts = {
        "seen": net.seen[:-1], "indices": net.indices, "validations": net.validations, "rates": net.rates,
        "global_step": trainer.global_step, "epoch": trainer.current_epoch, "total": net.total,
        "weight": float(net.weight), "applied": totals.steps, "batches": trainer.num_training_batches,
        "sizes": totals.sizes,
    }  # fmt: skip
    (OUT / f"{name}-{trainer.global_rank}.json").write_text(json.dumps(facts))


def resume(name: str) -> None:
    loader = DataLoader(Numbers(40), shuffle=True, num_workers=1)
    fit("interrupted", Net(loader=loader, awaits="saved"), callbacks=[SaveWithinEpoch()])
    fit(name, Net(loader=loader), ckpt=OUT / "middle.ckpt")


def by_step(make):
    return lambda optimizer, net: {"scheduler": make(optimizer, net), "interval": "step"}


if __name__ == "__main__":
    pl.seed_everything(7, verbose=False)
    lr_scheduler = torch.optim.lr_scheduler
    cases = {
        "shuffled": lambda n: fit(
            n, Net(loader=DataLoader(Numbers(50), batch_size=2, shuffle=True), awaits="lead-{epoch}"), max_epochs=3,
            callbacks=[Lead()],
        ),
        "workers": lambda n: fit(
            n, Net(loader=DataLoader(Numbers(40), shuffle=True, num_workers=2, prefetch_factor=4), val=True),
            max_epochs=2, val_check_interval=10,
        ),
        "accumulate": lambda n: fit(
            n, Net(loader=DataLoader(Numbers(20)), schedule=by_step(lambda o, _: lr_scheduler.StepLR(o, 1, 0.5))),
            accumulate_grad_batches=3, max_epochs=2,
        ),
        "validate": lambda n: fit(n, Net(loader=DataLoader(Numbers(20)), val=True), val_check_interval=0.25),
        "validate_over_epochs": lambda n: fit(
            n, Net(loader=DataLoader(Numbers(10)), val=True),
            val_check_interval=15, check_val_every_n_epoch=None, max_epochs=3,
        ),
        "limit": lambda n: fit(n, Net(loader=DataLoader(Numbers(40))), limit_train_batches=9),
        "limit_share": lambda n: fit(n, Net(loader=DataLoader(Numbers(40))), limit_train_batches=0.25),
        "overfit": lambda n: fit(n, Net(loader=DataLoader(Numbers(40), shuffle=True)), overfit_batches=6, max_epochs=2),
        "max_steps": lambda n: fit(n, Net(loader=DataLoader(Numbers(10))), max_steps=13, max_epochs=-1),
        "weighted": lambda n: fit(
            n, Net(loader=DataLoader(Numbers(10), sampler=WeightedRandomSampler([1.0] * 9 + [50.0], 24), batch_size=2)),
        ),
        "uneven": lambda n: fit(n, Net(loader=DataLoader(Stream((3, 7)), batch_size=None), val=True), max_epochs=2),
        "nothing": lambda n: fit(n, Net(loader=DataLoader(Stream((5, 0)), batch_size=None), val=True), max_epochs=2),
        "uneven_accumulate": lambda n: fit(
            n, Net(loader=DataLoader(Stream((3, 8)), batch_size=None)), accumulate_grad_batches=3
        ),
        "stream_limit": lambda n: fit(
            n, Net(loader=DataLoader(Stream((30, 30)), batch_size=None), val=True),
            limit_train_batches=11, val_check_interval=4,
        ),
        "endless": lambda n: fit(
            n, Net(loader=DataLoader(Stream((10**6, 10**6)), batch_size=None), val=True), max_steps=12,
            val_check_interval=4,
        ),
        "static": lambda n: fit(
            n, Net(loader=DataLoader(Numbers(30), shuffle=True), val=True), options={"dispatch": "static"},
            val_check_interval=20, max_epochs=2,
        ),
        "one_cycle": lambda n: fit(
            n, Net(loader=DataLoader(Numbers(20)), schedule=by_step(
                lambda o, net: lr_scheduler.OneCycleLR(o, 1.0, total_steps=net.trainer.estimated_stepping_batches)
            )), max_epochs=2,
        ),
        "gan": lambda n: fit(n, Net(loader=DataLoader(Numbers(30)), manual=True), max_steps=20, max_epochs=-1),
        "max_time": lambda n: fit(n, Net(loader=DataLoader(Numbers(10**6)), val=True), max_time="00:00:00:01"),
        "sizes": lambda n: fit(
            n, Net(loader=DataLoader(Stream((6, 6), (1, 3)), batch_size=None)), options={"weight_by_samples": True}
        ),
        "resumed": resume,
        "fewer_than_ranks": lambda n: fit(n, Net(loader=DataLoader(Numbers(1)), val=True), max_epochs=2),
    }  # fmt: skip
    for name, case in cases.items():
        if len(sys.argv) < 3 or name in sys.argv[2:]:
            case(name)
