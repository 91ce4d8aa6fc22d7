"""Two ranks of unequal data; BatchNorm, tied, frozen and unused parameters; a NaN batch; validation each epoch."""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

import lightning_g2  # noqa: F401 - registers the strategy

OUT = Path(sys.argv[1])


class Stream(IterableDataset):
    """Three batches an epoch on rank 0, seven on rank 1."""

    def __iter__(self):
        rank = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(rank)
        for _ in range((3, 7)[rank]):
            yield torch.randn(4, 6, generator=generator) + 5 * rank


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)
        self.encoder, self.decoder = torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6, bias=False)
        self.decoder.weight = self.encoder.weight
        self.frozen, self.unused = torch.nn.Linear(6, 6).requires_grad_(False), torch.nn.Linear(6, 6)

    def training_step(self, batch, batch_idx):
        loss = (self.decoder(self.encoder(self.norm(self.frozen(batch)))) - 1).square().mean()
        if self.global_rank == 1 and batch_idx == 2 and self.current_epoch == 0:
            loss = loss * float("nan")
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("v", self.norm(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class Totals(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        self.totals = trainer.strategy.totals()


if __name__ == "__main__":
    pl.seed_everything(3, verbose=False)
    net, totals = Net(), Totals()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=OUT / "checkpoints", monitor="v", save_top_k=-1, save_last=True)
    trainer = pl.Trainer(
        strategy="g2async", devices=2, accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False,
        callbacks=[totals, checkpoint], num_sanity_val_steps=1,
    )  # fmt: skip
    trainer.fit(net, DataLoader(Stream(), batch_size=None), DataLoader(torch.ones(8, 6), batch_size=4))
    saved = torch.load(OUT / "checkpoints" / "last.ckpt", weights_only=False) if trainer.is_global_zero else None
    after = net.state_dict()
    facts = {
        "state": {name: value.double().flatten().tolist() for name, value in after.items()},
        "tied": net.decoder.weight is net.encoder.weight
        and torch.equal(after["decoder.weight"], after["encoder.weight"]),
        "still": all(torch.equal(before[n], after[n]) for n in before if n.startswith(("frozen", "unused"))),
        "moved": not torch.equal(before["encoder.weight"], after["encoder.weight"]),
        "pushes": {rank: t.pushes for rank, t in totals.totals.items()},
        "rejected": {rank: t.rejected for rank, t in totals.totals.items()},
        "tracked": int(net.norm.num_batches_tracked),
        "saved": saved is None or all(torch.equal(saved["state_dict"][n], after[n]) for n in after),
        "v": float(trainer.callback_metrics["v"]),
    }
    Path(OUT, f"rank{trainer.global_rank}.json").write_text(json.dumps(facts))
    trainer.validate(net, DataLoader(torch.ones(8, 6), batch_size=4), verbose=False)
