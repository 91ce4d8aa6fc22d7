"""A module's parameters shared out over several servers, each a state machine of its own over whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_g2.server.layout import ParameterLayout, ParameterSpec
from lightning_g2.server.optimizer import OptimizerParts
from lightning_g2.server.parcel import Parcel, pack
from lightning_g2.server.state import ServerSetup, ServerSnapshot


@dataclass
class Balance:
    """Which server keeps which parameter: the largest first, each to the server that has the fewest bytes.

    Server 0 keeps the one balance of a job, so that ranks which hand over the same parameter at the same time agree.

    Attributes:
        server_of: the server of each parameter, by name; what is decided stays.
        size_bytes: bytes by server.
    """

    server_of: dict[str, int] = field(default_factory=dict)
    size_bytes: list[int] = field(default_factory=list)

    def assign(self, specs: Iterable[ParameterSpec], servers: int) -> dict[str, int]:
        """The servers of parameters; those that have none yet are given one.

        Args:
            specs: the parameters.
            servers: number of servers.
        """
        wanted = list(specs)
        self.size_bytes += [0] * (servers - len(self.size_bytes))
        fresh = [spec for spec in wanted if spec.name not in self.server_of]
        for spec in sorted(fresh, key=lambda spec: (-spec.size_bytes, spec.name)):
            server = min(range(servers), key=self.size_bytes.__getitem__)
            self.server_of[spec.name] = server
            self.size_bytes[server] += spec.size_bytes
        return {spec.name: self.server_of[spec.name] for spec in wanted}


class Shards:
    """Where each parameter of a rank's layout lies: on which server, and as which of that server's parameters.

    The rank's layout grows at its end, as each server's does, until the servers are given other parameters. Ranks may
    know the parameters in different orders: what a server is told always names its own.

    Args:
        servers: number of servers.

    Attributes:
        layout: the parameters of all servers, as far as this rank knows them.
        layouts: those of each server.
    """

    def __init__(self, servers: int) -> None:
        self.layout = ParameterLayout(())
        self.layouts = [ParameterLayout(())] * servers
        self._places: list[tuple[int, int]] = []
        self._wholes: list[list[int]] = [[] for _ in range(servers)]

    def learn(self, layouts: Sequence[ParameterLayout], order: Iterable[str] = ()) -> None:
        """Take in what the servers have.

        Args:
            layouts: their layouts.
            order: names in the order in which new ones shall be known; others come after them.
        """
        if any(new.specs[: len(old)] != old.specs for old, new in zip(self.layouts, layouts, strict=True)):
            self.layout, self._places, self._wholes = ParameterLayout(()), [], [[] for _ in layouts]
        fresh = {
            spec.name: (spec, server, index)
            for server, layout in enumerate(layouts)
            for index, spec in enumerate(layout.specs)
            if index >= len(self._wholes[server])
        }
        ordered = dict.fromkeys(name for name in order if name in fresh)
        names = list(ordered | dict.fromkeys(fresh))
        self.layouts = list(layouts)
        for server, layout in enumerate(layouts):
            self._wholes[server] += [-1] * (len(layout) - len(self._wholes[server]))
        for whole, name in enumerate(names, start=len(self._places)):
            _, server, index = fresh[name]
            self._places.append((server, index))
            self._wholes[server][index] = whole
        self.layout = self.layout.with_more(fresh[name][0] for name in names)

    def whole(self, server: int) -> list[int]:
        """The rank's index of each parameter of a server."""
        return self._wholes[server]

    def split(self, indices: Iterable[int]) -> list[list[int]]:
        """For each server, those of the rank's indices that it owns, in their order."""
        shares: list[list[int]] = [[] for _ in self.layouts]
        for index in indices:
            shares[self._places[index][0]].append(index)
        return shares

    def local(self, indices: Iterable[int]) -> tuple[int, ...]:
        """The owner's index of each of the rank's indices."""
        return tuple(self._places[index][1] for index in indices)

    def setups(self, setup: ServerSetup) -> list[ServerSetup]:
        """What each server needs of what one server would need; :meth:`learn` must know the parameters.

        Every server gets every optimizer, with those of its parameters that the server owns.
        """
        values = setup.layout.views(setup.weights)
        here = {spec.name: index for index, spec in enumerate(setup.layout.specs)}
        made = []
        for layout in self.layouts:
            given = [here[spec.name] for spec in layout.specs]
            weights = layout.allocate()
            for view, index in zip(layout.views(weights), given, strict=True):
                view.copy_(values[index])
            local = {index: i for i, index in enumerate(given)}
            made.append(
                replace(
                    setup,
                    layout=layout,
                    weights=weights,
                    optimizers=tuple(spec.restricted(values, local) for spec in setup.optimizers),
                    masters={local[i]: master for i, master in setup.masters.items() if i in local},
                )
            )
        return made

    def merged(self, snapshots: Sequence[ServerSnapshot]) -> ServerSnapshot:
        """One snapshot of all servers, as one server would have given it: it resumes with any number of them.

        Version, cursor and steps are server 0's. It may hold parameters that this rank has not learned of yet.
        """
        shards = Shards(len(snapshots))
        shards.learn([snapshot.layout for snapshot in snapshots], [spec.name for spec in self.layout.specs])
        weights = shards.layout.allocate()
        views = shards.layout.views(weights)
        stand_ins = [torch.nn.Parameter(torch.empty(0)) for _ in views]
        known: list[list[Tensor]] = []
        for server, snapshot in enumerate(snapshots):
            whole = shards.whole(server)
            known.append([stand_ins[i] for i in whole])
            for index, value in zip(whole, snapshot.layout.views(snapshot.weights), strict=True):
                views[index].copy_(value)
        parts = [snapshot.parts(own) for snapshot, own in zip(snapshots, known, strict=True)]
        index_of = {id(parameter): index for index, parameter in enumerate(stand_ins)}
        return replace(
            snapshots[0],
            layout=shards.layout,
            weights=weights,
            optimizers=tuple(_merged(of_all, index_of) for of_all in zip(*parts, strict=True)),
            evolved=tuple(_evolved(of_all) for of_all in zip(*(s.evolved for s in snapshots), strict=True)),
        )


def _merged(parts: Sequence[OptimizerParts], index_of: Mapping[int, int]) -> Parcel:
    """One optimizer of the pieces that the servers keep; the rest is of the lowest server that steps it."""
    first, *others = sorted(parts, key=lambda part: not part.owns_parameters)
    for other in others:
        first.add(other)
    return pack(first, index_of, copy=False)


def _evolved(groups: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Per group, what the optimizer itself has changed, on the lowest server where it has."""
    longest = max(len(own) for own in groups)
    merged: list[dict[str, Any]] = [{} for _ in range(longest)]
    for own in reversed(groups):
        for into, values in zip(merged, own, strict=False):
            into.update(values)
    return merged
