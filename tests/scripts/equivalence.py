"""One rank of g2async against plain Lightning: weights, optimizer state, schedule; straight and resumed.

Arguments: optimizer, folder, and the numbers of servers of the straight run, of the first half and of the second.
"""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2
from lightning_g2.strategy.client import RankClient

OPTIMIZER, OUT = sys.argv[1], Path(sys.argv[2])
STRAIGHT, FIRST, SECOND = map(int, sys.argv[3:6])
STEPS = 50
loads, versions = 0, []


def poisoned_load(self, weights):
    """Ruin the rank's own copy first, so that only weights that really arrive can make the results equal."""
    global loads
    loads += 1
    with torch.no_grad():
        for parameter in self.named_parameters().values():
            parameter.fill_(float("nan"))
    original_load(self, weights)


original_load, RankClient.load = RankClient.load, poisoned_load


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.ReLU(),
            torch.nn.Linear(16, 12), torch.nn.Linear(12, 1),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        if OPTIMIZER == "sgd":
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Version(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        if hasattr(trainer.strategy, "view"):
            versions.append(trainer.strategy.view().version)


def run(servers: int, steps: int, resume: Path | None = None) -> tuple[dict, Path]:
    pl.seed_everything(7, verbose=False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(640, 8, generator=generator)
    data = DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4, shuffle=resume is None and steps == STEPS
    )
    trainer = pl.Trainer(
        strategy=lightning_g2.G2AsyncStrategy(servers=servers) if servers else "auto",
        devices=1, accelerator="cpu", max_steps=steps, max_epochs=-1, accumulate_grad_batches=3,
        gradient_clip_val=0.5, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Version()],
    )  # fmt: skip
    trainer.fit(Net(), data, ckpt_path=resume, weights_only=False if resume else None)
    path = OUT / f"{servers}-{steps}-{resume is not None}.ckpt"
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=False), path


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


if __name__ == "__main__":
    facts = {}
    plain, _ = run(0, STEPS)
    ours, _ = run(STRAIGHT, STEPS)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "loops"):
        facts[key] = same(plain[key], ours[key])
    facts["learned"] = not torch.isnan(ours["state_dict"]["net.0.weight"]).any().item()
    half_plain, half_ours = run(0, 20)[1], run(FIRST, 20)[1]
    plain, ours = run(0, 40, half_plain)[0], run(SECOND, 40, half_ours)[0]
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        facts[f"resumed_{key}"] = same(plain[key], ours[key])
    facts |= {"loads": loads, "versions": versions}
    (OUT / "facts.json").write_text(json.dumps(facts))
