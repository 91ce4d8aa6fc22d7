"""What the benchmarks train: a GPT that really computes, and a regression whose compute is modelled by sleeping."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_g2.tasks.gpt import VOCABULARY, ByteGPT

_SEED = 20


class SleepingRegression(pl.LightningModule):
    """Linear regression onto a teacher, where a step's compute is a sleep beside very cheap gradients.

    Inputs are standard normal, the teacher is linear and without noise. Only the student's distance from it matters, so
    the weights here are that distance: the teacher is the origin, the start is random, and the loss is the student's
    squared error relative to the expected error at the start, hence about 1 at first. Data are seen once, so the loss
    of a batch before its step is the error on data never seen.

    The rate is, for every strategy, the one that shrinks the expected error most when each update averages over
    ``update_batch`` samples and nothing is stale: ``1 / (1 + (inputs + 1) / update_batch)``.

    Args:
        inputs: width of the input.
        outputs: width of the output; ``inputs * outputs`` weights of four bytes.
        update_batch: samples behind one update of the weights, all ranks' together.
        sleep_s: a batch's compute, seconds.
        slow_rank: rank that sleeps ``factor`` times as long; None for no straggler.
        factor: see ``slow_rank``.

    Attributes:
        losses: time (monotonic clock, seconds) and loss of every batch, taken before the sleep.
    """

    def __init__(
        self,
        *,
        inputs: int,
        outputs: int,
        update_batch: int,
        sleep_s: float,
        slow_rank: int | None = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.rate = 1 / (1 + (inputs + 1) / update_batch)
        self.sleep_s, self.slow_rank, self.factor = sleep_s, slow_rank, factor
        self.losses: list[tuple[float, float]] = []
        start = torch.randn(inputs, outputs, generator=torch.Generator().manual_seed(_SEED))
        self.distance = torch.nn.Parameter(start / (inputs * outputs) ** 0.5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Half the mean squared error over inputs of shape (batch, inputs); its curvature is 1 in all directions."""
        error = (batch[0] @ self.distance).square().sum() / len(batch[0])
        self.losses.append((time.monotonic(), float(error.detach())))
        time.sleep(self.sleep_s * (self.factor if self.global_rank == self.slow_rank else 1.0))
        return error / 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class TimedGPT(ByteGPT):
    """The GPT of the tasks; it keeps the loss of every batch.

    Attributes:
        losses: time (monotonic clock, seconds) and loss of every batch, nats a byte.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[tuple[float, float]] = []

    def loss(self, batch: Tensor) -> Tensor:
        """See :meth:`ByteGPT.loss`."""
        loss = super().loss(batch[0])
        self.losses.append((time.monotonic(), float(loss.detach())))
        return loss


def build(workload: Mapping[str, Any], fit: Mapping[str, Any]) -> tuple[pl.LightningModule, DataLoader[Any]]:
    """The module and its data.

    Args:
        workload: ``kind`` ("regression" or "gpt"), ``batch`` (samples a batch), ``samples`` (of the dataset) and the
            module's sizes.
        fit: of one fit, ``module``: further options of the module.
    """
    options = {name: value for name, value in workload.items() if name not in ("kind", "batch", "samples")}
    generator = torch.Generator().manual_seed(_SEED)
    torch.manual_seed(_SEED)
    data: Tensor
    module: pl.LightningModule
    if workload["kind"] == "gpt":
        module = TimedGPT(**options, **fit.get("module", {}))
        length = (workload["samples"], options["block_size"] + 1)
        data = torch.randint(VOCABULARY, length, generator=generator)
    else:
        module = SleepingRegression(**options, **fit.get("module", {}))
        data = torch.randn(workload["samples"], options["inputs"], generator=generator)
    return module, DataLoader(TensorDataset(data), batch_size=workload["batch"], shuffle=True)
