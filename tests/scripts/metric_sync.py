"""Two processes see different pushes; each prints what the metrics give over both."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchmetrics import MetricCollection

from lightning_g2.metrics import Friction, Goodput, Openness, Staleness
from lightning_g2.values import PushRecord


def replica(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    metrics = MetricCollection([Friction(quantiles=(0.5,)), Openness(), Staleness(), Goodput()])
    for number in range(2 + rank):  # replicas of unequal numbers of pushes
        record = PushRecord(
            rank=rank, version=number, staleness=3 * rank, energy=1.0 + rank, weight=1.0 - 0.5 * rank,
            rejected=rank == 1 and number == 2, samples=10, time_s=100.0 + 10.0 * rank + number,
        )  # fmt: skip
        metrics.update(record)
    values = {name: float(value) for name, value in metrics.compute().items()}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(values))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mp.start_processes(replica, args=(sys.argv[1],), nprocs=2, start_method="spawn")
