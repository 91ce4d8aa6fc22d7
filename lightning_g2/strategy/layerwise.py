"""Layer-wise pushes: each bucket of gradients is routed and sent as soon as backward has produced it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_g2.errors import ConfigurationError
from lightning_g2.server import ParameterLayout
from lightning_g2.strategy.client import PushHead, RankClient, Route
from lightning_g2.strategy.push_in_parts import PushInParts, dense
from lightning_g2.transport import Weights


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel together.

    Attributes:
        indices: their indices in the layout.
        offset: where their gradients lie in the rank's buffer, bytes.
    """

    indices: tuple[int, ...]
    offset: int


def plan_buckets(layout: ParameterLayout, order: Iterable[int], bucket_bytes: int) -> list[Bucket]:
    """Put parameters into buckets.

    Args:
        layout: where the parameters' sizes stand.
        order: their indices, in the order in which backward produces gradients.
        bucket_bytes: most bytes of a bucket; a larger parameter is a bucket of its own.
    """
    buckets: list[Bucket] = []
    members: list[int] = []
    offset = 0

    def close() -> None:
        nonlocal members, offset
        if members:
            buckets.append(Bucket(tuple(members), offset))
            offset += layout.size_bytes(members)
            members = []

    for index in order:
        if layout.size_bytes([*members, index]) > bucket_bytes:
            close()
        members.append(index)
    close()
    return buckets


class LayerwisePush:
    """Sends the gradients of one optimizer bucket by bucket while backward runs, and the rest when it steps.

    All packets of one backward are one push: one version, one count. The first backward tells in which order gradients
    come; its push is whole. Buckets are then filled in that order. The last bucket, parameters that a batch does not
    use, and sparse gradients wait for the step. The gate decides on each bucket by what the server said before the
    first one. Where it finds NaN or Inf, that bucket and all later ones are rejected, and with them the push counts as
    rejected; earlier buckets have been applied.

    Args:
        client: this rank's end of the protocol.
        route: gives the gate's decision function for this step.
        samples: gives the training samples behind the gradients.
        needs_view: whether the gate looks at the server's version, window and scales.
        bucket_bytes: size of a bucket.
        clip_value: bound on each entry of a gradient; None does not clip.
        prefetch: whether the last packet is left under way when the optimizer has stepped.
    """

    def __init__(
        self,
        client: RankClient,
        *,
        route: Callable[[], Route],
        samples: Callable[[], int],
        needs_view: Callable[[], bool],
        bucket_bytes: int,
        clip_value: float | None = None,
        prefetch: bool = False,
    ) -> None:
        self._client = client
        self._route = route
        self._samples = samples
        self._needs_view = needs_view
        self._bucket_bytes = bucket_bytes
        self._clip_value = clip_value
        self._prefetch = prefetch
        self._hooks: dict[int, RemovableHandle] = {}
        self._order: dict[int, None] = {}
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._backward = False
        self._produced: set[int] = set()
        self._missing: dict[Bucket, int] = {}
        self._open: PushInParts | None = None
        self._arrived: Weights | None = None  # by the push before, to be loaded once backward is over

    def install(self) -> None:
        """Nothing to do before the first backward."""

    def remove(self) -> None:
        """Take the hooks off the parameters, and forget the order of gradients."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks, self._order, self._buckets, self._bucket_of = {}, {}, [], {}
        self._open, self._backward = None, False

    def begin_backward(self) -> None:
        """Backward is about to run: gradients that come from now on are those of a training step."""
        if self._client.regrouped:
            self.remove()  # this push is a whole one, which tells the server of the change
            return
        if not self._hooks:
            self._watch(self._client.indices(0))
        self._backward, self._produced = True, set()
        self._missing = {bucket: len(bucket.indices) for bucket in self._buckets}

    def end_backward(self) -> None:
        """Backward is over."""
        self._backward = False

    def step(self, inner: str = "") -> None:
        """Send what has not been sent, wait for all answers, load the weights.

        Args:
            inner: attribute of the optimizer that holds the optimizer to step; empty for itself.
        """
        push, self._open = self._open, None
        if push is None:
            route, needs_view = self._route(), self._needs_view()
            self._client.push(0, route, samples=self._samples(), needs_view=needs_view, inner=inner)
        else:
            self._close(push)
        if self._hooks and len(self._order) != len(self._bucket_of):
            self._buckets = plan_buckets(self._client.layout, self._order, self._bucket_bytes)
            self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.indices}

    def _watch(self, indices: Iterable[int]) -> None:
        for index in indices:
            parameter = self._client.parameter(index)
            if parameter is not None and parameter.requires_grad and index not in self._hooks:
                hook = partial(self._on_gradient, index)
                self._hooks[index] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        if not self._backward:
            return
        if index in self._produced:
            raise ConfigurationError(
                f"push='layerwise': {self._client.layout.specs[index].name!r} was given a gradient twice in one "
                "backward (a second backward, or reentrant checkpointing of a shared parameter), and the first may "
                "have been sent already; use push='whole', or checkpoint with use_reentrant=False"
            )
        self._produced.add(index)
        self._order.setdefault(index)
        bucket = self._bucket_of.get(index)
        if bucket is None:
            return
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            del self._missing[bucket]
            if self._missing:  # the last one goes with the step: there is nothing left to overlap it with
                self._push(bucket)

    def _push(self, bucket: Bucket) -> None:
        gradients = {i: g for i in bucket.indices if (g := self._client.gradient(i)) is not None}
        if not dense(gradients):
            return  # its size changes from push to push: there is no place for it among other buckets
        if self._clip_value is not None:
            torch.nn.utils.clip_grad_value_([p for i in gradients if (p := self._client.parameter(i)) is not None],
                                            self._clip_value)  # fmt: skip
        if self._open is None:
            self._open = self._begin()
        self._open.send(gradients, at=bucket.offset)

    def _begin(self) -> PushInParts:
        base = self._client.base_version
        self._client.send_edits()
        self._arrived = self._client.await_replies()
        view = self._client.view(base, needs_view=self._needs_view())
        return PushInParts(self._client, PushHead(0, base, view, self._samples()), self._route)

    def _close(self, push: PushInParts) -> None:
        client = self._client
        if self._arrived is not None:
            client.load(self._arrived)
        rest = {i: g for i, g in client.gradients(0).items() if i not in push.dealt_with}
        self._watch(rest)
        self._order |= dict.fromkeys(rest)
        at = next((b.offset for b in self._buckets if set(b.indices) == rest.keys() and dense(rest)), None)
        if rest and at is None:
            client.await_replies()  # it is written over what was sent before
        push.close(rest, at=at or 0)
        if not self._prefetch:
            client.finish()
