"""A process group whose collectives go through the server, so that a rank that dies holds nobody up.

Gloo connects ranks with each other: one that dies in a collective breaks it for some and lets others wait, and one that
is frozen lets all wait; nobody can tell who is through with it. Here each rank hands its share to server 0, which hands
all shares to all; a rank that the server drops is waited for no longer, and the outcome is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from lightning_g2.errors import TransportError

Exchange = Callable[[str, Tensor | None], Mapping[int, Tensor]]
"""Takes part in a collective of a kind with a share, gives the shares by rank of the job; see ``Transport.gather``."""

_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


_ProcessGroup: Any = dist.ProcessGroup  # typed for its C++ callers, not for subclasses in Python


class _Done(dist.Work):
    """A collective that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class ServerGroup(_ProcessGroup):  # type: ignore[misc]
    """The default process group of a rank while it trains with others.

    Its members are the ranks that met last, numbered without gaps; rank 0 of the job is always the first. Where a
    member dies within a collective, callers still get as many values as there were members: its own are then those of
    the lowest rank that is left, so that means stay means.

    Args:
        exchange: hands shares around.
        rank: this rank of the job.
        members: the ranks of the job that are together.
    """

    def __init__(self, exchange: Exchange, rank: int, members: Sequence[int]) -> None:
        super().__init__(rank, len(members))
        self._exchange = exchange
        self._own = rank
        self._members = tuple(members)
        self._replaced: dist.ProcessGroup | None = None

    # --- its place as the default group -------------------------------------------------------------------------------

    def install(self) -> None:
        """Become the default group, in place of the one that is it."""
        former = c10d._get_default_group()
        for table in self._tables():
            table[self] = table[former]
        self._replaced = former
        self._set_group_name(former.group_name)  # torch's functional collectives look groups up by name
        self._number()
        c10d._update_default_pg(self)

    def remove(self) -> None:
        """Give the former default group its place back; may be called any number of times."""
        replaced, self._replaced = self._replaced, None
        if replaced is None:
            return
        for table in (*self._tables(), c10d._world.pg_group_ranks):
            table.pop(self, None)
        if c10d._world.default_pg is self:
            c10d._update_default_pg(replaced)

    @staticmethod
    def _tables() -> list[Any]:
        world = c10d._world
        return [world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag]

    def meet(self, members: Sequence[int]) -> None:
        """From now on these ranks are together."""
        self._members = tuple(members)
        if self._replaced is not None:
            self._number()

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the job that are together."""
        return self._members

    def _number(self) -> None:
        c10d._world.pg_group_ranks[self] = {i: i for i in range(len(self._members))}

    def rank(self) -> int:
        """Number of this rank among the members."""
        return self._members.index(self._own)

    def size(self) -> int:
        """Number of members."""
        return len(self._members)

    def name(self) -> str:
        """What torch calls it in messages."""
        return "lightning_g2"

    getBackendName = name  # noqa: N815 - torch's name

    def shutdown(self) -> None:
        """Nothing is held open."""

    # --- collectives --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce over the members."""
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for tensor in tensors:
            tensor.copy_(self._reduced("all_reduce", tensor, operation))
        return _Done()

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce several tensors over the members."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Reduce over the members, for one of them."""
        value = self._reduced("reduce", tensors[0], opts.reduceOp)
        if self.rank() == opts.rootRank:
            tensors[0].copy_(value)
        return _Done()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Gather the members' tensors."""
        for gathered, tensor in zip(outputs, inputs, strict=True):
            for target, value in zip(gathered, self._gathered("all_gather", tensor, gathered), strict=True):
                target.copy_(value)
        return _Done()

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        output.copy_(torch.cat([value.reshape(-1) for value in self._gathered("all_gather", given)]).view_as(output))
        return _Done()

    all_gather_single = _allgather_base

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Gather several tensors of the members."""
        for index, tensor in enumerate(inputs):
            for member, value in enumerate(self._gathered("all_gather", tensor)):
                outputs[member][index].copy_(value)
        return _Done()

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """Gather the members' tensors, for one of them."""
        values = self._gathered("gather", inputs[0], outputs[0] if outputs else None)
        if self.rank() == opts.rootRank:
            for target, value in zip(outputs[0], values, strict=True):
                target.copy_(value)
        return _Done()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Give one member's tensors to all."""
        root = self._members[opts.rootRank]
        for tensor in tensors:
            shares = self._exchange("broadcast", _bytes(tensor) if self._own == root else None)
            if root not in shares:
                raise TransportError(
                    f"broadcast from rank {root}: it was dropped from the job meanwhile; broadcast from rank 0, "
                    "which a job never outlives"
                )
            if self._own != root:
                tensor.copy_(_like(tensor, shares[root]))
        return _Done()

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """Give each member a tensor of one member's."""
        root, output = self._members[opts.rootRank], outputs[0]
        share = torch.cat([_bytes(tensor) for tensor in inputs[0]]) if self._own == root else None
        whole = self._exchange("scatter", share)[root]
        size = output.numel() * output.itemsize
        output.copy_(_like(output, whole[self.rank() * size : (self.rank() + 1) * size]))
        return _Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for the members."""
        self._exchange("barrier", None)
        return _Done()

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for the members."""
        self._exchange("barrier", None)

    def _reduced(self, kind: str, tensor: Tensor, operation: Any) -> Tensor:
        combine = next((combine for known, combine in _REDUCTIONS.items() if operation == known), None)
        if combine is None:
            raise TransportError(f"{kind} with {operation}: not known here; reduce with SUM, AVG, MIN, MAX or PRODUCT")
        value = reduce(combine, self._gathered(kind, tensor))
        return value / self.size() if operation == dist.ReduceOp.AVG else value

    def _gathered(self, kind: str, tensor: Tensor, forms: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The tensors of all members, in their order; they may have shapes of their own where forms are given."""
        shares = self._exchange(kind, _bytes(tensor))
        left = next(iter(shares.values()))
        found = [shares.get(member, left) for member in self._members]
        return [_like(form, share) for form, share in zip(forms or [tensor] * len(found), found, strict=True)]


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes, in memory of their own: RPC sends storages as a whole."""
    dense = tensor.detach().to("cpu", copy=True).contiguous().resolve_conj().resolve_neg()
    return dense.reshape(-1).view(torch.uint8)


def _like(form: Tensor, share: Tensor) -> Tensor:
    """Bytes as a tensor of another's shape and dtype."""
    if share.numel() != form.numel() * form.itemsize:
        raise TransportError(
            f"a collective on a tensor of shape {tuple(form.shape)}, {form.dtype}: another rank brings {share.numel()} "
            "bytes; all ranks must bring tensors of one form"
        )
    return share.view(form.dtype).reshape(form.shape).to(form.device)
