"""A rank with a real server process, and a second rank for gloo: the processes of ``g2-bench transport``.

    python -m lightning_g2.cli.bench.exchange CONFIG

prints, as its last line, for each size a list with a row for each repeat. The second rank is this program again,
started with the job's address in its environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor

from lightning_g2.server import ParameterLayout, flatten
from lightning_g2.strategy.client import RankClient
from lightning_g2.strategy.options import G2AsyncOptions
from lightning_g2.strategy.session import Session
from lightning_g2.transport import Transport, gloo
from lightning_g2.values import PushPacket

_WARMUP = 3
_TENSORS = 8
_RATE = 1e-6


def main(text: str) -> None:
    """Run as the first rank, or as the second where the environment says so."""
    config = json.loads(text)
    torch.set_num_threads(1)
    if os.environ.get("RANK") == "1":
        _reduce_along(config)
        return
    environment = LightningEnvironment()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(environment.main_port), "WORLD_SIZE": "2"}
    second = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env={**os.environ, "RANK": "1"})
    try:
        gloo.join(rank=0, ranks=2)
        rows = [_measured(config, size, environment) for size in config["sizes"]]
        print(json.dumps(rows))
    finally:
        second.kill()
        second.wait()


def _reduce_along(config: dict[str, Any]) -> None:
    gloo.join(rank=1, ranks=2)
    for size in config["sizes"]:
        buffer = torch.zeros(size // 4)
        for _ in range(config["repeats"] + _WARMUP):
            gloo.timed_all_reduce(buffer)


def _measured(config: dict[str, Any], size: int, environment: LightningEnvironment) -> list[dict[str, float]]:
    """Rows for one size; each has all that is compared, measured one after another."""
    session = Session(G2AsyncOptions(transport=config["transport"]), environment)
    session.start_servers(rank=0, ranks=1, local_rank=0, node=0, share=lambda value: value)
    transport = session.connect(rank=0, node=0)
    module = _module(size)
    client = RankClient(
        transport, rank=0, ranks=1, named_parameters=module.named_parameters,
        optimizers=[torch.optim.SGD(module.parameters(), lr=_RATE)], prefetch=False,
    )  # fmt: skip
    client.configure()
    client.begin()
    sent, copied = torch.randn(size // 4), (torch.empty(size // 4), torch.empty(size // 4))
    parameters: list[Tensor] = [parameter.detach() for parameter in module.parameters()]
    rows: list[dict[str, float]] = []
    for sequence in range(config["repeats"] + _WARMUP):
        gradients = [torch.randn_like(parameter) for parameter in parameters]
        before_s = transport.totals()[0].apply_s if rows else 0.0
        pushed_s, loaded_s = _push_pull(transport, client.layout, sequence, gradients, parameters)
        rows.append({
            "push_pull_s": pushed_s,
            "load_s": loaded_s,
            "apply_s": transport.totals()[0].apply_s - before_s,
            "memcpy_s": _timed(lambda: [target.copy_(sent) for target in copied]),
            "gloo_all_reduce_s": gloo.timed_all_reduce(sent),
        })  # fmt: skip
    session.close(limit_s=None)
    return rows[_WARMUP:]


def _push_pull(
    transport: Transport, layout: ParameterLayout, sequence: int, gradients: list[Tensor], parameters: list[Tensor]
) -> tuple[float, float]:
    """Seconds from gradients in their tensors to weights in the rank's memory, and from there into the module."""
    packet = PushPacket(
        rank=0, lane=0, sequence=sequence, base_version=sequence, groups=({"lr": _RATE},), present=layout.all(),
        samples=1,
    )  # fmt: skip
    start_s = time.perf_counter()
    with torch.no_grad():
        buffer = transport.gradient_buffer(layout.size_bytes())
        flatten(layout, gradients, packet.present, buffer)
        weights = transport.push(packet, buffer).wait().weights
        assert weights is not None
        pulled_s = time.perf_counter()
        torch._foreach_copy_(parameters, layout.views(weights.buffer[: layout.size_bytes()]))
    return pulled_s - start_s, time.perf_counter() - pulled_s


def _module(size: int) -> torch.nn.Module:
    each = size // 4 // _TENSORS
    return torch.nn.ParameterList([torch.nn.Parameter(torch.randn(each)) for _ in range(_TENSORS)])


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(*sys.argv[1:])
