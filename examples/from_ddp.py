"""The measured example of docs/from-ddp.md: digits by DDP, then by g2async with DDP's values and with converted ones.

Without arguments all runs of three seeds, one after another, and a table; needs scikit-learn for the data.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_g2.callbacks import G2MonitorCallback
from lightning_g2.tasks.digits import DigitsDataModule

RANKS, BATCH, EPOCHS, WARMUP_EPOCHS, DDP_LR, IMAGES = 2, 16, 20, 2, 0.1, 1438
RUNS = {"ddp": ("ddp", 1), "g2async, DDP's values": ("g2async", 1), "g2async, converted": ("g2async", RANKS)}
"""Strategy, and the factor N of the conversion: the learning rate is divided by it, step counts are multiplied."""


class Digits(pl.LightningModule):
    """A small network, SGD with momentum, a schedule that counts steps: linear warm-up, then half a cosine."""

    def __init__(self, lr: float, warmup_steps: int, total_steps: int) -> None:
        super().__init__()
        self.lr, self.warmup_steps, self.total_steps = lr, warmup_steps, total_steps
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.net.append(nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def factor(self, step: int) -> float:
        fall = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return min((step + 1) / self.warmup_steps, 0.5 * (1 + math.cos(math.pi * min(max(fall, 0.0), 1.0))))


def train(run: str, seed: int, epochs: int, ddp_lr: float) -> None:
    strategy, factor = RUNS[run]
    pl.seed_everything(seed, verbose=False)
    ddp_steps = math.ceil(IMAGES / (RANKS * BATCH))  # of one epoch
    model = Digits(ddp_lr / factor, WARMUP_EPOCHS * ddp_steps * factor, EPOCHS * ddp_steps * factor)
    monitor = G2MonitorCallback()
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=RANKS, max_epochs=epochs, check_val_every_n_epoch=epochs,
        callbacks=[monitor] if strategy == "g2async" else [], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, datamodule=DigitsDataModule(batch_size=BATCH))
    if trainer.is_global_zero:
        rejected = sum(t.rejected for t in monitor.summary.values())
        pushes = rejected + sum(t.pushes for t in monitor.summary.values())
        loss = float(trainer.callback_metrics["val_loss"])
        print(f"val_loss {loss:.4f}\n{json.dumps({'loss': loss, 'rejected': rejected / max(pushes, 1)})}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", choices=RUNS, help="one run only")
    parser.add_argument("--seed", type=int, default=1, help="its seed")
    parser.add_argument("--lr", type=float, default=DDP_LR, help="DDP's learning rate, of RANKS * BATCH samples a step")
    parser.add_argument("--smoke", action="store_true", help="seconds long: shows that it runs")
    args = parser.parse_args()
    if args.run or args.smoke:
        train(args.run or "g2async, converted", args.seed, 1 if args.smoke else EPOCHS, args.lr)
        return
    print(f"{'run':24}{'val_loss of seeds 1, 2, 3':28}{'mean':8}rejected pushes")
    for run in RUNS:
        facts = [run_alone(run, seed, args.lr) for seed in (1, 2, 3)]
        losses = [f["loss"] for f in facts]
        rejected = statistics.mean(f["rejected"] for f in facts)
        print(
            f"{run:24}{', '.join(f'{x:.4f}' for x in losses):28}{statistics.mean(losses):<8.4f}{rejected:.1%}",
            flush=True,
        )


def run_alone(run: str, seed: int, ddp_lr: float) -> dict[str, float]:
    """One run in a process of its own, since a process trains with one process group."""
    command = [sys.executable, __file__, "--run", run, "--seed", str(seed), "--lr", str(ddp_lr)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{run}, seed {seed}: ended with code {done.returncode}\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
