"""What a rule's decision costs, in gradients of the task."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_g2.cli.bench.spec import optimizer_of, parse_spec
from lightning_g2.cli.bench.task import Task, loss_of
from lightning_g2.cli.bench.trial import Setting, gate_of
from lightning_g2.routing import Gate, GateContext, GateDecision, build_gate
from lightning_g2.simulate import simulate

_PUSHES = 96
_GRADIENTS = 30


def timed_gate(name: str, options: Mapping[str, Any], times: list[float]) -> Gate:
    """A gate that notes the processor time of each of its decisions.

    Args:
        name: of the gate.
        options: its options.
        times: where seconds are appended.
    """
    gate = build_gate(name, **options)
    decide = gate.decide

    def timed(gradients: Mapping[str, torch.Tensor], context: GateContext) -> GateDecision:
        begin = time.process_time()
        decision = decide(gradients, context)
        times.append(time.process_time() - begin)
        return decision

    gate.decide = timed  # type: ignore[method-assign]
    return gate


def overhead_of(task: Task, setting: Setting, rule: str, lr: float) -> float:
    """Median time of a rule's decisions over that of forward and backward passes, both of one core.

    Of a job of the setting's ranks and delays, after each rank's first pushes. Processor time, so that other processes
    of the machine do not count.

    Args:
        task: module and data.
        setting: ranks, delays, optimizer.
        rule: a gate with its options; rules that gather pushes decide nothing, and cost nothing.
        lr: learning rate.

    Returns:
        Gradients of an ordinary rank a decision, to two digits.
    """
    gate = gate_of(rule)
    if gate is None:
        return 0.0
    times: list[float] = []
    simulate(
        task.model, loss_of, task.batches(), ranks=setting.ranks, pushes=max(_PUSHES, 6 * setting.ranks),
        gate=lambda: timed_gate(*gate, times), optimizer=optimizer_of(setting.optimizer),
        lr=lr, clip=setting.clip, delays=setting.delays, seed=0, evaluation=task.validation[:1],
    )  # fmt: skip
    return float(f"{statistics.median(times[len(times) // 2 :]) / _gradient_s(task):.2g}")


class CostFile:
    """Measured costs on disk, so that a study that goes on charges what it charged before.

    Args:
        path: the file; made when there is something to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def cost(self, task: Task, setting: Setting, rule: str, lr: float) -> float:
        """Cost of a rule, measured unless it is known; see :func:`overhead_of`."""
        key = f"{setting.task} | {parse_spec(rule).text}"
        if key not in self._known:
            self._known[key] = overhead_of(task, setting, rule, lr)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._known, indent=2) + "\n", encoding="utf-8")
        return self._known[key]


def _gradient_s(task: Task) -> float:
    """Median processor time of one forward and backward pass."""
    module, batches = task.model(), task.batches()
    module.train()
    times = []
    for k in range(_GRADIENTS):
        batch = batches(0, k)
        module.zero_grad(set_to_none=True)
        begin = time.process_time()
        loss_of(module, batch).backward()  # type: ignore[no-untyped-call]
        times.append(time.process_time() - begin)
    return statistics.median(times[_GRADIENTS // 3 :])
