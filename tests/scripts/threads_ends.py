"""Fits with forward and backward threads that end early: whose error it is, and which threads are left."""

import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_g2 import G2AsyncStrategy

OUT, RANKS, CASES = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")


class InjectedError(RuntimeError):
    pass


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise InjectedError("injected in backward")


class Net(pl.LightningModule):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.layers = case, torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))

    def training_step(self, batch, batch_idx):
        y = self.layers[1](self.layers[0](batch))
        if batch_idx == 6 and self.global_rank == RANKS - 1:
            if self.case == "forward":
                raise InjectedError("injected in forward")
            if self.case == "backward":
                y = FailsBackward.apply(y)
            if self.case in ("SIGINT", "SIGTERM"):
                os.kill(os.getpid(), getattr(signal, self.case))
        return y.square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.case == "hook" and batch_idx == 6:
            raise InjectedError("injected in a hook")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(case: str) -> None:
    servers = {"servers": 0} if RANKS == 1 else {"dispatch": "static"}
    trainer = pl.Trainer(
        strategy=G2AsyncStrategy(forward_threads=2, backward_threads=2, **servers), devices=RANKS, accelerator="cpu",
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(case), DataLoader(torch.ones(100 * RANKS, 2), batch_size=1))
    assert trainer.global_step == 100


if __name__ == "__main__":
    if RANKS > 1:
        fit(CASES[0])
    facts = {}
    for case in CASES:
        before = signal.getsignal(signal.SIGINT)
        try:
            fit(case)
            error = None
        except BaseException as raised:
            error = raised
        signal.signal(signal.SIGINT, before)  # Lightning leaves it ignored
        facts[case] = {
            "error": type(error).__name__, "text": "".join(traceback.format_exception(error)) if error else "",
            "left": [t.name for t in threading.enumerate() if t.name.startswith(("forward-", "backward-"))],
        }  # fmt: skip
    (OUT / "facts.json").write_text(json.dumps(facts))
