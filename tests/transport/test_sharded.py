"""Several servers do what one does: the same weights, moments and checkpoints, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_g2.errors import PeerFailedError, ServerLostError
from lightning_g2.server import FINAL_POINT, Aggregation, Balance, ParameterLayout
from lightning_g2.strategy.client import RankClient
from lightning_g2.strategy.optimizer_state import give_state
from lightning_g2.transport import LocalTransport, ServerHost, ShardedTransport, Transport, Versions
from lightning_g2.values import GateDecision, ServerView

RANKS = 2


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embedding = torch.nn.Embedding(12, 4, sparse=True)
        self.first = torch.nn.Linear(4, 7)
        self.second = torch.nn.Linear(7, 4, bias=False)
        self.late = torch.nn.Linear(4, 4)
        self.bf16 = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.tied = self.second.weight
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        self.late.requires_grad_(False)

    def loss(self, words: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(self.embedding(words)))) * self.bf16
        return (hidden + self.late(hidden)).square().mean()


class Counting(torch.optim.SGD):
    """Keeps a counter in its group, a list of its parameters, and an average of each by parameter."""

    def __init__(self, parameters, **options) -> None:
        super().__init__(parameters, **options)
        self.mine = [p for group in self.param_groups for p in group["params"]]
        self.means = {p: p.detach().clone() for p in self.mine}
        self.param_groups[0]["k"] = 0

    def step(self, closure=None):
        assert self.mine, "never called on a server that has none of its parameters"
        super().step(closure)
        self.param_groups[0]["k"] += 1
        for parameter in self.mine:
            self.means[parameter].lerp_(parameter.detach(), 1 / (1 + self.param_groups[0]["k"]))


class Rank:
    """A rank in this process: its module, its optimizers and its end of the protocol."""

    def __init__(
        self, number: int, transport: Transport, *, prefetch: bool = False, wire: torch.dtype | None = None
    ) -> None:
        self.number = number
        self.net = net = Net()
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adam([{"params": [net.first.weight, net.bf16]}, {"params": [net.second.weight], "lr": 0.02}]),
            Counting([net.first.bias], lr=0.1, momentum=0.9),
            torch.optim.SparseAdam([net.embedding.weight]),
        ]
        self.client = RankClient(
            transport, rank=number, ranks=RANKS, named_parameters=net.named_parameters, optimizers=self.optimizers,
            prefetch=prefetch, master_dtype=torch.float32, weight_by_samples=True, wire=wire,
        )  # fmt: skip
        self._data = torch.Generator().manual_seed(number)

    def backward(self) -> None:
        self.net.loss(torch.randint(0, 12, (5,), generator=self._data)).backward()
        self.client.note_gradients()

    def push(self, *, rejected: bool = False) -> None:
        for index, optimizer in enumerate(self.optimizers):
            self.client.push(index, _reject if rejected else _accept, samples=5 - self.number, needs_view=True)
            optimizer.zero_grad()


def _accept(gradients: Mapping[str, Tensor], view: ServerView, staleness: int) -> GateDecision:
    return GateDecision(gradients, energy=0.5, scale={"first.weight": 1.0})


def _reject(gradients: Mapping[str, Tensor], view: ServerView, staleness: int) -> GateDecision:
    return GateDecision(gradients, rejected=True)


def connect(servers: int) -> list[Transport]:
    hosts = [ServerHost(RANKS) for _ in range(servers)]
    if servers == 1:
        return [LocalTransport(hosts[0], rank) for rank in range(RANKS)]
    return [ShardedTransport([LocalTransport(host, rank) for host in hosts]) for rank in range(RANKS)]


def train(servers: int, *, resume_with: int | None = None, **options: Any) -> tuple[dict, dict, dict, list]:
    """One recorded order of arrivals, with everything in it that a push can bring."""
    transports = connect(servers)
    ranks = [Rank(number, transport, **options) for number, transport in enumerate(transports)]
    ranks[0].client.configure()
    for rank in ranks:
        rank.client.begin()
    _work(ranks)
    if isinstance(transports[0], ShardedTransport):
        sizes = [len(child.layout()) for child in transports[0]._children]
        assert sum(sizes) == 7, "tied weights lie on one server"
        assert all(sizes) is (servers < 8), "with nine servers there are some that have nothing"
    _, snapshot = ranks[0].client.snapshot()
    ranks = [Rank(n, t, **options) for n, t in enumerate(connect(resume_with or servers))]
    _restore(ranks[0], snapshot)
    ranks[0].client.configure()
    for rank in ranks:
        rank.client.begin()
    _work(ranks)
    weights, snapshot = ranks[0].client.snapshot()
    names = [spec.name for spec in snapshot.layout.specs]
    states = {
        (index, names[i], key): value
        for index, state in enumerate(snapshot.states)
        for i, values in state.items()
        for key, value in values.items()
    }
    means = snapshot.parts(names)[1].attributes["means"]
    assert set(means) == {"first.bias"}
    counts = [snapshot.version, snapshot.evolved, snapshot.steps, ranks[0].client.transport.totals()]
    view = ranks[1].client.transport.view()
    return weights, means, states, [*counts, view.window, view.scale, ranks[1].client.weights()]


def _work(ranks: list[Rank]) -> None:
    for turn in range(3):
        for rank in (0, 1, 1, 0, 1):
            ranks[rank].backward()
            if turn == 1 and rank == 1:
                with torch.no_grad():
                    ranks[1].net.first.weight.clamp_(-1, 1)
                    ranks[1].net.bf16.mul_(0.5)
            if turn == 0:
                ranks[0].client.settle()  # both have computed from one version: the second is stale
            ranks[rank].push(rejected=turn == 2 and rank == 0)
        if turn == 0:  # one rank unfreezes a layer before the other does
            _unfreeze(ranks[1])
        if turn == 1:
            _unfreeze(ranks[0])
    for rank in ranks:
        rank.client.settle()


def _unfreeze(rank: Rank) -> None:
    late = rank.net.late
    if not late.weight.requires_grad:
        late.requires_grad_(True)
        rank.optimizers[0].add_param_group({"params": list(late.parameters()), "lr": 0.05})


def _restore(rank: Rank, snapshot) -> None:
    _unfreeze(rank)
    views = dict(zip([s.name for s in snapshot.layout.specs], snapshot.layout.views(snapshot.weights), strict=True))
    named = dict(rank.net.named_parameters())
    with torch.no_grad():
        for name, value in views.items():
            named[name].copy_(value)
    parts = snapshot.parts([named[spec.name] for spec in snapshot.layout.specs])
    for optimizer, own, evolved in zip(rank.optimizers, parts, snapshot.evolved, strict=True):
        give_state(optimizer, own, evolved)


def _assert_equal(one, other) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            _assert_equal(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _assert_equal(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("options", [{}, {"prefetch": True}, {"wire": torch.float16}], ids=str)
def test_two_and_three_servers_equal_one_bit_for_bit(options: dict[str, Any]) -> None:
    alone = train(1, **options)
    assert len(alone[2]) > 10, "moments of most parameters"
    for servers in (2, 3, 9):
        _assert_equal(train(servers, **options), alone)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_a_snapshot_resumes_with_another_number_of_servers(before: int, after: int) -> None:
    _assert_equal(train(before, resume_with=after), train(1))


def test_buffers_of_several_pushes_work_on_each_server() -> None:
    """The mean of two pushes makes a version; what is left at a sync point is applied there, on all servers."""
    _, transports, modules = _connected()
    clients = _clients(transports, modules, aggregation=Aggregation(aggregate=2))
    for _ in range(3):
        _step(clients[0], modules[0])
    assert [child.view().version for child in transports[0]._children] == [1, 1]
    ends = threading.Thread(target=lambda: clients[1].sync("validation"))
    ends.start()
    clients[0].sync("validation")
    ends.join(60.0)
    for parameter in (*modules[0].values(), *modules[1].values()):
        assert torch.equal(parameter, torch.full((8,), -2.0))
    assert clients[0].base_version.of_servers == (2, 2)


def test_servers_are_given_whole_tensors_by_bytes() -> None:
    balance = Balance()
    layout = ParameterLayout.of(
        [(name, torch.zeros(size)) for name, size in zip("abcde", (3, 10, 4, 4, 3), strict=True)]
    )
    assert balance.assign(layout.specs, 2) == {"b": 0, "c": 1, "d": 1, "a": 1, "e": 0}
    assert balance.size_bytes == [52, 44]
    more = ParameterLayout.of([("e", torch.zeros(3)), ("f", torch.zeros(1)), ("g", torch.zeros(9))])
    assert balance.assign(more.specs, 2) == {"e": 0, "g": 1, "f": 0}, "what is decided stays"


SIZES = {"a": 8, "b": 8}


def _connected(servers: int = 2) -> tuple[list[ServerHost], list[ShardedTransport], list[torch.nn.ParameterDict]]:
    hosts = [ServerHost(RANKS) for _ in range(servers)]
    transports = [ShardedTransport([LocalTransport(host, r) for host in hosts]) for r in range(RANKS)]
    modules = [torch.nn.ParameterDict({n: torch.zeros(size) for n, size in SIZES.items()}) for _ in transports]
    return hosts, transports, modules


def _clients(
    transports: list[ShardedTransport], modules: list[torch.nn.ParameterDict], **options: Any
) -> list[RankClient]:
    clients = [
        RankClient(
            transport, rank=rank, ranks=RANKS, named_parameters=module.named_parameters, prefetch=False,
            optimizers=[torch.optim.SGD(module.parameters(), lr=1.0)], **options,
        )
        for rank, (transport, module) in enumerate(zip(transports, modules, strict=True))
    ]  # fmt: skip
    clients[0].configure()
    for client in clients:
        client.begin()
    return clients


def _step(client: RankClient, module: torch.nn.ParameterDict) -> None:
    for parameter in module.values():
        parameter.grad = torch.ones_like(parameter)
    client.push(0, _accept, samples=1, needs_view=False)


def test_ranks_leave_a_sync_point_with_the_same_weights_of_all_servers() -> None:
    """Ranks push at once when they are released; one of them stands still between two servers for a while."""
    _, transports, modules = _connected()
    clients = _clients(transports, modules)
    last, pushed = transports[1]._children[1], threading.Event()
    seen: dict[int, list[Tensor]] = {}

    def delayed(call: Callable) -> Callable:
        def late(*arguments):
            assert not pushed.wait(0.3), "rank 0 cannot push before rank 1 has come to the last server"
            return call(*arguments)

        return late

    last.sync, last.pull = delayed(last.sync), delayed(last.pull)  # type: ignore[method-assign]

    def work(rank: int) -> None:
        _step(clients[rank], modules[rank])
        clients[rank].sync("validation")
        seen[rank] = [p.detach().clone() for p in modules[rank].values()]
        _step(clients[rank], modules[rank])
        pushed.set()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    for rank in range(RANKS):
        for value in seen[rank]:
            assert torch.equal(value, torch.full((8,), -2.0))
        assert clients[rank].layout.size_bytes() == 128


def test_ranks_at_different_points_go_on_alone_on_all_servers() -> None:
    _, transports, modules = _connected()
    clients = _clients(transports, modules)
    ends = threading.Thread(target=lambda: clients[1].sync(FINAL_POINT))
    ends.start()
    assert clients[0].sync("validation").participants == (0,)
    _step(clients[0], modules[0])
    clients[0].sync(FINAL_POINT)
    ends.join(60.0)
    assert not ends.is_alive()
    assert torch.equal(modules[1]["b"], torch.full((8,), -1.0))


def test_a_failure_reaches_a_rank_wherever_it_waits() -> None:
    hosts, transports, modules = _connected()
    _clients(transports, modules)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            transports[0]._children[1].sync("validation")
        except PeerFailedError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not hosts[1]._waiters:
        pass
    transports[1].fail(1, "boom")
    waiting.join(60.0)
    assert "rank 1 failed, so the job ends: boom" in str(errors[0])
    for host in hosts:
        with pytest.raises(PeerFailedError, match="boom"):
            host.check()


def test_a_closed_connection_says_so() -> None:
    _, transports, modules = _connected()
    _clients(transports, modules)
    transports[0].close()
    transports[0].close()
    with pytest.raises(ServerLostError, match="the transport is closed"):
        transports[0].pull()


def test_each_server_is_told_its_own_version() -> None:
    """Rank 1's push has reached server 0 only when rank 0 pulls; rank 0 then changes weights by hand."""
    _, transports, modules = _connected()
    clients = _clients(transports, modules)
    on_second = clients[0].layout.specs[transports[0]._shards.whole(1)[0]].name
    held: list[Callable[[], object]] = []
    second = transports[1]._children[1]
    push = second.push
    second.push = lambda packet, buffer: held.append(lambda: push(packet, buffer)) or _Never()  # type: ignore
    for parameter in modules[1].values():
        parameter.grad = torch.ones(8)
    with pytest.raises(TimeoutError):
        clients[1].push(0, _accept, samples=1, needs_view=False)
    clients[0].load(transports[0].pull())
    assert isinstance(clients[0].base_version, Versions)
    assert clients[0].base_version.of_servers == (1, 0)
    held[0]()
    with torch.no_grad():
        for parameter in modules[0].values():
            parameter.add_(5.0)
    clients[0].send_edits()
    clients[0].load(transports[0].pull())
    assert torch.equal(modules[0][on_second], torch.full((8,), 4.0)), "the push that came in between is kept"
    assert clients[0].base_version.of_servers == (1, 1)


class _Never:
    def done(self) -> bool:
        return False

    def wait(self):
        raise TimeoutError
