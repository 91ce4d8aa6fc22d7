"""Weights handed out while others push: whole, or tensor by tensor; and packets that overtake each other."""

from __future__ import annotations

import threading
from types import TracebackType

import pytest
import torch

from lightning_g2.errors import ProtocolError
from lightning_g2.server import OptimizerSpec, ParameterLayout, ServerSetup, ServerState
from lightning_g2.transport import PushReply, ServerHost
from lightning_g2.transport.handout import copy_by_tensor
from lightning_g2.values import PushPacket

TENSORS, SIZE = 4, 4096
GROUP = {"lr": 1.0}


def _setup(*, by_tensor: bool = False, ranks: int = 1) -> tuple[ServerSetup, ParameterLayout]:
    parameters = [torch.nn.Parameter(torch.zeros(SIZE)) for _ in range(TENSORS)]
    layout = ParameterLayout.of((f"p{i}", p.detach()) for i, p in enumerate(parameters))
    spec = OptimizerSpec.of(torch.optim.SGD(parameters, lr=1.0), {id(p): i for i, p in enumerate(parameters)})
    return ServerSetup(layout, layout.allocate(), (spec,), ranks, by_tensor=by_tensor), layout


def _ones(layout: ParameterLayout) -> torch.Tensor:
    buffer = layout.allocate()
    for view in layout.views(buffer):
        view.fill_(1.0)
    return buffer


def _packet(sequence: int, rank: int = 0, **fields: object) -> PushPacket:
    present = tuple(range(TENSORS))
    return PushPacket(rank, 0, sequence, base_version=0, groups=(GROUP,), present=present, **fields)


class _InterleavingLock:
    """A lock in whose every release another rank's push is applied."""

    def __init__(self, state: ServerState, layout: ParameterLayout) -> None:
        self.state, self.ones, self.pushes = state, _ones(layout), 0

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with torch.no_grad():
            self.state.push(_packet(self.pushes), self.ones, time_s=0.0)
        self.pushes += 1


def test_by_tensor_each_tensor_is_of_one_version_and_none_older_than_is_said() -> None:
    setup, layout = _setup()
    state = ServerState(setup)
    lock = _InterleavingLock(state, layout)
    version, buffer = copy_by_tensor(state, lock)
    values = [view.unique().tolist() for view in layout.views(buffer)]
    assert values == [[-1.0], [-2.0], [-3.0], [-4.0]], "pushes are applied between tensors, never within one"
    assert version == 0
    small = torch.zeros(layout.size_bytes((0, 1)), dtype=torch.uint8)
    copy_by_tensor(state, threading.Lock(), small)
    assert all((view == -5.0).all() for view in layout.views(small, (0, 1))), "a rank that knows two tensors only"


@pytest.mark.parametrize("by_tensor", [False, True], ids=["atomic", "layerwise"])
@pytest.mark.parametrize("in_place", [False, True], ids=["into a new buffer", "into the rank's"])
def test_no_read_is_torn(by_tensor: bool, in_place: bool) -> None:
    """Two ranks push all-ones at once: atomic weights are uniform over all tensors, layerwise ones within each."""
    ranks, pushes = 2, 60
    setup, layout = _setup(by_tensor=by_tensor, ranks=ranks)
    host = ServerHost(ranks)
    host.configure(setup)
    torn: list[object] = []

    def work(rank: int) -> None:
        ones, into = _ones(layout), layout.allocate() if in_place else None

        def look(reply: PushReply | Exception) -> None:
            assert isinstance(reply, PushReply)
            assert reply.weights is not None
            values = [view.unique().tolist() for view in layout.views(reply.weights.buffer)]
            heads = {value[0] for value in values}
            whole = all(len(value) == 1 for value in values)
            if not whole or (not by_tensor and heads != {-float(reply.weights.version)}):
                torn.append(values)
            if max(heads) > -float(reply.weights.version):
                torn.append((reply.weights.version, values))

        for sequence in range(pushes):
            with torch.no_grad():
                host.push(_packet(sequence, rank), ones.clone(), look, into)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert torn == []
    assert host.view().version == ranks * pushes


def test_a_packet_that_overtakes_waits_for_the_one_before() -> None:
    setup, layout = _setup()
    host = ServerHost(1)
    host.configure(setup)
    versions: list[int] = []

    def push(sequence: int, last: bool) -> None:
        with torch.no_grad():
            host.push(_packet(sequence, last=last), _ones(layout), lambda r: versions.append(r.receipt.version))

    early = threading.Thread(target=push, args=(1, True))
    early.start()
    assert versions == []
    push(0, False)
    early.join(60.0)
    assert versions == [0, 1]


def test_after_a_refused_packet_the_next_one_is_refused_at_once() -> None:
    setup, layout = _setup()
    host = ServerHost(1)
    host.configure(setup)
    errors: list[PushReply | Exception] = []
    host.push(_packet(0, last=False), torch.zeros(0, dtype=torch.uint8), errors.append)
    host.push(_packet(1), _ones(layout), errors.append)
    assert all(isinstance(error, ProtocolError) for error in errors)
    assert "0 bytes of gradients, expected" in str(errors[0])
    assert "expects push 0; a push was lost" in str(errors[1])


def test_an_early_packet_may_ask_for_its_own_parameters() -> None:
    setup, layout = _setup()
    host = ServerHost(1)
    host.configure(setup)
    replies: list[PushReply] = []
    into = torch.full((layout.size_bytes(),), 7, dtype=torch.uint8)
    packet = PushPacket(0, 3, 0, base_version=0, groups=(GROUP,), present=(1,), last=False, fresh=True)
    gradient = layout.allocate((1,))
    layout.views(gradient, (1,))[0].fill_(1.0)
    with torch.no_grad():
        host.push(packet, gradient, replies.append, into)
    (reply,) = replies
    assert reply.weights is not None
    assert (reply.receipt.version, reply.weights.version) == (0, 0)
    (start, stop), size = layout.spans()[1], layout.size_bytes()
    assert torch.equal(into[start:stop].view(torch.float32), torch.full((SIZE,), -1.0))
    assert bool((into[:start] == 7).all()), "the rest stays as it was"
    assert bool((into[stop:size] == 7).all())
