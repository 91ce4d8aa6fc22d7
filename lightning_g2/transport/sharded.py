"""Several servers as one: a rank's transport that is made of one transport to each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_g2.errors import G2Error, ServerLostError
from lightning_g2.server import ParameterLayout, ServerSetup, ServerSnapshot, Shards
from lightning_g2.transport.base import Pending, Transport
from lightning_g2.transport.host import Gathered, PushReply, SyncReply, Weights
from lightning_g2.transport.versions import Versions
from lightning_g2.values import (
    EpochRecord,
    PushPacket,
    PushRecord,
    RankTotals,
    ServerView,
    Ticket,
    TicketRequest,
    WeightEdit,
)

T = TypeVar("T")


class ShardedTransport(Transport):
    """One rank's connection to several servers, each of which owns whole tensors.

    A push goes to every server with the gradients of its tensors, to some with none: so each counts every push, and all
    have the same version when no push is under way. Each applies pushes in the order in which they reach it, hence
    weights are of one version server by server, and the same everywhere at sync points. Server 0 coordinates: it hands
    out windows, and keeps the gate's window and scales, telemetry, the job's staleness and the balance of bytes.

    Args:
        children: a connection to each server, server 0 first.
    """

    def __init__(self, children: Sequence[Transport]) -> None:
        self._children = list(children)
        self._shards = Shards(len(children))
        self._order: list[str] = []
        self._arrived = torch.empty(0, dtype=torch.uint8)
        self._gradients = torch.empty(0, dtype=torch.uint8)
        self._filled = [0] * len(children)  # of each server's buffer, by packets of the push under way
        self._pool = ThreadPoolExecutor(len(children), thread_name_prefix="g2-server")

    def start(self) -> None:
        """Connect to all servers, once all have come up: whoever joins the session waits for all of them."""
        for child in self._children:
            child.await_server()
        for child in self._children:
            child.start()

    def configure(self, setup: ServerSetup) -> None:
        """See :meth:`Transport.configure`; the largest tensors first, each to the server with the fewest bytes."""
        self._order = [spec.name for spec in setup.layout.specs]
        owners = self._children[0].assign(setup.layout, len(self._children), anew=True)
        self._shards.learn(
            [
                ParameterLayout(tuple(spec for spec in setup.layout.specs if owners[spec.name] == server))
                for server in range(len(self._children))
            ],
            self._order,
        )
        setups = self._shards.setups(setup)
        self._each(lambda server, child: child.configure(setups[server]))

    def layout(self) -> ParameterLayout:
        """See :meth:`Transport.layout`."""
        self._shards.learn(self._each(lambda _, child: child.layout()), self._order)
        return self._shards.layout

    def assign(self, layout: ParameterLayout, servers: int, *, anew: bool = False) -> dict[str, int]:
        """See :meth:`Transport.assign`."""
        return self._children[0].assign(layout, servers, anew=anew)

    def adopt(self, layout: ParameterLayout, values: Tensor) -> ParameterLayout:
        """See :meth:`Transport.adopt`; new parameters go to the server that has the fewest bytes."""
        owners = self.assign(layout, len(self._children))
        views = layout.views(values)

        def adopt(server: int, child: Transport) -> ParameterLayout:
            # Servers that are given nothing are asked, too: other ranks may have brought them something.
            given = [i for i, spec in enumerate(layout.specs) if owners[spec.name] == server]
            share = ParameterLayout(tuple(layout.specs[i] for i in given))
            buffer = share.allocate()
            _copy(share.views(buffer), [views[i] for i in given])
            return child.adopt(share, buffer)

        self._shards.learn(self._each(adopt), [*self._order, *(spec.name for spec in layout.specs)])
        return self._shards.layout

    def view(self) -> ServerView:
        """See :meth:`Transport.view`; what server 0 says."""
        return self._children[0].view()

    def gradient_buffer(self, size_bytes: int, offset: int = 0) -> Tensor:
        """See :meth:`Transport.gradient_buffer`; :meth:`push` copies from it, so that it is free again after that."""
        if self._gradients.numel() < size_bytes:
            on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            self._gradients = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        return self._gradients[:size_bytes]

    def push(self, packet: PushPacket, gradients: Tensor | None) -> Pending[PushReply]:
        """See :meth:`Transport.push`; the servers take their shares in at the same time."""
        shares = self._shards.split(packet.present)
        members = [self._shards.split(group) for group in packet.members]
        entries: dict[int, list[Tensor]] = {}  # a sparse gradient has two
        if gradients is not None:
            wire = self._shards.layout.of_gradients(packet.present, packet.sparse, packet.wire)
            parts = iter(wire.views(gradients))
            entries = {i: [next(parts) for _ in range(1 + (i in packet.sparse))] for i in packet.present}
        pushes = []
        for server, (child, present) in enumerate(zip(self._children, shares, strict=True)):
            sparse = {i: packet.sparse[i] for i in present if i in packet.sparse}
            own = replace(
                packet,
                base_version=Versions.at(packet.base_version, server),
                present=self._shards.local(present),
                members=tuple(self._shards.local(group[server]) for group in members),
                sparse={self._shards.local([i])[0]: shape for i, shape in sparse.items()},
                scale=packet.scale if server == 0 else {},
                exponents={self._shards.local([i])[0]: packet.exponents[i] for i in present if i in packet.exponents},
            )
            share = [entry for i in present for entry in entries[i]] if entries else []
            buffer = None if gradients is None else self._share(child, server, own, share)
            pushes.append(child.push(own, buffer))
        if packet.last:
            self._filled = [0] * len(self._children)
        return _Pushes(pushes, self._reply)

    def edit(self, edit: WeightEdit, values: Tensor, before: Tensor) -> None:
        """See :meth:`Transport.edit`."""
        tensors = [
            dict(zip(edit.indices, self._shards.layout.views(buffer, edit.indices), strict=True))
            for buffer in (values, before)
        ]
        shares = self._shards.split(edit.indices)

        def send(server: int, child: Transport) -> None:
            if not shares[server]:
                return
            indices = self._shards.local(shares[server])
            layout = self._shards.layouts[server]
            buffers = [layout.allocate(indices) for _ in tensors]
            for buffer, given in zip(buffers, tensors, strict=True):
                _copy(layout.views(buffer, indices), [given[i] for i in shares[server]])
            base = Versions.at(edit.base_version, server)
            child.edit(replace(edit, base_version=base, indices=indices), *buffers)

        self._each(send)

    def pull(self) -> Weights:
        """See :meth:`Transport.pull`; from all servers at once."""
        return self._joined(self._each(lambda _, child: child.pull()))

    def sync(self, point: str) -> SyncReply:
        """See :meth:`Transport.sync`: first at server 0, which says who meets, then at all others.

        Every server releases the ranks with its weights of that moment, and none pushes before all have released it.
        """
        first, *others = self._children
        reply = first.sync(point)
        if len(reply.release.participants) > 1:
            rest = [r.weights for r in self._at(others, lambda child: child.sync(point))]
        else:  # alone here: those that wait elsewhere come to no other server before they are released
            rest = self._at(others, lambda child: child.pull())
        weights = self._joined([reply.weights, *rest])
        return SyncReply(replace(reply.release, version=weights.version), weights)

    def ticket(self, request: TicketRequest) -> Ticket:
        """See :meth:`Transport.ticket`; server 0 hands them out."""
        return self._children[0].ticket(request)

    def gather(self, kind: str, share: Tensor | None) -> Gathered:
        """See :meth:`Transport.gather`; at server 0."""
        return self._children[0].gather(kind, share)

    def snapshot(self) -> ServerSnapshot:
        """See :meth:`Transport.snapshot`: one version server by server, put together as if there were one server."""
        return self._shards.merged(self._each(lambda _, child: child.snapshot()))

    def drain(self) -> list[PushRecord]:
        """See :meth:`Transport.drain`; as server 0 saw them."""
        return self._children[0].drain()

    def totals(self) -> dict[int, RankTotals]:
        """See :meth:`Transport.totals`; as server 0 counts them."""
        return self._children[0].totals()

    def epoch(self) -> EpochRecord | None:
        """See :meth:`Transport.epoch`; server 0 hands the batches out."""
        return self._children[0].epoch()

    def check(self) -> None:
        """See :meth:`Transport.check`."""
        self._children[0].check()

    def fail(self, rank: int, reason: str, stopped: bool = False) -> None:
        """See :meth:`Transport.fail`; told to every server that can be reached, for ranks may wait at any."""
        self._each(lambda _, child: child.fail(rank, reason, stopped))

    def drop(self, rank: int, reason: str) -> bool:
        """See :meth:`Transport.drop`; server 0 tells the others."""
        return self._children[0].drop(rank, reason)

    def dropped(self) -> dict[int, str]:
        """See :meth:`Transport.dropped`."""
        return self._children[0].dropped()

    def leave(self, *, done: bool = False) -> None:
        """See :meth:`Transport.leave`; server 0 last: once all have left it, the servers may be stopped."""
        first, *others = self._children
        try:
            self._at(others, lambda child: child.leave(done=done))
        finally:
            first.leave(done=done)

    def live_ranks(self) -> tuple[int, ...]:
        """See :meth:`Transport.live_ranks`."""
        return self._children[0].live_ranks()

    def close(self) -> None:
        """Disconnect from all servers, server 0 last."""
        for child in reversed(self._children):
            with suppress(G2Error):
                child.close()
        self._pool.shutdown(wait=False)

    def _share(self, child: Transport, server: int, packet: PushPacket, entries: list[Tensor]) -> Tensor:
        """One server's buffer, filled."""
        wire = self._shards.layouts[server].of_gradients(packet.present, packet.sparse, packet.wire)
        buffer = child.gradient_buffer(wire.size_bytes(), self._filled[server])
        self._filled[server] += wire.size_bytes()
        _copy(wire.views(buffer), entries)
        return buffer

    def _reply(self, replies: Sequence[PushReply]) -> PushReply:
        shares = [reply.weights for reply in replies if reply.weights is not None]
        if len(shares) < len(replies):  # not the last packet of its push
            return PushReply(replies[0].receipt, None)
        size = self._shards.layout.size_bytes()
        if self._arrived.numel() != size:
            self._arrived = self._shards.layout.allocate()
        weights = self._joined(shares, self._arrived)
        return PushReply(replace(replies[0].receipt, version=weights.version), weights)

    def _joined(self, weights: Sequence[Weights], into: Tensor | None = None) -> Weights:
        """All servers' weights in one buffer of the rank's layout."""
        buffer = self._shards.layout.allocate() if into is None else into
        views = self._shards.layout.views(buffer)
        for server, (own, layout) in enumerate(zip(weights, self._shards.layouts, strict=True)):
            arrived = layout.views(own.buffer[: layout.size_bytes()])
            _copy([views[i] for i in self._shards.whole(server)], arrived)
        return Weights(Versions.of([own.version for own in weights]), buffer)

    def _each(self, ask: Callable[[int, Transport], T]) -> list[T]:
        """Ask every server at once; all answers are awaited before the first error is raised, server 0's before all."""
        return _settled([self._asked(ask, server, child) for server, child in enumerate(self._children)])

    def _at(self, children: Sequence[Transport], ask: Callable[[Transport], T]) -> list[T]:
        return _settled([self._asked(ask, child) for child in children])

    def _asked(self, ask: Callable[..., T], *arguments: Any) -> Future[T]:
        try:
            return self._pool.submit(ask, *arguments)
        except RuntimeError as error:
            raise ServerLostError("this rank is not connected to its servers: the transport is closed") from error


class _Pushes(Pending[PushReply]):
    """A push that is under way to every server."""

    def __init__(self, pushes: Sequence[Pending[PushReply]], join: Callable[[Sequence[PushReply]], PushReply]) -> None:
        self._pushes = pushes
        self._join = join

    def done(self) -> bool:
        return all(push.done() for push in self._pushes)

    def wait(self) -> PushReply:
        return self._join([push.wait() for push in self._pushes])


def _settled(asked: Sequence[Future[Any]]) -> list[Any]:
    errors = [error for error in (future.exception() for future in asked) if error is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in asked]


def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if into:
        with torch.no_grad():
            torch._foreach_copy_(list(into), list(values))
