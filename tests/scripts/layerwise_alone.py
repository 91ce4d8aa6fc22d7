"""One rank with layer-wise pushes against plain Lightning: weights, moments, schedule, bit for bit."""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from equality import same
from torch.utils.data import DataLoader, TensorDataset

from lightning_g2 import G2AsyncStrategy
from lightning_g2.strategy.client import RankClient

OUT = Path(sys.argv[1])
STEPS = 12
packets: list[tuple[int, int, bool]] = []


def noted_send(self, head, gradients, decision, **options):
    """Note which parameters go in each packet, and ruin the rank's own weights before the last one is answered."""
    packets.append((head.base, len(gradients), options.get("last", True)))
    original_send(self, head, gradients, decision, **options)
    if options.get("last", True):
        with torch.no_grad():
            for parameter in self.named_parameters().values():
                parameter.fill_(float("nan"))


original_send, RankClient.send = RankClient.send, noted_send


class Net(pl.LightningModule):
    """Tied weights, dropout, BatchNorm, a sparse embedding, layers that only some batches use, one that is frozen."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.sparse = torch.nn.Embedding(11, 8, sparse=optimizer == "sgd")
        self.first, self.norm = torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32)
        self.middle = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))
        self.tied = torch.nn.Linear(32, 32)
        self.tied.weight = self.middle[0].weight
        self.sometimes, self.frozen = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32).requires_grad_(False)
        self.last = torch.nn.Linear(32, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x + self.sparse(x[:, 0].abs().mul(10).long().clamp(max=10))
        x = torch.nn.functional.dropout(self.norm(self.first(x)).relu(), 0.1)
        for layer in self.middle:
            x = layer(x).relu()
        if batch_idx % 3 == 1:
            x = self.sometimes(x)
        return torch.nn.functional.mse_loss(self.last(self.frozen(self.tied(x))), y)

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(trained, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def run(optimizer: str, strategy: object, clip: float | None) -> tuple[dict, int]:
    pl.seed_everything(7, verbose=False)
    x = torch.randn(4 * STEPS, 8, generator=torch.Generator().manual_seed(0))
    trainer = pl.Trainer(
        strategy=strategy, devices=1, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=clip,
        gradient_clip_algorithm=None if clip is None else "value",
    )  # fmt: skip
    module = Net(optimizer)
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4))
    optimizer, schedule = trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler
    state = {"weights": module.state_dict(), "moments": optimizer.state_dict(), "schedule": schedule.state_dict()}
    return state, trainer.global_step


if __name__ == "__main__":
    facts = {}
    for optimizer, clip, pull in (("sgd", None, "fresh"), ("adamw", 0.01, "fresh")):
        plain, steps = run(optimizer, "auto", clip)
        packets.clear()
        layerwise = G2AsyncStrategy(push="layerwise", bucket_bytes=4500, pull=pull)
        ours, our_steps = run(optimizer, layerwise, clip)
        facts[optimizer] = {
            "unequal": [key for key in plain if not same(plain[key], ours[key])], "steps": [steps, our_steps],
            "learned": bool(torch.isfinite(ours["weights"]["last.weight"]).all()), "packets": list(packets),
        }  # fmt: skip
    (OUT / "facts.json").write_text(json.dumps(facts))
