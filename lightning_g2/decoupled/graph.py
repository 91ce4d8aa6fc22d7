"""A batch under way: its own leaves over the weights, its graph, and the gradients it has brought so far."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_g2.decoupled.ambient import Ambient
from lightning_g2.decoupled.layer import Layout
from lightning_g2.decoupled.options import Weights
from lightning_g2.errors import ConfigurationError

Gradients = dict[int, Tensor]
"""Gradients by the number of their parameter."""


class Window:
    """Batches that make one update together.

    Args:
        size: how many.

    Attributes:
        begun: batches of it so far.
        finished: batches that are through.
        updates: any of them has brought gradients.
        stamp: what the runner's ``stamp`` said when the first of their forward passes began.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.begun = self.finished = 0
        self.updates = False
        self.stamp: Any = None
        self._lock = threading.Lock()
        self._arrived: dict[int, int] = {}
        self._sums: dict[int, Gradients] = {}

    def stamp_by(self, ask: Callable[[], Any]) -> None:
        """Ask for the stamp, the first time."""
        with self._lock:
            if self.stamp is None:
                self.stamp = ask()

    def add(self, layer: int, gradients: Gradients) -> Gradients | None:
        """Add one batch's gradients of a layer.

        Returns:
            The sum, once all batches have come.
        """
        if self.size == 1:
            return gradients
        with self._lock:
            sums = self._sums.setdefault(layer, {})
            for number, gradient in gradients.items():
                if number in sums:
                    sums[number] += gradient
                else:
                    sums[number] = gradient
            self._arrived[layer] = self._arrived.get(layer, 0) + 1
            return self._sums.pop(layer) if self._arrived[layer] == self.size else None

    def rest(self) -> dict[int, Gradients]:
        """Sums by layer that still wait for batches; they are given up."""
        sums, self._sums = self._sums, {}
        return sums


class Graph:
    """One batch between its submission and its update.

    Each batch has leaves of its own, so that two backward passes never write one ``.grad``. They come from ``.data``:
    the leaf of a batch then has a version counter of its own, and an update in place between forward and backward
    passes for what it is meant to be.

    Args:
        sequence: number of the batch.
        data: what the loss takes.
        window: the update that it belongs to.
        ambient: settings of the thread that has submitted it.

    Attributes:
        leaves: by parameter number, once the forward pass has begun.
        reads: version of each layer that the forward pass has read.
        starts: version of each layer when the backward pass began.
        reached: the versions' clock when the backward pass reached the layer it is at.
        loss: the root of the graph; None where the batch has none.
        ready: event on the submitter's stream behind which the data are there; None on the CPU.
        stream: of this batch; None on the CPU.
    """

    def __init__(self, sequence: int, data: Any, window: Window, ambient: Ambient) -> None:
        self.sequence, self.data, self.window, self.ambient = sequence, data, window, ambient
        self.leaves: list[nn.Parameter] = []
        self.reads: list[int] = []
        self.starts: list[int] = []
        self.reached = 0
        self.loss: Tensor | None = None
        self.ready: torch.Event | None = None
        self.stream: torch.Stream | None = None
        self._gathered: dict[int, Gradients] = {}
        self._missing: dict[int, int] = {}
        self._handed_over: set[int] = set()

    def take_leaves(self, layout: Layout, weights: Weights, block: range | None = None) -> None:
        """Make the leaves, over the weights' own storage or over copies; outside the block they need no gradient."""
        trains = [p.requires_grad and (block is None or n in block) for n, p in enumerate(layout.parameters)]
        stash = weights == "stashed"
        self.leaves = [
            nn.Parameter(p.data.clone() if stash and p.requires_grad else p.data, requires_grad=needed)
            for p, needed in zip(layout.parameters, trains, strict=True)
        ]

    def watch(self, layout: Layout, on_layer: Callable[[int, Gradients], None]) -> None:
        """Have each layer's gradients handed over as soon as all are there.

        Args:
            layout: the parameters.
            on_layer: takes a layer's index and its gradients.
        """

        def gathered(leaf: Tensor, number: int) -> None:
            layer = layout.layer_of[number]
            if self._missing[layer] == 0:
                raise ConfigurationError(
                    f"parameter {layout.names[number]!r}: got a second gradient in one backward pass; the backward "
                    "given to the runner must walk the graph once"
                )
            assert leaf.grad is not None
            self._gathered.setdefault(layer, {})[number] = leaf.grad
            leaf.grad = None
            self._missing[layer] -= 1
            if self._missing[layer] == 0:
                self._handed_over.add(layer)
                on_layer(layer, self._gathered.pop(layer))

        self._missing = {
            layer.index: sum(self.leaves[n].requires_grad for n in layer.parameters) for layer in layout.layers
        }
        for number, leaf in enumerate(self.leaves):
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(_Numbered(gathered, number))  # type: ignore[no-untyped-call]

    def rest(self, layout: Layout) -> dict[int, Gradients]:
        """By layer, gradients of those that were not handed over, since not all of theirs came; empty for most."""
        return {
            layer.index: self._gathered.pop(layer.index, {})
            for layer in layout.layers
            if layer.index not in self._handed_over
        }

    def free(self) -> None:
        """Let go of graph, leaves and data."""
        self.loss, self.data, self.leaves = None, None, []


class _Numbered:
    """A hook that knows its parameter's number."""

    def __init__(self, call: Callable[[Tensor, int], None], number: int) -> None:
        self._call, self._number = call, number

    def __call__(self, leaf: Tensor) -> None:
        self._call(leaf, self._number)


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a training step returned.

    Args:
        output: a tensor, a mapping with ``"loss"``, or None.

    Raises:
        ConfigurationError: anything else, or a loss that is no scalar.
    """
    loss = output.get("loss") if isinstance(output, dict) else output
    if loss is not None and not isinstance(loss, Tensor):
        raise ConfigurationError(
            f"training step returned {type(output).__name__}: must be a tensor, a dict with 'loss', or None to skip "
            "the batch"
        )
    if loss is not None and loss.numel() != 1:
        raise ConfigurationError(f"loss of shape {tuple(loss.shape)}: must be a scalar; take its mean")
    return loss


def refuse_bypass(layout: Layout, before: Sequence[Tensor | None]) -> None:
    """Refuse a module whose forward pass went to the parameters themselves.

    Args:
        layout: the module's parameters.
        before: their gradients before the pass.

    Raises:
        ConfigurationError: a parameter has got a gradient.
    """
    for name, parameter, earlier in zip(layout.names, layout.parameters, before, strict=True):
        if parameter.grad is not None and earlier is None:
            raise ConfigurationError(
                f"parameter {name!r}: the forward pass used it past the thread's copy of the module, so the module "
                "keeps a reference to itself that cannot be followed (in a closure, functools.partial or compiled "
                "function); reach submodules through attributes of self"
            )


def autograd_in_this_thread(device: torch.device) -> Any:
    """On an accelerator, keep the backward pass in the calling thread: the engine's device thread serves all alike."""
    return torch.autograd.set_multithreading_enabled(device.type == "cpu")
