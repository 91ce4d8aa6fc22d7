"""Frozen values that pass between the rooms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NewType

import torch
from torch import Tensor

Version = NewType("Version", int)
"""Server 0's count of applied updates."""

PushKey = tuple[int, int, int]
"""What names one push of a job: rank, lane, sequence."""

Late = Literal["drop", "gate"]
"""What becomes of a push whose round had ended before it came."""


@dataclass(frozen=True, slots=True, eq=False)
class GateDecision:
    """What a gate decided on one push.

    Attributes:
        gradients: the gradients to send, keyed like the input; the very same tensors where nothing was changed.
        energy: friction of the whole push, the |d_b|²-weighted mean of its blocks, 0 to 8/3; dimensionless.
        weight: weight of the whole push, the |d_b|²-weighted mean of its blocks, 0 to 1; dimensionless.
        block_energy: friction of each filtered block.
        block_weight: weight of each filtered block.
        block_norm: |d_b| of each filtered block, in the gradient's units.
        scale: observed lr·|d_b| of each block, in the gradient's units times the learning rate.
        rejected: the push carries no update (NaN/Inf, or refused by the rule).
        reason: why it was rejected; empty otherwise.
        lr_factor: what the learning rate of this one update is multiplied by.
    """

    gradients: Mapping[str, Tensor]
    energy: float = 0.0
    weight: float = 1.0
    block_energy: Mapping[str, float] = field(default_factory=dict)
    block_weight: Mapping[str, float] = field(default_factory=dict)
    block_norm: Mapping[str, float] = field(default_factory=dict)
    scale: Mapping[str, float] = field(default_factory=dict)
    rejected: bool = False
    reason: str = ""
    lr_factor: float = 1.0


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
class PushNote:
    """What a recording needs of a push beside its packet.

    Attributes:
        rng: state of the rank's generator on the CPU before the window's first batch.
        samples: indices in the data set of each batch of the window; None where the rank does not know them.
        rates: learning rate of each parameter group, before the gate.
        viewed: pushes that the server had taken in when the gate decided.
    """

    rng: bytes
    samples: tuple[tuple[int, ...], ...] | None
    rates: tuple[float, ...]
    viewed: int


@dataclass(frozen=True, slots=True)
class PushPacket:
    """The control part of one push; its gradients travel beside it in one flat buffer.

    Attributes:
        rank: the pushing rank.
        lane: independent stream of pushes within the rank, for windows that are under way at the same time; 0 unless
            forward and backward are decoupled.
        sequence: number of the push within (rank, lane), from 0, without gaps.
        base_version: version of the weights that the gradient was computed from.
        optimizer: index of the module's optimizer to step.
        groups: hyper-parameters of each of that optimizer's parameter groups (all entries but ``params``).
        members: indices into the layout of each group's parameters; empty where the server's groups are meant.
        inner: attribute of the optimizer that holds the optimizer to step instead (``"base_optimizer"``); else empty.
        present: indices into the layout of the parameters that have a gradient, in the buffer's order.
        sparse: those of them whose gradient is sparse.
        samples: training samples behind the gradient.
        steps: optimizer steps that the rank itself has made and whose sum this is; 0 where it is a gradient.
        energy: friction of the push, see :class:`GateDecision`.
        weight: weight of the push, see :class:`GateDecision`.
        staleness: staleness at the decision, in versions.
        scale: observed lr·|d_b| of each block.
        rejected: no gradient travels and no update is made.
        note: for a recording; None where nothing is recorded.
        wire: dtype in which dense gradients of a larger floating dtype travel; None: each in its own.
        exponents: for those of them that travel multiplied by a power of two, its exponent, by index.
        sent_bytes: bytes of gradients that travel beside it, to all servers together.
        whole_bytes: bytes that the gradients routed for this packet take when each travels in its own dtype, rejected
            ones included.
        window: number of its rank's window that the push closes, among all that the rank was given in this fit; None:
            the one under way.
        fresh: the answer brings the new weights of the parameters in ``present``, also if it is not the last packet.
        last: the push ends with this packet. Earlier packets carry some of the gradients of the same backward, each
            applied at once; energy, weight and samples of the push are those of its last packet.
        lease: number of the rank's membership that this was sent under; another one than the server knows is refused.
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
    steps: int = 0
    energy: float = 0.0
    weight: float = 1.0
    staleness: int = 0
    scale: Mapping[str, float] = field(default_factory=dict)
    rejected: bool = False
    note: PushNote | None = None
    wire: torch.dtype | None = None
    exponents: Mapping[int, int] = field(default_factory=dict)
    sent_bytes: int = 0
    whole_bytes: int = 0
    window: int | None = None
    fresh: bool = False
    last: bool = True
    lease: int = 0

    @property
    def key(self) -> PushKey:
        """What names it."""
        return self.rank, self.lane, self.sequence


@dataclass(frozen=True, slots=True)
class WeightEdit:
    """Weights that a rank's own code has changed; values and former values travel beside it, each in one flat buffer.

    Attributes:
        rank: the rank.
        base_version: version that the rank had loaded.
        indices: indices into the layout, in the buffers' order.
    """

    rank: int
    base_version: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PushReceipt:
    """The server's answer to one push.

    Attributes:
        version: version of the weights that are handed out with it.
        staleness: versions applied between the push's base and its application; as far as known, if it is buffered.
        applied: these weights have its gradient in them. False for one that was rejected, is late, or is buffered.
        buffered: it waits for other pushes and is applied together with them: with ``version + 1``, unless another
            optimizer of the module or the last of several rejected pushes comes between.
        late: it was dropped, since its round had ended before it came.
        waits: its rank gets no answer until its round has ended; never seen by a rank.
    """

    version: int
    staleness: int
    applied: bool
    buffered: bool = False
    late: bool = False
    waits: bool = False


@dataclass(frozen=True, slots=True)
class RoundsChoice:
    """What ``rounds="auto"`` has decided, and why; paces are effective versions a second of the server's clock.

    Attributes:
        version: from which version on.
        rounds: pushes that end a synchronous round; None: asynchronous.
        asynchronous: expected pace without rounds.
        best_rounds: the best size of rounds.
        synchronous: expected pace of rounds of that size.
        ranks: ranks whose times were known.
        staleness_cost: what a push that is one push old costs beside one more in the mean.
    """

    version: int
    rounds: int | None
    asynchronous: float
    best_rounds: int
    synchronous: float
    ranks: int
    staleness_cost: float

    def __str__(self) -> str:
        how = "asynchronous" if self.rounds is None else f"rounds of {self.rounds}"
        return (
            f"{how} from version {self.version} on: of {self.ranks} ranks {self.asynchronous:.3g} effective versions/s "
            f"are expected without rounds, {self.synchronous:.3g} in rounds of {self.best_rounds} "
            f"(staleness cost {self.staleness_cost:.3g})"
        )


@dataclass(frozen=True, slots=True)
class ServerView:
    """What a rank needs to know before it decides on a push.

    Attributes:
        version: current version.
        window: effective energy Ê of the latest push of each live rank.
        scale: running maximum of lr·|d_b| of each block.
        pushes_per_version: K, pushes whose mean makes one version.
        arrivals: pushes taken in so far, rejected ones included.
        choice: the latest decision of ``rounds="auto"``; None where there has been none.
        ranks: live ranks; 0 where the server does not say.
    """

    version: int
    window: Mapping[int, float]
    scale: Mapping[str, float]
    pushes_per_version: int = 1
    arrivals: int = 0
    choice: RoundsChoice | None = None
    ranks: int = 0


@dataclass(frozen=True, slots=True)
class PushRecord:
    """One push as the server saw it: the row of telemetry and of the per-rank table.

    Attributes:
        rank: the pushing rank.
        version: version after the push, or after the pushes that it was applied together with.
        staleness: versions between base and application.
        energy: friction, 0 to 8/3.
        weight: weight, 0 to 1; 0 for a rejected push.
        rejected: the gate refused it, so it made no update.
        samples: training samples behind the push.
        time_s: server clock at application, seconds.
        late: it was dropped, since its round had ended before it came; it made no update either.
        bytes_sent: bytes of gradients that came.
        bytes_saved: bytes of gradients that a push without rejection and compression would have brought beyond them.
    """

    rank: int
    version: int
    staleness: int
    energy: float
    weight: float
    rejected: bool
    samples: int
    time_s: float
    late: bool = False
    bytes_sent: int = 0
    bytes_saved: int = 0

    @property
    def applied(self) -> bool:
        """Whether it made an update."""
        return not (self.rejected or self.late)


@dataclass(frozen=True, slots=True)
class SyncRelease:
    """The server's answer to a rank that waited at a sync point.

    Attributes:
        version: the one version that every rank released together sees.
        participants: ranks released together, ascending.
        steps: optimizer steps of the whole job since the start of the fit.
        together: these are all live ranks.
    """

    version: int
    participants: tuple[int, ...]
    steps: int = 0
    together: bool = True


@dataclass(frozen=True, slots=True)
class RankTotals:
    """What the server has taken in from one rank since the start of the fit.

    Attributes:
        samples: training samples behind its applied pushes.
        pushes: applied pushes.
        rejected: rejected pushes.
        staleness_mean: mean staleness of all its pushes, rejected and late ones included, versions.
        staleness_max: their maximum, versions.
        weight_mean: mean weight that the gate gave to its pushes, 0 to 1; a rejected push counts with 0.
        late: pushes dropped because their round had ended.
        late_samples: training samples behind those.
        bytes_sent: bytes of gradients that came from it.
        bytes_saved: bytes that its pushes would have brought beyond them without rejection and compression.
        apply_s: time that the server took to take its pushes in, seconds.
    """

    samples: int = 0
    pushes: int = 0
    rejected: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    weight_mean: float = 1.0
    late: int = 0
    late_samples: int = 0
    bytes_sent: int = 0
    bytes_saved: int = 0
    apply_s: float = field(default=0.0, compare=False)


Fate = Literal["skipped", "late", "rejected", "damped", "applied"]
"""What has become of a batch: of the best of its pushes. ``"skipped"``: its window has ended without a push;
``"damped"``: applied, after the gate has taken something away."""


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """What of an epoch has been trained on, as server 0 saw it.

    Attributes:
        epoch: number of the epoch.
        batches: batches of the epoch; None where ranks bring data of unknown length.
        before: batches that an earlier run had trained on, where a checkpoint was resumed.
        fates: numbered batches by what has become of them; one that came again counts each time.
        samples: training samples by what has become of their push, likewise.
        once: numbered batches that were trained on once in this run.
        again: numbers of those that were trained on more than once, in part at least; their former rank was dropped.
        missing: numbers of those that were not: the epoch was cut short, or is not over.
        returned: numbers of batches that a rank had when it left or was dropped, by rank; others were given them.
        ranks: numbered batches by the rank that has brought them.
    """

    epoch: int
    batches: int | None
    before: int = 0
    fates: Mapping[Fate, int] = field(default_factory=dict)
    samples: Mapping[Fate, int] = field(default_factory=dict)
    once: int = 0
    again: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    returned: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    ranks: Mapping[int, int] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether each batch of the epoch was trained on exactly once; without numbers, nobody knows."""
        return self.batches is not None and self.before + self.once == self.batches and not self.again


@dataclass(frozen=True, slots=True)
class EpochCursor:
    """Which batches of an epoch are still to be trained on: the loose ones, and all from ``next`` on.

    Attributes:
        epoch: number of the epoch.
        next: first batch that has not been handed out.
        loose: batches handed out before that no applied push covers, ascending.
    """

    epoch: int = 0
    next: int = 0
    loose: tuple[int, ...] = ()

    @property
    def trained(self) -> int:
        """Batches that have been trained on."""
        return self.next - len(self.loose)


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """What all ranks agree on before an epoch; counts are those of the whole job.

    Attributes:
        epoch: number of the epoch.
        batches: batches of the epoch; None where ranks bring data of unknown length.
        shared: batches are handed out by number; otherwise ranks bring their own.
        window: batches of one optimizer step.
        hold: batches that a rank's loading workers hold beyond the window.
        cursor: where the handing out goes on, past 0 in a run that resumes another.
        steps: optimizer steps that the fit may make in all; None without a limit.
        counts_windows: each window makes one step (automatic optimization).
        validates: there is validation in this epoch.
        validate_every: batches between validations; None where only the epoch's end brings one.
        validate_at_end: the epoch ends with a validation whatever its length.
        offset: batches before this epoch that count for ``validate_every``.
        validated: the resumed run has validated at the cursor already.
    """

    epoch: int
    batches: int | None
    shared: bool
    window: int = 1
    hold: int = 0
    cursor: EpochCursor = EpochCursor()
    steps: int | None = None
    counts_windows: bool = True
    validates: bool = False
    validate_every: int | None = None
    validate_at_end: bool = False
    offset: int = 0
    validated: bool = False


@dataclass(frozen=True, slots=True)
class TicketRequest:
    """A rank's question for its next accumulation window.

    Attributes:
        plan: the epoch that it is in.
        steps: optimizer steps that it has made since the start of the fit.
        exhausted: it has no data of its own left.
        stop: it wants training to stop.
        skip: it wants the rest of the epoch skipped.
        validate: it wants a validation at once (an interval of time has passed).
        pushes: pushes that it has sent since the start of the fit; the last may be under way.
        unpushed: those of its steps that it has made itself and that no push has brought yet.
        open: numbers of the windows, among all that it was given in this fit, that it still works at: it asks ahead.
            ``steps`` and ``pushes`` then count those of windows that are through.
    """

    plan: EpochPlan
    steps: int
    exhausted: bool = False
    stop: bool = False
    skip: bool = False
    validate: bool = False
    pushes: int = 0
    unpushed: int = 0
    open: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SyncPoint:
    """Where all ranks meet.

    Attributes:
        validate: they validate.
        ends_epoch: the epoch ends.
        finished: its data are used up (otherwise it is cut short).
        stop: training stops, because a rank asked for it.
    """

    validate: bool
    ends_epoch: bool
    finished: bool
    stop: bool


@dataclass(frozen=True, slots=True)
class Ticket:
    """The answer to a :class:`TicketRequest`: a window, or a sync point.

    Attributes:
        first: batches of the epoch that the whole job has begun before this window.
        steps: optimizer steps of the whole job since the start of the fit.
        batches: size of the window; 0 at a sync point.
        numbers: batches handed out anew to this rank, to be loaded in this order after those that it holds.
        point: the sync point, if this is one.
    """

    first: int
    steps: int
    batches: int = 0
    numbers: tuple[int, ...] = ()
    point: SyncPoint | None = None
