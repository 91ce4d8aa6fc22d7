"""Checkpoints while two ranks push all-ones gradients, and resumes of them under other strategies.

AdamW with constant gradients and lr 1 moves every weight by one unit a version, so that a weight tells its version.
Batches are split beforehand: rank 0, which saves after so many steps of its own, has its half however slow it is.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2

MODE, OUT, RANK = sys.argv[1], Path(sys.argv[2]), int(os.environ.get("LOCAL_RANK", "0"))
PUSHES, SIZE = 40, 200_000


class Ones(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.zeros(SIZE))
        self.precise = torch.nn.Parameter(torch.zeros(7, dtype=torch.float64))
        self.tied = self.wide
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("steps", torch.zeros(1000))
        self.at_start = None

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self.wide.sum() + self.precise.sum()

    def configure_optimizers(self):
        groups = [{"params": [self.wide]}, {"params": [self.precise], "eps": 1e-9}]
        optimizer = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step * 1e-9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self):
        self.moments_here = len(self.trainer.optimizers[0].state)

    def on_train_batch_start(self, batch, batch_idx):
        if self.at_start is not None:
            return
        flag = OUT / f"{self.trainer.label}.seen"
        if self.global_rank == 0:
            optimizer = self.trainer.optimizers[0]
            self.at_start = {"lr": optimizer.param_groups[0]["lr"], "last_lr": self.lr_schedulers().get_last_lr()[0]}
            if hasattr(self.trainer.strategy, "options"):
                checkpoint = self.trainer._checkpoint_connector.dump_checkpoint()
                self.at_start |= {"state": checkpoint["state_dict"], "moments": checkpoint["optimizer_states"]}
            flag.touch()
        self.at_start = self.at_start or {}
        while not flag.exists():  # nobody pushes before rank 0 has looked
            time.sleep(0.01)


class Recorder(TorchCheckpointIO):
    """Keeps what it was given, and a copy of it, to see whether training goes on in what it was given."""

    def __init__(self) -> None:
        self.given, self.loads, self.saves = [], [], 0

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.saves += 1
        tensors = dict(flat(checkpoint))
        self.given.append((tensors, {name: t.clone() for name, t in tensors.items()}))
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path, map_location=lambda storage, place: storage, weights_only=None):
        checkpoint = super().load_checkpoint(path, map_location, weights_only)
        self.loads.append(sorted({str(t.device) for _, t in flat(checkpoint)}))
        return checkpoint

    def untouched(self):
        return all(torch.equal(t, copy[name]) for given, copy in self.given for name, t in given.items())


def flat(value, name=""):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(item, f"{name}.{key}")


def fit(label, io=None, *, resume=None, strategy=None, more_steps=None, callbacks=(), devices=2):
    """Train two epochs, or a number of steps on from a checkpoint, however many epochs that takes."""
    module, steps, epochs = Ones(), -1, 2
    if more_steps is not None:
        epochs = -1  # Lightning counts an epoch that `max_steps` has cut short as a whole one
        steps = more_steps + (torch.load(resume, weights_only=True)["global_step"] if resume else 0)
    trainer = pl.Trainer(
        strategy=strategy or lightning_g2.G2AsyncStrategy(gate="none", dispatch="static"),
        devices=devices, accelerator="cpu",
        plugins=[io] if io else None, logger=False, enable_progress_bar=False, enable_model_summary=False,
        max_epochs=epochs, max_steps=steps, callbacks=list(callbacks), enable_checkpointing=bool(callbacks),
    )  # fmt: skip
    trainer.label = label
    data = DataLoader(TensorDataset(torch.zeros(2 * PUSHES, 1)), batch_size=1)
    trainer.fit(module, data, ckpt_path=resume, weights_only=True if resume else None)
    return trainer, module


def same(a, b):
    a, b = dict(flat(a)), dict(flat(b))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def started_as(module, path):
    """Whether the server started from what the file holds, and where the schedule stood."""
    if RANK != 0:
        return None
    saved, start = torch.load(path, weights_only=True), module.at_start
    return {
        "weights": same(start["state"], saved["state_dict"]),
        "moments": same(start["moments"], saved["optimizer_states"]),
        "groups": start["moments"][0]["param_groups"] == saved["optimizer_states"][0]["param_groups"],
        "lr": start["lr"] == start["last_lr"] == saved["optimizer_states"][0]["param_groups"][0]["lr"],
    }  # fmt: skip


def two_ranks():
    plain = OUT / "plain.ckpt"
    if "LOCAL_RANK" not in os.environ:  # before there is another rank
        fit("auto", strategy="auto", devices=1, more_steps=10)[0].save_checkpoint(plain)

    facts, first_io, background_io = {}, Recorder(), Recorder()
    callbacks = [
        ModelCheckpoint(OUT / "steps", "{step}", every_n_train_steps=9, save_top_k=-1, save_last=True),
        ModelCheckpoint(OUT / "weights", "{step}", every_n_train_steps=25, save_top_k=-1, save_weights_only=True),
    ]
    first, _ = fit("first", first_io, callbacks=callbacks)
    first.save_checkpoint(OUT / "after.ckpt")
    facts |= {"saves": first_io.saves, "untouched": first_io.untouched()}

    files = sorted((OUT / "steps").glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    middle, io = files[len(files) // 4], Recorder()
    facts["middle"] = str(middle)
    callbacks = [ModelCheckpoint(OUT / "async", "{step}", every_n_train_steps=11, save_top_k=-1)]
    _, module = fit("resumed", AsyncCheckpointIO(background_io), resume=middle, more_steps=80, callbacks=callbacks)
    facts |= {"resumed": started_as(module, middle), "async_saves": background_io.saves}

    _, module = fit("plain", io, resume=plain, more_steps=4)
    facts |= {"from_plain": started_as(module, plain), "loads": io.loads, "moments_here": module.moments_here}

    trainer, module = fit("ddp", resume=middle, strategy="ddp", more_steps=3)
    facts["ddp"] = [float(trainer.optimizers[0].state[p]["step"]) for p in (module.wide, module.precise)]
    facts["ddp_weights"] = [module.wide.min().item(), module.wide.max().item()]
    trainer.save_checkpoint(OUT / "ddp.ckpt")
    _, module = fit("from_ddp", resume=OUT / "ddp.ckpt", more_steps=4)
    facts["from_ddp"] = started_as(module, OUT / "ddp.ckpt")
    Path(OUT, f"rank{RANK}.json").write_text(json.dumps(facts))


def one_rank():
    middle = json.loads((OUT / "rank0.json").read_text())["middle"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save = ModelCheckpoint(OUT / "one", every_n_train_steps=9, save_top_k=-1)  # as the one that saved
        auto, _ = fit("one-auto", resume=middle, strategy="auto", more_steps=12, devices=1, callbacks=[save])
    ours, module = fit("one-g2async", resume=middle, more_steps=12, devices=1)
    states = []
    for trainer, name in ((auto, "one-auto.ckpt"), (ours, "one-g2async.ckpt")):
        trainer.save_checkpoint(OUT / name)
        states.append(torch.load(OUT / name, weights_only=True))
    facts = {key: same(states[0][key], states[1][key]) for key in ("state_dict", "optimizer_states")}
    facts |= {key: states[0][key] == states[1][key] for key in ("lr_schedulers", "global_step", "loops")}
    facts |= {"started": started_as(module, middle), "warned": [str(w.message) for w in caught]}
    (OUT / "one.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    two_ranks() if MODE == "two" else one_rank()
