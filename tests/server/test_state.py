from dataclasses import replace

import pytest
import torch

from lightning_g2.errors import DroppedError, ProtocolError
from lightning_g2.server import OptimizerSpec, ParameterLayout, ServerSetup, ServerState, flatten
from lightning_g2.values import PushPacket, WeightEdit


def _server(
    parameters: list[torch.nn.Parameter], *optimizers: torch.optim.Optimizer, ranks: int = 2
) -> tuple[ServerState, ParameterLayout]:
    layout = ParameterLayout.of((f"p{i}", p.detach()) for i, p in enumerate(parameters))
    weights = layout.allocate()
    flatten(layout, [p.detach() for p in parameters], layout.all(), weights)
    index = {id(p): i for i, p in enumerate(parameters)}
    specs = tuple(OptimizerSpec.of(o, index) for o in optimizers)
    return ServerState(ServerSetup(layout, weights, specs, ranks)), layout


def _buffer(layout: ParameterLayout, tensors: list[torch.Tensor], present: tuple[int, ...]) -> torch.Tensor:
    buffer = layout.allocate(present)
    flatten(layout, tensors, present, buffer)
    return buffer


def _packet(torch_optimizer: torch.optim.Optimizer, /, **fields: object) -> PushPacket:
    groups = tuple({k: v for k, v in g.items() if k != "params"} for g in torch_optimizer.param_groups)
    return replace(PushPacket(rank=0, lane=0, sequence=0, base_version=0, groups=groups, present=(0,)), **fields)


@pytest.fixture
def sgd() -> tuple[ServerState, ParameterLayout, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    server, layout = _server([parameter], optimizer)
    return server, layout, optimizer


def _weights(server: ServerState, layout: ParameterLayout) -> list[torch.Tensor]:
    return layout.views(server.weights()[1])


def test_a_push_moves_weights_and_version(sgd) -> None:
    server, layout, optimizer = sgd
    receipt = server.push(_packet(optimizer), _buffer(layout, [torch.ones(4)], (0,)), time_s=1.0)
    assert (receipt.version, receipt.staleness, receipt.applied) == (1, 0, True)
    assert torch.equal(_weights(server, layout)[0], -torch.ones(4))


@pytest.mark.parametrize(("samples", "moved"), [((4, 4, 4), 3.0), ((1, 3), 2.5), ((2, 0), 1.0), ((0, 0), 2.0)])
def test_pushes_can_be_weighted_by_their_samples(samples, moved) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    layout = ParameterLayout.of([("p0", parameter.detach())])
    spec = OptimizerSpec.of(optimizer, {id(parameter): 0})
    server = ServerState(ServerSetup(layout, layout.allocate(), (spec,), 1, weight_by_samples=True))
    for sequence, count in enumerate(samples):
        gradients = _buffer(layout, [torch.ones(4)], (0,))
        server.push(_packet(optimizer, sequence=sequence, samples=count), gradients, time_s=0.0)
    assert torch.equal(_weights(server, layout)[0], torch.full((4,), -moved))


def test_a_repeated_push_is_answered_alike_and_applied_once(sgd) -> None:
    server, layout, optimizer = sgd
    ones = _buffer(layout, [torch.ones(4)], (0,))
    first = server.push(_packet(optimizer), ones, time_s=0.0)
    assert server.push(_packet(optimizer), ones, time_s=1.0) == first
    assert server.version == 1
    assert torch.equal(_weights(server, layout)[0], -torch.ones(4))


def test_what_a_dropped_rank_sends_late_is_refused_and_moves_nothing(sgd) -> None:
    server, layout, optimizer = sgd
    ones = _buffer(layout, [torch.ones(4)], (0,))
    server.push(_packet(optimizer, rank=1, energy=1.0, staleness=1), ones, time_s=0.0)
    assert server.view().window.keys() == {1}
    assert server.view().ranks == 2
    server.drop(1, time_s=1.0)
    assert server.view().window == {}, "an energy of nobody says nothing about the ranks that are left"
    assert server.view().ranks == 1
    for sequence in (0, 1):  # repeated, and new
        with pytest.raises(DroppedError, match=f"push {sequence} of rank 1, lease 0: the rank has left the job"):
            server.push(_packet(optimizer, rank=1, sequence=sequence), ones, time_s=2.0)
    with pytest.raises(DroppedError, match="lease 3"):
        server.push(_packet(optimizer, lease=3), ones, time_s=2.0)
    assert server.version == 1
    assert torch.equal(_weights(server, layout)[0], -torch.ones(4))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"sequence": 2}, "expects push 0; a push was lost"),
        ({"rank": 5}, "ranks are 0 to 1"),
        ({"optimizer": 3}, "optimizer 3 of 1"),
        ({"base_version": 7}, "base version 7 lies after the current 0"),
        ({"present": (0,), "rejected": True}, "expected 0"),
        ({"groups": ()}, "0 parameter groups pushed"),
    ],
)
def test_a_packet_that_breaks_the_protocol_is_named_and_changes_nothing(sgd, fields, match) -> None:
    server, layout, optimizer = sgd
    with pytest.raises(ProtocolError, match=match):
        server.push(_packet(optimizer, **fields), _buffer(layout, [torch.ones(4)], (0,)), time_s=0.0)
    assert server.version == 0
    assert torch.equal(_weights(server, layout)[0], torch.zeros(4))


def test_staleness_is_the_number_of_updates_since_the_base(sgd) -> None:
    server, layout, optimizer = sgd
    ones = _buffer(layout, [torch.ones(4)], (0,))
    for sequence in range(5):
        server.push(_packet(optimizer, sequence=sequence, base_version=sequence), ones, time_s=0.0)
    receipt = server.push(_packet(optimizer, rank=1, base_version=1), ones, time_s=0.0)
    assert (receipt.staleness, receipt.version) == (4, 6)


def test_a_rejected_push_is_counted_and_changes_nothing(sgd) -> None:
    server, layout, optimizer = sgd
    receipt = server.push(_packet(optimizer, rejected=True, present=()), None, time_s=0.0)
    assert (receipt.version, receipt.applied) == (0, False)
    totals = server.telemetry.totals()[0]
    assert (totals.rejected, totals.pushes) == (1, 0)
    ones = _buffer(layout, [torch.ones(4)], (0,))
    assert server.push(_packet(optimizer, sequence=1), ones, time_s=0.0).version == 1


def test_hyper_parameters_come_with_each_push(sgd) -> None:
    server, layout, optimizer = sgd
    ones = _buffer(layout, [torch.ones(4)], (0,))
    optimizer.param_groups[0]["lr"] = 0.25
    server.push(_packet(optimizer), ones, time_s=0.0)
    assert torch.equal(_weights(server, layout)[0], torch.full((4,), -0.25))


def test_published_weights_never_change_afterwards(sgd) -> None:
    server, layout, optimizer = sgd
    version, published = server.weights()
    server.push(_packet(optimizer), _buffer(layout, [torch.ones(4)], (0,)), time_s=0.0)
    assert version == 0
    assert torch.equal(layout.views(published)[0], torch.zeros(4))


def test_parameters_without_gradient_and_their_moments_stay() -> None:
    used, unused = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([used, unused], lr=0.1, weight_decay=0.5)
    server, layout = _server([used, unused], optimizer)
    for sequence in range(3):
        packet = _packet(optimizer, sequence=sequence, base_version=sequence)
        server.push(packet, _buffer(layout, [torch.ones(3)], (0,)), time_s=0.0)
    assert torch.equal(_weights(server, layout)[1], torch.ones(3))
    assert not torch.equal(_weights(server, layout)[0], torch.ones(3))
    assert set(server.snapshot().states[0]) == {0}


def test_each_optimizer_moves_its_own_parameters() -> None:
    one, two = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    first, second = torch.optim.SGD([one], lr=1.0), torch.optim.SGD([two], lr=2.0)
    server, layout = _server([one, two], first, second)
    server.push(_packet(second, optimizer=1, present=(1,)), _buffer(layout, [torch.ones(2)], (1,)), time_s=0.0)
    moved = _weights(server, layout)
    assert torch.equal(moved[0], torch.zeros(2))
    assert torch.equal(moved[1], torch.full((2,), -2.0))


def test_window_holds_effective_energies_of_live_ranks_and_scale_a_decaying_maximum(sgd) -> None:
    server, layout, optimizer = sgd
    ones = _buffer(layout, [torch.ones(4)], (0,))
    server.push(_packet(optimizer, energy=1.5, staleness=0, scale={"b": 2.0}), ones, time_s=0.0)
    server.push(_packet(optimizer, rank=1, energy=1.0, staleness=3, scale={"b": 1.0}), ones, time_s=0.0)
    view = server.view()
    assert view.window == {0: 0.0, 1: pytest.approx(1.5)}  # Ê = E·τK/N with N = 2
    assert view.scale["b"] == pytest.approx(2.0 * 0.9995)
    server.drop(1, time_s=0.0)
    assert set(server.view().window) == {0}


DENSE = [
    name
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
    if hasattr(torch.optim, name)
]  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "resumed"])
def test_the_servers_optimizer_is_the_modules_bit_for_bit(name: str, warm: bool) -> None:
    """Every dense optimizer of torch, built anew or in the middle of training, steps on the server as it would here."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(6, 5)), torch.nn.Parameter(torch.randn(5, 7))]
    optimizer = getattr(torch.optim, name)(parameters, lr=0.01)
    gradients = [[torch.randn_like(p) for p in parameters] for _ in range(6)]

    def step(index: int) -> None:
        for parameter, gradient in zip(parameters, gradients[index], strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()

    for index in range(2 if warm else 0):
        step(index)
    server, layout = _server(parameters, optimizer, ranks=1)
    for sequence, index in enumerate(range(2, 6)):
        packet = _packet(optimizer, sequence=sequence, base_version=sequence, present=(0, 1))
        server.push(packet, _buffer(layout, gradients[index], (0, 1)), time_s=0.0)
        step(index)
    for mine, theirs in zip(parameters, _weights(server, layout), strict=True):
        assert torch.equal(mine, theirs)


def test_options_of_the_users_optimizer_are_honoured() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    server, _ = _server([parameter], torch.optim.AdamW([parameter], fused=True, amsgrad=True))
    built = server._served[0].optimizer
    assert built.param_groups[0]["fused"] is True
    assert built.param_groups[0]["amsgrad"] is True


def _edit(
    server: ServerState, layout: ParameterLayout, value: torch.Tensor, before: torch.Tensor, **fields: int
) -> None:
    edit = WeightEdit(**{"rank": 0, "base_version": 0, "indices": (0,), **fields})
    server.edit(edit, _buffer(layout, [value], (0,)), _buffer(layout, [before], (0,)))


def test_an_edit_sets_what_it_has_changed(sgd) -> None:
    server, layout, _ = sgd
    _edit(server, layout, torch.tensor([0.0, 0.1, 0.0, 0.3]), torch.zeros(4))
    assert torch.equal(_weights(server, layout)[0], torch.tensor([0.0, 0.1, 0.0, 0.3]))
    assert server.version == 0, "an edit is no update"


def test_a_late_edit_leaves_what_others_have_pushed(sgd) -> None:
    server, layout, optimizer = sgd
    server.push(_packet(optimizer, rank=1), _buffer(layout, [torch.ones(4)], (0,)), time_s=0.0)
    _edit(server, layout, torch.tensor([0.5, 0.0, 0.0, 0.0]), torch.zeros(4))
    assert torch.equal(_weights(server, layout)[0], torch.tensor([-0.5, -1.0, -1.0, -1.0]))


def test_a_late_edit_of_a_parameter_that_no_gradient_moves_sets_it() -> None:
    moved, target = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = torch.optim.SGD([moved, target], lr=1.0)
    server, layout = _server([moved, target], optimizer)
    server.push(_packet(optimizer), _buffer(layout, [torch.ones(4)], (0,)), time_s=0.0)
    for rank in range(2):
        edit = WeightEdit(rank=rank, base_version=rank, indices=(1,))
        new, old = (_buffer(layout, [torch.full((4,), value)], (1,)) for value in (2.0, 0.0))
        server.edit(edit, new, old)
    assert torch.equal(_weights(server, layout)[1], torch.full((4,), 2.0))


def test_an_edit_that_all_ranks_make_from_one_version_counts_once(sgd) -> None:
    server, layout, optimizer = sgd
    for rank in range(2):
        _edit(server, layout, torch.full((4,), 1.0 + rank), torch.zeros(4), rank=rank)
    assert torch.equal(_weights(server, layout)[0], torch.ones(4))
    server.push(_packet(optimizer), _buffer(layout, [torch.ones(4)], (0,)), time_s=0.0)
    _edit(server, layout, torch.full((4,), 5.0), torch.zeros(4), rank=1, base_version=1)
    assert torch.equal(_weights(server, layout)[0], torch.full((4,), 5.0))
