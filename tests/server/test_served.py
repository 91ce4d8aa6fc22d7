"""What changes while a server trains: groups, parameters, hyper-parameters; sparse gradients; float32 masters."""

from dataclasses import replace

import pytest
import torch

from lightning_g2.errors import ConfigurationError, G2Error, ProtocolError
from lightning_g2.server import (
    MASTER_KEY,
    OptimizerSpec,
    ParameterLayout,
    ServerSetup,
    ServerState,
    flatten,
    flatten_gradients,
    hyper_parameters,
)
from lightning_g2.values import PushPacket, SparseShape


class Bench:
    """A server and the module's optimizer it was made from, fed by hand."""

    def __init__(self, parameters, optimizer, *, ranks=2, **setup):
        self.parameters, self.optimizer = list(parameters), optimizer
        self.layout = ParameterLayout.of((f"p{i}", p.detach()) for i, p in enumerate(self.parameters))
        weights = self.layout.allocate()
        flatten(self.layout, [p.detach() for p in self.parameters], self.layout.all(), weights)
        index = {id(p): i for i, p in enumerate(self.parameters)}
        spec = OptimizerSpec.of(optimizer, index)
        self.server = ServerState(ServerSetup(self.layout, weights, (spec,), ranks, **setup))
        self.sequence = [0] * ranks

    def push(self, gradients, *, rank=0, groups=None, members=(), **fields):
        present, sparse = tuple(gradients), {}
        for i, g in gradients.items():
            if g.is_sparse:
                sparse[i] = SparseShape(g.sparse_dim(), g._nnz(), g.is_coalesced())
        layout = self.server.layout
        buffer = torch.zeros(layout.of_gradients(present, sparse).size_bytes(), dtype=torch.uint8)
        flatten_gradients(layout, list(gradients.values()), present, sparse, buffer)
        packet = PushPacket(
            rank=rank, lane=0, sequence=self.sequence[rank], base_version=self.server.version, present=present,
            groups=tuple(map(hyper_parameters, groups or self.optimizer.param_groups)), members=members, sparse=sparse,
        )  # fmt: skip
        self.server.push(replace(packet, **fields), buffer, time_s=0.0)
        self.sequence[rank] += 1

    def adopt(self, name, value):
        layout = ParameterLayout.of([(name, value)])
        buffer = layout.allocate()
        flatten(layout, [value], (0,), buffer)
        return self.server.adopt(layout, buffer)

    @property
    def weights(self):
        return self.server.layout.views(self.server.weights()[1])


def test_a_rank_with_a_new_group_and_one_without_push_in_turn() -> None:
    """State belongs to parameters: both ranks step as the module's optimizer with their own groups would."""
    old, new = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.full((2,), 2.0))
    optimizer = torch.optim.AdamW([old], lr=0.1)
    bench = Bench([old], optimizer)
    published = bench.server.weights()[1]
    assert len(bench.adopt("p1", new.detach())) == 2
    assert len(bench.adopt("p1", torch.zeros(2))) == 2, "the second rank that brings it gives no value"
    assert torch.equal(bench.weights[1], torch.full((2,), 2.0))
    optimizer.add_param_group({"params": [new], "lr": 0.5})
    gradient = {0: torch.tensor([1.0, -2.0, 3.0]), 1: torch.tensor([0.5, -0.5])}
    for both in (True, False, True):
        present = gradient if both else {0: gradient[0]}
        for parameter, i in ((old, 0), (new, 1)):
            parameter.grad = present[i].clone() if i in present else None
        groups = optimizer.param_groups if both else optimizer.param_groups[:1]
        bench.push(present, rank=int(both), groups=groups, members=((0,), (1,)) if both else ((0,),))
        optimizer.step()
    assert torch.equal(bench.weights[0], old.detach())
    assert torch.equal(bench.weights[1], new.detach())
    assert torch.equal(published[: bench.layout.size_bytes()], published), "what was published before stays"
    assert set(bench.server.snapshot().states[0]) == {0, 1}


def test_parameters_can_change_groups() -> None:
    one, two = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    bench = Bench([one, two], torch.optim.SGD([{"params": [one]}, {"params": [two], "lr": 2.0}], lr=1.0))
    ones = {0: torch.ones(2), 1: torch.ones(2)}
    bench.push(ones, members=((0,), (1,)))
    bench.push(ones, members=((1,), (0,)))
    assert [w.tolist() for w in bench.weights] == [[-3.0, -3.0], [-3.0, -3.0]]
    bench.push(ones, members=((0, 1),), groups=bench.optimizer.param_groups[:1])
    assert [w.tolist() for w in bench.weights] == [[-4.0, -4.0], [-4.0, -4.0]]


def test_a_parameter_that_looks_different_on_another_rank_is_refused() -> None:
    bench = Bench([p := torch.nn.Parameter(torch.ones(3))], torch.optim.SGD([p], lr=1.0))
    with pytest.raises(ProtocolError, match=r"parameter 'p0': shape \(4,\) .* the server has \(3,\)"):
        bench.adopt("p0", torch.ones(4))
    with pytest.raises(ProtocolError, match="names parameters beyond the 1"):
        bench.push({0: torch.ones(3)}, members=((0, 1),))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch's own Adagrad
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "SparseAdam"])
@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_gradients_move_the_rows_they_have(name: str, coalesced: bool) -> None:
    torch.manual_seed(0)
    table, dense = torch.nn.Parameter(torch.randn(7, 2)), torch.nn.Parameter(torch.randn(3))
    parameters = [table] if name == "SparseAdam" else [table, dense]
    optimizer = getattr(torch.optim, name)(parameters, lr=0.1)
    bench = Bench(parameters, optimizer)
    before = table.detach().clone()
    for _ in range(3):
        gradient = torch.sparse_coo_tensor(torch.tensor([[1, 4, 1]]), torch.randn(3, 2), (7, 2), check_invariants=True)
        gradients = {0: gradient.coalesce() if coalesced else gradient}
        gradients |= {1: torch.randn(3)} if len(parameters) == 2 else {}
        for i, value in gradients.items():
            parameters[i].grad = value.clone()
        bench.push(gradients)
        optimizer.step()
    for parameter, weight in zip(parameters, bench.weights, strict=True):
        assert torch.equal(parameter, weight)
    still = [0, 2, 3, 5, 6]
    assert torch.equal(bench.weights[0][still], before[still])
    assert not torch.equal(bench.weights[0][1], before[1])


class Growing(torch.optim.Optimizer):
    """Changes an entry of its own group as it steps."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr, "d": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad * group["lr"] * group["d"])
            group["d"] *= 2.0


def test_what_an_optimizer_changes_in_its_groups_is_the_servers_until_a_rank_changes_it() -> None:
    bench = Bench([p := torch.nn.Parameter(torch.zeros(1))], Growing([p]))
    for rank in (0, 1, 0):
        bench.push({0: torch.ones(1)}, rank=rank)
    assert bench.weights[0].item() == -7.0
    assert bench.server.snapshot().evolved == ([{"d": 8.0}],)
    bench.optimizer.param_groups[0]["d"] = 0.5
    bench.push({0: torch.ones(1)})
    assert bench.weights[0].item() == -7.5


class Again(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    def step(self, closure):
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad)
            with torch.no_grad():
                p.add_(0.0)
        closure()


def test_a_closure_evaluated_on_other_weights_is_refused() -> None:
    bench = Bench([p := torch.nn.Parameter(torch.zeros(1))], Again([p]))
    with pytest.raises(G2Error, match=r"optimizer Again: its step failed .* evaluates its closure again"):
        bench.push({0: torch.ones(1)})


def test_an_optimizer_that_cannot_travel_is_named() -> None:
    import threading

    optimizer = torch.optim.SGD([p := torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.lock = threading.Lock()
    with pytest.raises(ConfigurationError, match=r"optimizer SGD: cannot be sent .* picklable"):
        OptimizerSpec.of(optimizer, {id(p): 0})


def test_masters_collect_updates_too_small_for_half_precision() -> None:
    weight, single = torch.nn.Parameter(torch.ones(4).bfloat16()), torch.nn.Parameter(torch.ones(2))
    bench = Bench([weight, single], torch.optim.SGD([weight, single], lr=2.0**-12), master_dtype=torch.float32)
    for _ in range(63):
        bench.push({0: torch.ones(4).bfloat16(), 1: torch.ones(2)})
    master = torch.full((4,), 1 - 63 * 2.0**-12)
    assert torch.equal(bench.weights[0], master.bfloat16())
    assert bench.weights[0].dtype == torch.bfloat16
    snapshot = bench.server.snapshot()
    assert torch.equal(snapshot.states[0][0][MASTER_KEY], master)
    assert 1 not in snapshot.states[0]
    resumed = ServerState(
        ServerSetup(
            snapshot.layout, snapshot.weights, (OptimizerSpec.of(bench.optimizer, {id(weight): 0, id(single): 1}),), 2,
            torch.float32, {0: master + 2.0**-14},
        )
    )  # fmt: skip
    assert torch.equal(resumed._weights.masters()[0], master + 2.0**-14)
    plain = Bench([weight], torch.optim.SGD([weight], lr=2.0**-12))
    plain.push({0: torch.ones(4).bfloat16()})
    assert torch.equal(plain.weights[0], torch.ones(4).bfloat16()), "without masters the update is lost"


def test_moments_of_masters_are_float32_and_step_as_a_float32_model() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5).bfloat16())
    reference = torch.nn.Parameter(weight.detach().float())
    check = torch.optim.AdamW([reference], lr=0.01)
    bench = Bench([weight], torch.optim.AdamW([weight], lr=0.01), master_dtype=torch.float32)
    for _ in range(5):
        gradient = torch.randn(5).bfloat16()
        reference.grad = gradient.float()
        check.step()
        bench.push({0: gradient})
    state = bench.server.snapshot().states[0][0]
    assert state["exp_avg"].dtype == torch.float32
    assert torch.equal(state[MASTER_KEY], reference.detach())
    assert torch.equal(bench.weights[0], reference.detach().bfloat16())
