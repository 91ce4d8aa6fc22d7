"""Step time of layer-wise pushes against whole ones: a GPT of 9.7 million parameters, one mode after another by step.

    OMP_NUM_THREADS=1 python tests/scripts/layerwise_step.py [ranks] [tokens a step] [rounds] [gate] [transport]

Prints, for each mode, the median step of rank 0 (forward, backward, push, weights), how long of it the rank waited for
the server, and the median over rounds of its ratio to whole pushes; a round is one step of each mode, so that a busy
machine disturbs all modes alike.
"""

import statistics
import sys
import time

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_g2 import G2AsyncStrategy
from lightning_g2.tasks.gpt import ByteGPT

GIVEN = [*sys.argv[1:], *["2", "512", "20", "none", "shm"][len(sys.argv) - 1 :]]
RANKS, TOKENS, ROUNDS, GATE, TRANSPORT = *map(int, GIVEN[:3]), *GIVEN[3:]
LENGTH, SKIPPED_ROUNDS = min(256, TOKENS), 3
BUCKETS = {"whole": None, "1 MiB": 2**20, "4 MiB": 4 * 2**20, "16 MiB": 16 * 2**20}


class Modes(pl.Callback):
    """Gives each step another mode, and takes its time."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {mode: [] for mode in BUCKETS}
        self.waited: dict[str, list[float]] = {mode: [] for mode in BUCKETS}

    def on_train_start(self, trainer: pl.Trainer, *_: object) -> None:
        training = trainer.strategy._training
        self.pushers = {}
        for mode, size in BUCKETS.items():
            self.pushers[mode] = pusher = training._layerwise_push(trainer.strategy.options, prefetch=False)
            pusher._bucket_bytes = size
        self.pushers["whole"] = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, index: int) -> None:
        self.mode = list(BUCKETS)[index % len(BUCKETS)]
        trainer.strategy._training._layerwise = self.pushers[self.mode]
        self.start, self.wait = time.perf_counter(), trainer.strategy.wait_s

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.seconds[self.mode].append(time.perf_counter() - self.start)
        self.waited[self.mode].append(trainer.strategy.wait_s - self.wait)


class GPT(ByteGPT):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


if __name__ == "__main__":
    modes = Modes()
    text = torch.randint(0, 256, (RANKS * (SKIPPED_ROUNDS + ROUNDS) * len(BUCKETS) * TOKENS // LENGTH, LENGTH + 1))
    trainer = pl.Trainer(
        strategy=G2AsyncStrategy(gate=GATE, push="layerwise", transport=TRANSPORT, pull="fresh", dispatch="static"),
        devices=RANKS, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[modes],
    )  # fmt: skip
    data = TensorDataset(text)
    loader = DataLoader(
        data, batch_size=TOKENS // LENGTH, collate_fn=lambda rows: torch.stack([row[0] for row in rows])
    )
    trainer.fit(GPT(width=512, layers=3, heads=8, block_size=LENGTH), loader)
    if trainer.is_global_zero:
        print(f"{RANKS} ranks, {TOKENS} tokens a step, gate {GATE}, {TRANSPORT}, medians of {ROUNDS} rounds")
        seconds = {mode: values[SKIPPED_ROUNDS:] for mode, values in modes.seconds.items()}
        for mode, values in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(values, seconds["whole"], strict=True))
            step, wait = statistics.median(values), statistics.median(modes.waited[mode][SKIPPED_ROUNDS:])
            print(f"{mode:8} step {1000 * step:7.1f} ms, waiting {1000 * wait:6.1f} ms, ratio {ratio:.3f}")
