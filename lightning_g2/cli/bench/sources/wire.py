"""A rank that pushes a GPT's gradients, or 14-vectors of them, to a real server process over sockets.

    python -m lightning_g2.cli.bench.sources.wire CONFIG

prints, as its last line, a list with one row for each thing that was sent. Bytes of gradients are the server's own
count; bytes on the wire are the kernel's, of this process's TCP connections to the server, headers of TCP and IP not
included.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn

from lightning_g2.routing import G2Sketch
from lightning_g2.server import flatten
from lightning_g2.strategy.client import RankClient
from lightning_g2.strategy.options import G2AsyncOptions
from lightning_g2.strategy.session import Session
from lightning_g2.tasks.gpt import VOCABULARY, ByteGPT
from lightning_g2.transport import Transport, gloo
from lightning_g2.values import PushPacket

_WARMUP = 2
_DECAY = 0.9
_SEED = 20
_RATE = 1e-3
_SENT, _RECEIVED = 200, 128
"""Where ``struct tcp_info`` of Linux has ``tcpi_bytes_sent`` and ``tcpi_bytes_received``, 64 bits each."""

WHATS = ("whole gradient", "one vector per model", "one vector per block")


def main(text: str) -> None:
    """Push each of what may be sent, one after another."""
    config = json.loads(text)
    torch.set_num_threads(1)
    environment = LightningEnvironment()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(environment.main_port), "WORLD_SIZE": "1"}
    gloo.join(rank=0, ranks=1)
    print(json.dumps([_pushed(config, what, environment) for what in config["whats"]]))


@dataclass
class _Drifts:
    """Drifts of a GPT that is trained along, and what is sent of them."""

    model: ByteGPT
    batch: int

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(_SEED)
        self.references: dict[str, Tensor] = {}

    def next(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Gradients of the next batch, and their drifts from a moving average of those before."""
        shape = (self.batch, self.model.block_size + 1)
        self.model.zero_grad()
        self.model.loss(torch.randint(VOCABULARY, shape, generator=self.generator)).backward()  # type: ignore[no-untyped-call]
        drifts, gradients = {}, []
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            reference = self.references.get(name, torch.zeros_like(parameter.grad))
            drifts[name] = parameter.grad - reference
            self.references[name] = torch.lerp(reference, parameter.grad, 1 - _DECAY)
            gradients.append(parameter.grad)
        with torch.no_grad():
            torch._foreach_add_(list(self.model.parameters()), gradients, alpha=-_RATE)
        return gradients, drifts


def _pushed(config: Mapping[str, Any], what: str, environment: LightningEnvironment) -> dict[str, Any]:
    """Bytes a push, and the share of the drift's squared length that the numbers sent determine."""
    torch.manual_seed(_SEED)
    model = ByteGPT(width=config["width"], layers=config["layers"], heads=config["heads"], block_size=config["block"])
    drifts, sketch = _Drifts(model, config["batch"]), G2Sketch(seed=_SEED)
    blocks = {name: parameter.numel() for name, parameter in model.named_parameters()}

    def vectors() -> tuple[list[Tensor], float]:
        gradients, drift = drifts.next()
        size = sum(float(d.double().square().sum()) for d in drift.values())
        if what == WHATS[0]:
            return gradients, 1.0
        each = {name: sketch.sketch(name, d)[0] for name, d in drift.items()}
        if what == WHATS[1]:
            whole = torch.stack(list(each.values())).sum(dim=0)
            return [whole], float(whole.double().square().sum()) * 14 / sum(blocks.values()) / size
        return list(each.values()), sum(
            float(v.double().square().sum()) * 14 / blocks[n] for n, v in each.items()
        ) / size

    tensors = list(model.parameters()) if what == WHATS[0] else [
        nn.Parameter(torch.zeros(14)) for _ in range(1 if what == WHATS[1] else len(blocks))
    ]  # fmt: skip
    session = Session(G2AsyncOptions(transport="rpc"), environment)
    session.start_servers(rank=0, ranks=1, local_rank=0, node=0, share=lambda value: value)
    transport = session.connect(rank=0, node=0)
    client = RankClient(
        transport, rank=0, ranks=1, named_parameters=nn.ParameterList(tensors).named_parameters,
        optimizers=[torch.optim.SGD(tensors, lr=_RATE)], prefetch=False,
    )  # fmt: skip
    client.configure()
    client.begin()
    kept, before, counted = [], (0, 0), 0
    for sequence in range(_WARMUP + config["pushes"]):
        if sequence == _WARMUP:
            before, counted = _socket_bytes(int(os.environ["MASTER_PORT"])), transport.totals()[0].bytes_sent
        sent, share = vectors()
        _push(transport, client, sequence, sent)
        kept.append(share)
    after = _socket_bytes(int(os.environ["MASTER_PORT"]))
    total = transport.totals()[0]
    session.close(limit_s=None)
    n = config["pushes"]
    return {
        "what": what, "parameters": sum(blocks.values()), "blocks": len(blocks), "pushes": n,
        "gradient_bytes": (total.bytes_sent - counted) / n,
        "wire_bytes_out": (after[0] - before[0]) / n, "wire_bytes_in": (after[1] - before[1]) / n,
        "kept": sum(kept) / len(kept),
    }  # fmt: skip


def _push(transport: Transport, client: RankClient, sequence: int, gradients: list[Tensor]) -> None:
    """Ask for the server's version, as a gate that looks at it does, push, and load the weights that come back."""
    layout = client.layout
    version = transport.view().version
    packet = PushPacket(
        rank=0, lane=0, sequence=sequence, base_version=version, groups=({"lr": _RATE},), present=layout.all(),
        samples=1, sent_bytes=layout.size_bytes(), whole_bytes=layout.size_bytes(),
    )  # fmt: skip
    with torch.no_grad():
        buffer = transport.gradient_buffer(layout.size_bytes())
        flatten(layout, gradients, packet.present, buffer)
        weights = transport.push(packet, buffer).wait().weights
        assert weights is not None


def _socket_bytes(store_port: int) -> tuple[int, int]:
    """Bytes sent and received so far over this process's TCP connections, those to the key-value store left out."""
    sent = received = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError, ValueError):  # closed meanwhile, or no connected TCP socket
            if not stat.S_ISSOCK(os.stat(entry).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if store_port in (connection.getsockname()[1], connection.getpeername()[1]):
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent += struct.unpack_from("=Q", info, _SENT)[0]
                received += struct.unpack_from("=Q", info, _RECEIVED)[0]
    return sent, received


if __name__ == "__main__":
    main(*sys.argv[1:])
