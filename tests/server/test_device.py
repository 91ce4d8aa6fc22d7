"""A server on another device keeps and steps everything there; what comes and goes lies on the CPU.

The other device is torch's ``meta``: it has shapes and no values, and refuses to be mixed with the CPU.
"""

from __future__ import annotations

import pytest
import torch

from lightning_g2.server import OptimizerSpec, ParameterLayout, ServerSetup, ServerState, flatten
from lightning_g2.values import PushPacket, WeightEdit


def _state(device: str, *, fused: bool = False) -> ServerState:
    parameters = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = optimizer.state[parameters[1]]
    moments.update({key: moments[key].float() for key in ("exp_avg", "exp_avg_sq")})  # of a float32 master
    optimizer.param_groups[0]["fused"] = fused
    layout = ParameterLayout.of([("a", parameters[0].detach()), ("b", parameters[1].detach())])
    weights = layout.allocate()
    flatten(layout, [p.detach() for p in parameters], layout.all(), weights)
    spec = OptimizerSpec.of(optimizer, {id(p): i for i, p in enumerate(parameters)})
    masters = {1: parameters[1].detach().float()}
    return ServerState(
        ServerSetup(layout, weights, (spec,), 1, master_dtype=torch.float32, masters=masters, device=device)
    )


def _work(state: ServerState) -> None:
    """A push, a change by hand, a parameter that comes later and a push of its gradient."""
    packet = PushPacket(rank=0, lane=0, sequence=0, base_version=0, groups=({"lr": 0.1},), present=(0, 1))
    state.push(packet, torch.zeros(state.layout.size_bytes(), dtype=torch.uint8), time_s=0.0)
    values = state.layout.allocate((0,))
    state.edit(WeightEdit(0, 1, (0,)), values, values.clone())
    more = ParameterLayout.of([("late", torch.zeros(4))])
    state.adopt(more, more.allocate())
    packet = PushPacket(rank=0, lane=0, sequence=1, base_version=1, groups=({},), members=((0, 2),), present=(2,))
    state.push(packet, state.layout.allocate((2,)), time_s=0.0)


def test_weights_moments_and_steps_are_on_the_device() -> None:
    state = _state("meta")
    _work(state)
    assert state.version == 2
    parameters = state._weights.parameters
    assert [parameter.device.type for parameter in parameters] == ["meta"] * 3
    assert state._weights.buffer.device.type == "meta"
    for values in state._served[0].optimizer.state.values():
        assert {key: value.device.type for key, value in values.items()} == {
            "step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"
        }  # fmt: skip
    for read in (state.weights, state.snapshot):
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            read()


def test_fused_optimizers_have_their_counts_there_too() -> None:
    state = _state("meta", fused=True)
    assert {v["step"].device.type for v in state._served[0].optimizer.state.values()} == {"meta"}


def test_on_the_cpu_nothing_is_copied_on_the_way_in() -> None:
    state = _state("cpu:0")
    _work(state)
    version, weights = state.weights()
    assert (version, weights.device.type) == (2, "cpu")
    assert weights.untyped_storage().nbytes() == state.layout.size_bytes(), "RPC sends whole storages"
