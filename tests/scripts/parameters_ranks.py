"""Two ranks: NaN, empty and skipped batches on one of them, groups added at different times, lazy and sparse layers."""

import json
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, IterableDataset

import lightning_g2

OUT = Path(sys.argv[1])
EPOCHS = 3


class Batches(IterableDataset):
    """Six batches an epoch; rank 1's are also empty, NaN, skipped, or touch no parameter."""

    def __iter__(self):
        rank = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(rank)
        for index in range(6):
            x = torch.randn(4, 6, generator=generator)
            if rank == 1:
                x = x[:0] if index == 1 else x * float("nan") if index == 3 else x
            yield x, torch.arange(4) + 2 * rank


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)
        self.lazy, self.words = torch.nn.LazyLinear(3), torch.nn.Embedding(20, 3, sparse=True)
        self.head, self.grown = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        self.finite = True

    def training_step(self, batch, batch_idx):
        x, words = batch
        self.finite &= all(p.isfinite().all().item() for p in self.first.parameters())
        if self.global_rank == 1 and batch_idx == 4:
            return None
        if self.global_rank == 1 and batch_idx == 5:
            return torch.zeros((), requires_grad=True)
        x = self.lazy(self.norm(self.first(x))) + self.words(words[: len(x)])
        return (self.head(x) + self.grown(x) - 1).square().mean()

    def on_train_batch_start(self, batch, batch_idx):
        optimizer = self.trainer.optimizers[0]
        # Rank 1 adds the group two batches later than rank 0.
        if self.current_epoch == 1 and batch_idx == 1 + 2 * self.global_rank:
            optimizer.add_param_group({"params": list(self.grown.parameters()), "lr": 0.05})

    def configure_optimizers(self):
        kept = [p for n, p in self.named_parameters() if not n.startswith("grown")]
        return torch.optim.SGD(kept, lr=0.02)


class Totals(pl.Callback):
    totals = None

    def on_train_end(self, trainer, pl_module):
        self.totals = trainer.strategy.totals()

    def on_exception(self, trainer, pl_module, exception):
        facts = {"error": type(exception).__name__, "message": str(exception)}
        Path(OUT, f"stop{trainer.global_rank}.json").write_text(json.dumps(facts))


def fit(**options):
    pl.seed_everything(3, verbose=False)
    net, totals = Net(), Totals()
    before = {name: p.detach().clone() for name, p in net.named_parameters() if not name.startswith("lazy")}
    trainer = pl.Trainer(
        strategy=lightning_g2.G2AsyncStrategy(**options), devices=2, accelerator="cpu", max_epochs=EPOCHS,
        log_every_n_steps=1, logger=TensorBoardLogger(OUT), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[totals],
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(net, DataLoader(Batches(), batch_size=None))
        warned = [str(w.message) for w in seen if "is empty" in str(w.message)]
    path = OUT / "ranks.ckpt"
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    saved = torch.load(path, weights_only=True)
    return {
        "state": {name: value.double().flatten().tolist() for name, value in net.state_dict().items()},
        "finite": net.finite and all(v.isfinite().all().item() for v in net.state_dict().values()),
        "rejected": {rank: t.rejected for rank, t in totals.totals.items()},
        "pushes": {rank: t.pushes for rank, t in totals.totals.items()},
        "untouched_rows": torch.equal(before["words.weight"][6:], net.words.weight[6:]),
        "grown_moved": not torch.equal(before["grown.weight"], net.grown.weight),
        "saved_groups": len(saved["optimizer_states"][0]["param_groups"]),
        "saved": all(torch.equal(saved["state_dict"][n], v) for n, v in net.state_dict().items()),
        "empty_warning": len(warned),
    }, trainer  # fmt: skip


if __name__ == "__main__":
    facts = {}
    facts["none"], _ = fit(gate="none", transport="rpc")
    facts["g2"], trainer = fit(gate="g2", pull="prefetch")
    Path(OUT, f"rank{trainer.global_rank}.json").write_text(json.dumps(facts))
    fit(gate="none", on_nonfinite="stop")
