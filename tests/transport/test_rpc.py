"""The server in its own process, over real RPC; the same protocol in process."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rpc import api

from lightning_g2.errors import PeerFailedError, PeerStoppedError, ProtocolError, ServerLostError, ServerStartError
from lightning_g2.server import OptimizerSpec, ParameterLayout, ServerSetup, flatten
from lightning_g2.transport import LocalTransport, ServerAddress, ServerHost, ServerProcess, Transport, chunks
from lightning_g2.transport.rpc import RpcTransport
from lightning_g2.transport.seal import _RPCS_OWN, SealedPickler
from lightning_g2.transport.shm import ShmTransport
from lightning_g2.values import PushPacket, SparseShape, WeightEdit


def _address(port: int, name: str, **fields: object) -> ServerAddress:
    values = {
        "store_host": "127.0.0.1", "store_port": port, "session": name, "ranks": 1, "init_counter": rpc._init_counter,
        "timeout_s": 60.0, "threads": 1, "secret": "of the test",
    } | fields  # fmt: skip
    return ServerAddress(**values)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


@pytest.fixture(params=[RpcTransport, ShmTransport], ids=["rpc", "shm"])
def server(store: dist.TCPStore, request: pytest.FixtureRequest) -> Iterator[tuple[RpcTransport, ServerProcess]]:
    address = _address(store.port, f"test-{time.monotonic_ns()}")
    process = ServerProcess(address)
    process.start()
    transport = request.param(address, 0, server=process, timeout_s=60.0)
    transport.start()
    yield transport, process
    transport.close()
    process.stop()


def _setup(value: float = 0.0) -> tuple[ServerSetup, ParameterLayout]:
    parameter = torch.nn.Parameter(torch.full((5,), value))
    layout = ParameterLayout.of([("p", parameter.detach())])
    weights = layout.allocate()
    flatten(layout, [parameter.detach()], (0,), weights)
    spec = OptimizerSpec.of(torch.optim.SGD([parameter], lr=1.0), {id(parameter): 0})
    return ServerSetup(layout, weights, (spec,), 1), layout


def _push(transport: Transport, layout: ParameterLayout, sequence: int) -> torch.Tensor:
    ones = layout.allocate((0,))
    flatten(layout, [torch.ones(5)], (0,), ones)
    group = {"lr": 1.0, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False,
             "foreach": None, "differentiable": False, "fused": None}  # fmt: skip
    packet = PushPacket(
        rank=0, lane=0, sequence=sequence, base_version=sequence, groups=(group,), present=(0,), samples=3
    )
    buffer = transport.gradient_buffer(ones.numel())
    buffer.copy_(ones)
    reply = transport.push(packet, buffer).wait()
    assert reply.receipt.version == reply.weights.version == sequence + 1
    return layout.views(reply.weights.buffer)[0]


def _exercise(transport: Transport) -> None:
    with pytest.raises(ProtocolError, match="rank 0 must configure it"):
        transport.view()
    setup, layout = _setup(2.0)
    transport.configure(setup)
    assert transport.view().version == 0
    assert torch.equal(_push(transport, layout, 0), torch.ones(5))
    assert torch.equal(_push(transport, layout, 1), torch.zeros(5))
    assert torch.equal(layout.views(transport.pull().buffer)[0], torch.zeros(5))
    assert transport.sync("validation").release.participants == (0,)
    assert [record.version for record in transport.drain()] == [1, 2]
    assert transport.drain() == []
    assert transport.totals()[0].samples == 6
    assert transport.snapshot().version == 2
    transport.fail(0, "boom")
    with pytest.raises(PeerFailedError, match="rank 0 failed, so the job ends: boom"):
        transport.pull()
    with pytest.raises(PeerFailedError, match="boom"):
        transport.sync("validation")
    assert transport.snapshot().version == 2, "a checkpoint can still be written"


def test_the_protocol_in_a_process_of_its_own(server: tuple[RpcTransport, ServerProcess]) -> None:
    _exercise(server[0])


def test_pieces_of_a_few_bytes_carry_the_same_protocol(
    server: tuple[RpcTransport, ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 7)
    _exercise(server[0])


def _grow(transport: Transport) -> None:
    setup, layout = _setup(2.0)
    transport.configure(setup)
    _push(transport, layout, 0)
    more = ParameterLayout.of([("p", torch.zeros(5)), ("big", torch.zeros(30_000))])
    values = more.allocate()
    more.views(values)[1].fill_(3.0)
    grown = transport.adopt(more, values)
    assert [spec.name for spec in grown.specs] == ["p", "big"] == [spec.name for spec in transport.layout().specs]
    buffer = transport.gradient_buffer(grown.size_bytes())
    flatten(grown, [torch.ones(5), torch.ones(30_000)], (0, 1), buffer)
    packet = PushPacket(
        rank=0, lane=0, sequence=1, base_version=1, groups=({"lr": 0.5},), members=((0, 1),), present=(0, 1)
    )
    after = grown.views(transport.push(packet, buffer).wait().weights.buffer[: grown.size_bytes()])
    assert torch.equal(after[0], torch.full((5,), 0.5))
    assert torch.equal(after[1], torch.full((30_000,), 2.5))
    # A column of one number: the indices take more room than the whole parameter.
    sparse = {0: SparseShape(1, 40_000, False)}
    wire = grown.of_gradients((0,), sparse)
    buffer = transport.gradient_buffer(wire.size_bytes())
    flatten(wire, [torch.zeros(1, 40_000).long(), torch.ones(40_000)], (0, 1), buffer)
    packet = replace(packet, sequence=2, base_version=2, present=(0,), sparse=sparse, groups=({"lr": 0.25},))
    after = grown.views(transport.push(packet, buffer).wait().weights.buffer[: grown.size_bytes()])
    assert torch.equal(after[0], torch.tensor([0.5 - 10_000, 0.5, 0.5, 0.5, 0.5]))
    assert torch.equal(after[1], torch.full((30_000,), 2.5))


def test_parameters_and_buffers_grow_while_a_server_works(server: tuple[RpcTransport, ServerProcess]) -> None:
    _grow(server[0])


def test_parameters_grow_in_process() -> None:
    _grow(LocalTransport(ServerHost(1), 0))


def test_the_protocol_in_process() -> None:
    _exercise(LocalTransport(ServerHost(1), 0))


def _exercise_first_and_last(transport: Transport) -> None:
    setup, layout = _setup(2.0)
    transport.configure(setup)
    rejected = PushPacket(rank=0, lane=0, sequence=0, base_version=0, rejected=True)
    reply = transport.push(rejected, None).wait()
    assert not reply.receipt.applied
    assert torch.equal(layout.views(reply.weights.buffer)[0], torch.full((5,), 2.0))
    values, before = layout.allocate((0,)), layout.allocate((0,))
    flatten(layout, [torch.full((5,), 7.0)], (0,), values)
    flatten(layout, [torch.full((5,), 2.0)], (0,), before)
    transport.edit(WeightEdit(rank=0, base_version=0, indices=(0,)), values, before)
    assert torch.equal(layout.views(transport.pull().buffer)[0], torch.full((5,), 7.0))
    transport.fail(0, "SIGTERM", stopped=True)
    with pytest.raises(PeerStoppedError, match="rank 0 was told to stop, so the job stops: SIGTERM"):
        transport.pull()


def test_a_rejected_first_push_an_edit_and_a_stop(server: tuple[RpcTransport, ServerProcess]) -> None:
    _exercise_first_and_last(server[0])


def test_a_rejected_first_push_an_edit_and_a_stop_in_process() -> None:
    _exercise_first_and_last(LocalTransport(ServerHost(1), 0))


def test_gradient_buffers_are_exact_and_two_take_turns() -> None:
    transport = RpcTransport(_address(1, "unconnected"), 0)
    first, second, third = (transport.gradient_buffer(96) for _ in range(3))
    assert first.data_ptr() != second.data_ptr(), "one is filled while the other is under way"
    assert third.data_ptr() == first.data_ptr()
    assert transport.gradient_buffer(64).untyped_storage().nbytes() == 64, "RPC sends whole storages"


def test_only_a_server_on_the_cpu_is_kept_from_the_gpus() -> None:
    address = _address(1, "unstarted")
    assert ServerProcess(address).environment()["CUDA_VISIBLE_DEVICES"] == ""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    assert ServerProcess(address, device="cuda:0").environment().get("CUDA_VISIBLE_DEVICES") == seen


def test_calls_outside_the_protocol_are_refused(server: tuple[RpcTransport, ServerProcess]) -> None:
    with pytest.raises(ProtocolError, match="call '_live_state'"):
        server[0]._call("_live_state")
    with pytest.raises(ProtocolError, match="call '_released'"):
        server[0]._waited("_released").wait()
    if isinstance(server[0], ShmTransport):
        with pytest.raises(ProtocolError, match="call 'snapshot'"):
            server[0]._answer(server[0]._ask("snapshot"), 20.0)


def _leave_a_mark(path: str) -> None:
    Path(path).touch()


@pytest.mark.parametrize("seal", [None, b"of another job"], ids=["no seal", "another job's"])
def test_rpc_runs_nothing_that_does_not_bear_the_jobs_seal(
    server: tuple[RpcTransport, ServerProcess], seal: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of the RPC group that does not know the secret: what it sends is refused before it is unpickled."""
    name, sealed, stranger = server[0]._address.server_name, tmp_path / "sealed", tmp_path / "stranger"
    rpc.rpc_sync(name, _leave_a_mark, args=(str(sealed),))
    assert sealed.exists()
    with monkeypatch.context() as patched:
        patched.setattr(api, "_default_pickler", SealedPickler(seal) if seal else _RPCS_OWN)
        with pytest.raises(Exception, match="without the seal of this job was refused unread"):
            rpc.rpc_sync(name, _leave_a_mark, args=(str(stranger),), timeout=20)
    assert not stranger.exists()
    with pytest.raises(ProtocolError, match="rank 0 must configure it"):
        server[0].view()  # it goes on with those that belong to it


def test_a_sealed_message_that_was_changed_is_refused() -> None:
    pickler = SealedPickler(b"of the test")
    data, tensors = pickler.serialize({"a": torch.ones(2), "b": 3})
    assert torch.equal(pickler.deserialize(data, tensors)["a"], torch.ones(2))
    for at in (0, 40, len(data) - 1):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(ProtocolError, match="refused unread"):
            pickler.deserialize(changed, tensors)


def test_a_killed_server_is_named(server: tuple[RpcTransport, ServerProcess]) -> None:
    transport, process = server
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    with pytest.raises(ServerLostError, match=f"server process {process.pid} was killed by signal 9"):
        transport.view()


def test_a_server_ends_when_its_lifeline_closes(server: tuple[RpcTransport, ServerProcess]) -> None:
    process = server[1]._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60.0) == 0


def test_a_server_that_cannot_start_says_why(store: dist.TCPStore) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        process = ServerProcess(_address(free.getsockname()[1], "nowhere", timeout_s=2.0))
    process.start()
    transport = RpcTransport(_address(store.port, "nowhere", timeout_s=60.0), 0, server=process)
    try:
        with pytest.raises(ServerStartError, match=r"did not start: server process \d+ ended with exit code 1"):
            transport.start()
        with pytest.raises(ServerStartError, match=r"server process \d+ ended"):  # on ranks that have not started it
            RpcTransport(_address(store.port, "nowhere", timeout_s=60.0), 0).start()
    finally:
        process.stop()


def test_a_server_loads_neither_lightning_nor_hydra(server: tuple[RpcTransport, ServerProcess]) -> None:
    process = server[1]
    libraries = Path(f"/proc/{process.pid}/maps").read_text()
    assert "torch" in libraries
    modules = rpc.rpc_sync(server[0]._address.server_name, _loaded_modules)
    loaded = set(json.loads(modules))
    assert "lightning_g2.server" in loaded
    assert not {"lightning", "pytorch_lightning", "hydra", "torchmetrics", "tensorboard"} & loaded


def _loaded_modules() -> str:
    import sys

    return json.dumps(sorted(sys.modules))


def test_ranks_of_one_process_meet_at_a_sync_point() -> None:
    host = ServerHost(2)
    first, second = LocalTransport(host, 0), LocalTransport(host, 1)
    first.configure(_setup()[0])
    seen: list[tuple[int, ...]] = []
    waiting = threading.Thread(target=lambda: seen.append(first.sync("epoch_end").release.participants))
    waiting.start()
    assert second.sync("epoch_end").release.participants == (0, 1)
    waiting.join(60.0)
    assert seen == [(0, 1)]
