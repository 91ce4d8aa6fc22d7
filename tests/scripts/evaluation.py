"""Two ranks that log, monitor and look at different things: evaluation around two fits, one decision for both ranks."""

import copy
import json
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

import lightning_g2

OUT, RANK = Path(sys.argv[1]), int(os.environ.get("LOCAL_RANK", "0"))
MEAN = 7.5
"""Of all samples, 0 to 15; each rank sees half of them."""


class OnlyOnRank0(IterableDataset):
    def __iter__(self):
        yield from (torch.full((2, 1), float(i)) for i in range(2 if RANK == 0 else 0))


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = torch.nn.BatchNorm1d(1, momentum=0.5), torch.nn.Linear(1, 1)
        self.train_mean, self.val_mean = MeanMetric(), MeanMetric()
        self.gathered, self.copies = [], 0

    def setup(self, stage):
        if RANK == 1 and not hasattr(self, "extra"):
            self.extra = MeanMetric()

    def training_step(self, batch, batch_idx):
        x = batch[0]
        loss = self.layer(self.norm(torch.randn_like(x) + 10 * RANK)).square().mean()
        self.train_mean(x)
        if RANK == 0 and batch_idx in (1, 3):
            self.train_mean.compute()  # this rank alone: nobody to gather from, and no update follows the last one
        if batch_idx == 1:
            copy.deepcopy(self)
            self.copies += 1
        self.log("t_sync", x.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log("t_metric", self.train_mean, on_step=True, on_epoch=True)
        if RANK == 1:
            self.log("t_only1", 5.0 - self.current_epoch, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.log("e_sync", RANK + 1.0, sync_dist=True)
        if RANK == 0:
            self.log("e_only0", 2.0, sync_dist=True)

    def on_validation_start(self):
        self.in_validation = {name: buffer.clone() for name, buffer in self.norm.named_buffers()}

    def validation_step(self, batch, batch_idx):
        x = batch[0]
        self.val_mean(x)
        self.log("v_sync", x.mean(), sync_dist=True)
        self.log("v_max", x.max(), sync_dist=True, reduce_fx="max")
        self.log("v_metric", self.val_mean)
        self.log("v_own", float(RANK))
        self.log("v_plateau", float(RANK))
        if RANK == 0:
            self.log("v_only0", 1.0 + self.current_epoch, rank_zero_only=True)
            self.log("v_step0", x.mean(), on_step=True, on_epoch=True, sync_dist=True)
        else:
            self.log("v_only1", float(self.current_epoch), sync_dist=True)
            self.extra(x)
            self.log("v_extra", self.extra)

    def on_validation_epoch_end(self):
        self.gathered.append(self.all_gather(torch.tensor(float(RANK))).tolist())
        self.log("ve_sync", RANK + 1.0, sync_dist=True)
        if RANK == 0:
            dict(self.trainer.callback_metrics)  # a rank that looks does not wait for the other

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        x = batch[0] if dataloader_idx == 0 else batch
        self.log("x", x.mean(), sync_dist=True, batch_size=len(x))

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "v_plateau"}}


def make_trainer(max_epochs):
    callbacks = [
        EarlyStopping("e_only0", patience=9, check_on_train_epoch_end=True),
        EarlyStopping("v_only1", patience=2, check_on_train_epoch_end=False),
        ModelCheckpoint(monitor="v_only0", save_top_k=2, mode="max", filename="{epoch}-{v_only1:.2f}", save_last=True),
        ModelCheckpoint(monitor="t_only1", save_top_k=2, filename="t1-{epoch}"),
        ModelCheckpoint(monitor="t_sync_step", save_top_k=2, every_n_train_steps=2, filename="s-{step}-{t_sync_step}"),
    ]
    return pl.Trainer(
        strategy=lightning_g2.G2AsyncStrategy(dispatch="static"), devices=2, accelerator="cpu", logger=False,
        enable_progress_bar=RANK == 0,
        enable_model_summary=False, max_epochs=max_epochs, default_root_dir=OUT / f"root{RANK}", callbacks=callbacks,
    )  # fmt: skip


def numbers(metrics):
    return {name: float(value) for name, value in metrics.items()}


def monitors(trainer):
    return [
        [numbers(c.best_k_models), c.best_model_path, c.last_model_path]
        for c in trainer.callbacks
        if isinstance(c, ModelCheckpoint)
    ]


class Bad(Net):
    def __init__(self) -> None:
        super().__init__()
        self.eager = MeanMetric(dist_sync_on_step=True)


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    data = DataLoader(TensorDataset(torch.arange(16.0).unsqueeze(1)), batch_size=2)
    net, first, facts = Net(), make_trainer(6), {}
    facts["predictions"] = len(torch.cat(first.predict(net, data)))
    facts["before"] = first.validate(net, data, verbose=False)[0]
    first.fit(net, data, data)
    facts["metrics"], facts["epochs"] = numbers(first.callback_metrics), first.current_epoch
    facts["monitors"], facts["lr"] = monitors(first), first.optimizers[0].param_groups[0]["lr"]
    facts["buffers"] = {name: buffer.flatten().tolist() for name, buffer in net.norm.named_buffers()}
    facts["in_validation"] = {name: buffer.flatten().tolist() for name, buffer in net.in_validation.items()}
    facts["gathered"], facts["copies"] = net.gathered, net.copies
    facts["between"] = first.validate(net, data, verbose=False)[0]
    trained = net.layer.weight.item()
    net.layer.weight.data.zero_()
    facts["test"] = first.test(net, [data, DataLoader(OnlyOnRank0(), batch_size=None)], "best", verbose=False)
    facts["best_loaded"] = net.layer.weight.item() != 0.0

    second = make_trainer(first.current_epoch + 1)
    fresh = Net()
    second.fit(fresh, data, data, ckpt_path="last", weights_only=True)
    facts["resumed_epochs"], facts["last"] = second.current_epoch, str(second.ckpt_path)
    facts["step"] = second.global_step
    facts["second_monitors"] = monitors(second)
    facts["after"] = second.validate(fresh, data, ckpt_path="last", verbose=False)[0]
    weight = fresh.layer.weight.item()
    fresh.layer.weight.data.zero_()
    second.predict(fresh, data, ckpt_path=second.checkpoint_callback.last_model_path)
    facts["path_loaded"] = fresh.layer.weight.item() == weight
    facts["final_buffers"] = {name: buffer.flatten().tolist() for name, buffer in fresh.norm.named_buffers()}
    patched = {
        second._logger_connector: ("on_epoch_end", "update_eval_epoch_metrics"),
        second._checkpoint_connector: ("resume_start", "dump_checkpoint"),
    } | dict.fromkeys(second.callbacks, ("on_train_epoch_end",))
    facts["hooks_left"] = [name for owner, names in patched.items() for name in names if name in vars(owner)]
    facts["hooks_left"] += [*vars(second.test_loop._results).keys() & {"log", "metrics"}]
    facts["gathering"] = fresh.val_mean.distributed_available_fn.__module__
    Path(OUT, f"rank{RANK}.json").write_text(json.dumps(facts))
    try:
        make_trainer(1).fit(Bad(), data)
    except MisconfigurationException as error:
        Path(OUT, f"refused{RANK}").write_text(str(error))
