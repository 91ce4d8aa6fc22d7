"""Frozen values that pass between the rooms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

from torch import Tensor

Version = NewType("Version", int)
"""Server 0's count of applied updates."""


@dataclass(frozen=True, slots=True, eq=False)
class GateDecision:
    """What a gate decided on one push.

    Attributes:
        gradients: the gradients to send, keyed like the input; the very same tensors where nothing was changed.
        energy: friction of the whole push, the |d_b|²-weighted mean of its blocks, 0 to 8/3; dimensionless.
        weight: weight of the whole push, the |d_b|²-weighted mean of its blocks, 0 to 1; dimensionless.
        block_energy: friction of each filtered block.
        block_weight: weight of each filtered block.
        scale: observed lr·|d_b| of each block, in the gradient's units times the learning rate.
        rejected: the push carries no update (NaN/Inf, or refused by the rule).
        reason: why it was rejected; empty otherwise.
    """

    gradients: Mapping[str, Tensor]
    energy: float = 0.0
    weight: float = 1.0
    block_energy: Mapping[str, float] = field(default_factory=dict)
    block_weight: Mapping[str, float] = field(default_factory=dict)
    scale: Mapping[str, float] = field(default_factory=dict)
    rejected: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SparseShape:
    """How a sparse gradient (COO) lies in a push.

    Attributes:
        sparse_dim: leading dimensions that its indices run over.
        entries: stored entries, repeated ones counted.
        coalesced: no index occurs twice, and they are in order.
    """

    sparse_dim: int
    entries: int
    coalesced: bool


@dataclass(frozen=True, slots=True)
class PushPacket:
    """The control part of one push; its gradients travel beside it in one flat buffer.

    Attributes:
        rank: the pushing rank.
        lane: independent stream of pushes within the rank (0 unless forward and backward are decoupled).
        sequence: number of the push within (rank, lane), from 0, without gaps.
        base_version: version of the weights that the gradient was computed from.
        optimizer: index of the module's optimizer to step.
        groups: hyper-parameters of each of that optimizer's parameter groups (all entries but ``params``).
        members: indices into the layout of each group's parameters; empty where the server's groups are meant.
        inner: attribute of the optimizer that holds the optimizer to step instead (``"base_optimizer"``); else empty.
        present: indices into the layout of the parameters that have a gradient, in the buffer's order.
        sparse: those of them whose gradient is sparse.
        samples: training samples behind the gradient.
        energy: friction of the push, see :class:`GateDecision`.
        weight: weight of the push, see :class:`GateDecision`.
        staleness: staleness at the decision, in versions.
        scale: observed lr·|d_b| of each block.
        rejected: no gradient travels and no update is made.
    """

    rank: int
    lane: int
    sequence: int
    base_version: int
    optimizer: int = 0
    groups: tuple[dict[str, Any], ...] = ()
    members: tuple[tuple[int, ...], ...] = ()
    inner: str = ""
    present: tuple[int, ...] = ()
    sparse: Mapping[int, SparseShape] = field(default_factory=dict)
    samples: int = 0
    energy: float = 0.0
    weight: float = 1.0
    staleness: int = 0
    scale: Mapping[str, float] = field(default_factory=dict)
    rejected: bool = False


@dataclass(frozen=True, slots=True)
class PushReceipt:
    """The server's answer to one push.

    Attributes:
        version: version after the push was taken in.
        staleness: versions applied between the push's base and its application.
        applied: False for a rejected push.
    """

    version: int
    staleness: int
    applied: bool


@dataclass(frozen=True, slots=True)
class ServerView:
    """What a rank needs to know before it decides on a push.

    Attributes:
        version: current version.
        window: effective energy Ê of the latest push of each live rank.
        scale: running maximum of lr·|d_b| of each block.
    """

    version: int
    window: Mapping[int, float]
    scale: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PushRecord:
    """One push as the server saw it: the row of telemetry and of the per-rank table.

    Attributes:
        rank: the pushing rank.
        version: version after the push.
        staleness: versions between base and application.
        energy: friction, 0 to 8/3.
        weight: weight, 0 to 1; 0 for a rejected push.
        rejected: no update was made.
        samples: training samples behind the push.
        time_s: server clock at application, seconds.
    """

    rank: int
    version: int
    staleness: int
    energy: float
    weight: float
    rejected: bool
    samples: int
    time_s: float


@dataclass(frozen=True, slots=True)
class SyncRelease:
    """The server's answer to a rank that waited at a sync point.

    Attributes:
        version: the one version that every rank released together sees.
        participants: ranks released together, ascending.
    """

    version: int
    participants: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankTotals:
    """What the server has taken in from one rank since the start of the fit.

    Attributes:
        samples: training samples behind its applied pushes.
        pushes: applied pushes.
        rejected: rejected pushes.
        staleness_mean: mean staleness of all its pushes, rejected ones included, versions.
        staleness_max: their maximum, versions.
        weight_mean: mean weight of all its pushes, 0 to 1; a rejected push counts with 0.
    """

    samples: int = 0
    pushes: int = 0
    rejected: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    weight_mean: float = 1.0
