"""Who trains on which batch, and when all validate or end the epoch: decided from the counts of the whole job."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice

from lightning_g2.server.ledger import FATES, EpochLedger
from lightning_g2.values import EpochCursor, EpochPlan, EpochRecord, Fate, PushKey, SyncPoint, Ticket, TicketRequest


def first_share(plan: EpochPlan, *, rank: int, ranks: int) -> list[int]:
    """Batches that a rank's loading workers may start on before the rank has asked for anything.

    Both ends compute it, so that workers need not wait for the server.
    """
    if not plan.shared:
        return []
    left = len(plan.cursor.loose) + (plan.batches or 0) - plan.cursor.next
    size = min(plan.hold, -(-left // ranks))
    numbers = chain(plan.cursor.loose, range(plan.cursor.next, plan.batches or 0))
    return list(islice(numbers, rank * size, (rank + 1) * size))


@dataclass
class _Rank:
    """What the conductor knows of one rank.

    Attributes:
        held: batches handed out that it has not begun.
        begun: batches of its window under way, as far as no push has closed it.
        flying: batches of the window before, whose push is under way.
        ahead: batches of earlier windows that it still works at, by the window's number, where it asks ahead.
        buffered: pushes of the window, or of the one before, that the server has but has not applied yet.
        arrived: pushes that the server has since the start of the fit.
        sent: pushes sent by its last report.
        steps: optimizer steps it has reported since the start of the fit.
        landed: steps that have arrived since that report.
        kept: batches that it has trained on by itself and that no push has brought yet.
        unpushed: steps it has reported and made by itself, likewise.
        exhausted: it has no data of its own left in this epoch.
        windows: windows given to it since the start of the fit.
        busy: it is training on one of them.
        fate: what has become of the pushes of the window that no push closes.
    """

    held: deque[int] = field(default_factory=deque)
    begun: tuple[int, ...] = ()
    flying: tuple[int, ...] = ()
    ahead: dict[int, tuple[int, ...]] = field(default_factory=dict)
    buffered: set[PushKey] = field(default_factory=set)
    arrived: int = 0
    sent: int = 0
    steps: int = 0
    landed: int = 0
    kept: tuple[int, ...] = ()
    unpushed: int = 0
    exhausted: bool = False
    windows: int = 0
    busy: bool = False
    fate: Fate = "skipped"


class Conductor:
    """Hands out accumulation windows and announces sync points.

    A rank asks before each window. It is given batches; or a sync point, once the job as a whole has begun so many
    batches or made so many steps that one is due; or it waits, when its own data are used up and the others' are not.
    After a point has been announced nobody is given batches until every live rank has been told of it.

    Args:
        ranks: the ranks that train.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = {rank: _Rank() for rank in ranks}
        self._job_size = len(self._ranks)
        self._left_steps = 0  # steps of ranks that have left
        self._windows = 0
        self._plan: EpochPlan | None = None
        self._waiting: dict[int, None] = {}  # in order of arrival
        self._point: SyncPoint | None = None
        self._told: set[int] = set()
        self._unapplied: list[tuple[set[PushKey], tuple[int, ...]]] = []  # pushes in buffers, and their batches
        self._ledger: EpochLedger | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of all ranks since the start of the fit, as far as reports and pushes tell."""
        return self._left_steps + sum(rank.steps + rank.landed for rank in self._ranks.values())

    @property
    def brought(self) -> int:
        """Those of them that are in the server's weights: without steps that ranks have so far made by themselves."""
        return self.steps - sum(rank.unpushed for rank in self._ranks.values())

    def request(self, rank: int, request: TicketRequest) -> dict[int, Ticket]:
        """A rank asks for its next window; returns the tickets that are due by that, by rank."""
        if self._plan is None or self._plan.epoch != request.plan.epoch:
            self._begin(request.plan)
        asking = self._ranks[rank]
        self._keep_ahead(rank, request.open)
        batches, asking.kept = (*asking.kept, *asking.begun), ()
        if request.pushes > asking.arrived:
            asking.flying = batches
        elif request.unpushed:
            asking.kept = batches
        else:
            self._close(rank, batches, asking.fate)
        asking.begun, asking.fate = (), "skipped"
        asking.steps, asking.sent, asking.busy = request.steps, request.pushes, False
        # One that asks ahead has not counted all windows whose push has arrived.
        asking.landed = max(0, asking.arrived - request.pushes) if request.open else 0
        asking.unpushed = request.unpushed
        asking.exhausted |= request.exhausted
        self._stop |= request.stop
        self._skip |= request.skip
        self._validation_wanted |= request.validate
        self._waiting[rank] = None
        return self._settle()

    def pushed(
        self,
        push: PushKey,
        *,
        buffered: bool = False,
        steps: int = 0,
        fate: Fate = "applied",
        samples: int = 0,
        window: int | None = None,
    ) -> dict[int, Ticket]:
        """A push has been taken in, for the first time; returns the tickets that are due by that.

        A gradient closes its rank's window under automatic optimization; a difference all that the rank has trained on.

        Args:
            push: what names it.
            buffered: it is applied later, as :meth:`applied` will say.
            steps: steps that the rank had made by itself, for a difference; 0 for a gradient.
            fate: what has become of it.
            samples: training samples behind it.
            window: number of the window that it closes; None: the one under way.
        """
        if self._ledger is not None:
            self._ledger.pushed(fate, samples)
        sender = self._ranks.get(push[0])
        if sender is None:
            return {}
        self._arrived(sender, push, buffered=buffered, steps=steps, fate=fate, window=window)
        return {} if self._plan is None else self._settle()

    def _arrived(
        self, sender: _Rank, push: PushKey, *, buffered: bool, steps: int, fate: Fate, window: int | None
    ) -> None:
        sender.arrived += 1
        if buffered:
            sender.buffered.add(push)
        if steps:
            sender.landed += steps - sender.unpushed
            self._close(push[0], (*sender.kept, *sender.begun), fate)
            sender.kept, sender.begun, sender.unpushed = (), (), 0
            return
        if sender.arrived <= sender.sent:  # the last report knew of it
            self._close(push[0], sender.flying, fate)
            sender.flying = ()
            return
        if self._plan is None:
            return
        sender.landed += 1
        if window is not None and (window in sender.ahead or window != sender.windows - 1):
            self._close(push[0], sender.ahead.pop(window, ()), fate)
            return
        if self._plan.counts_windows:
            self._close(push[0], sender.begun, fate)
            sender.begun = ()
        sender.fate = max(sender.fate, fate, key=FATES.index)

    def rest(self, rank: int) -> dict[int, Ticket]:
        """A rank waits for the others without having asked for a window; returns the tickets that are due by that."""
        if (waiting := self._ranks.get(rank)) is None or self._plan is None:
            return {}
        waiting.busy = False
        return self._settle()

    def idle(self) -> set[int]:
        """Ranks that wait for a window, and that no push is under way from."""
        return {rank for rank in self._waiting if not self.pushing(rank)}

    def pushing(self, rank: int) -> bool:
        """Whether a push that a rank has reported is still under way."""
        return self._ranks[rank].arrived < self._ranks[rank].sent

    def applied(self, push: PushKey) -> None:
        """A buffered push has been applied: its batches have been trained on."""
        if (sender := self._ranks.get(push[0])) is not None:
            sender.buffered.discard(push)
        for pushes, _ in self._unapplied:
            pushes.discard(push)
        self._unapplied = [entry for entry in self._unapplied if entry[0]]

    def finish(self, rank: int) -> None:
        """A rank that asks for no further window has pushed all that the last one gave."""
        if (done := self._ranks.get(rank)) is not None:
            self._close(rank, done.begun, done.fate)
            done.begun, done.fate = (), "skipped"

    def leave(self, rank: int, *, partly: bool = False) -> dict[int, Ticket]:
        """A rank takes no further part; what it had not trained on goes to the others.

        Args:
            rank: the rank.
            partly: part of the push under way from it has been applied.
        """
        gone = self._ranks.pop(rank, None)
        if gone is None:
            return {}
        self._left_steps += gone.steps + gone.landed - gone.unpushed
        self._windows -= gone.unpushed + bool(gone.flying) + bool(gone.begun)  # others will have them
        self._waiting.pop(rank, None)
        if self._plan is None:
            return {}
        untrained = [*gone.flying, *gone.begun, *gone.kept, *chain(*gone.ahead.values())]
        if self._ledger is not None:
            self._ledger.give_back(rank, untrained, partly=partly or gone.fate in ("damped", "applied"))
            self._ledger.give_back(rank, gone.held, partly=False)
        self._returned.extend([*untrained, *gone.held])
        self._count -= len(untrained)
        return self._settle()

    def record(self) -> EpochRecord | None:
        """What of the epoch has been trained on so far; None before the first."""
        return None if self._ledger is None else self._ledger.record()

    def cursor(self) -> EpochCursor | None:
        """What of the epoch no applied push has brought yet; None where ranks bring their own data."""
        if self._plan is None or not self._plan.shared:
            return None
        loose = [*self._returned, *(n for _, batches in self._unapplied for n in batches)]
        for r in self._ranks.values():
            loose += [*r.flying, *r.begun, *r.kept, *r.held, *chain(*r.ahead.values())]
        return EpochCursor(epoch=self._plan.epoch, next=self._next, loose=tuple(sorted(loose)))

    def _begin(self, plan: EpochPlan) -> None:
        self._plan = plan
        self._ledger = EpochLedger(plan)
        self._next = plan.cursor.next
        self._returned: deque[int] = deque(plan.cursor.loose)
        self._count = trained = plan.cursor.trained
        self._checked = trained if plan.validated or trained == 0 else trained - 1
        self._validated_at = trained if plan.validated else -1
        self._stop = self._skip = self._validation_wanted = False
        self._point, self._told = None, set()
        self._unapplied.clear()
        shares = [first_share(plan, rank=rank, ranks=self._job_size) for rank in range(self._job_size)]
        for _ in chain(*shares):
            self._take()
        for rank, share in enumerate(shares):
            if rank in self._ranks:
                self._ranks[rank].exhausted = False
                self._ranks[rank].held = deque(share)
            else:
                self._returned.extend(share)

    def _keep_ahead(self, number: int, still_open: tuple[int, ...]) -> None:
        """A rank that asks ahead says which windows it still works at; others are closed, with a push or without."""
        rank = self._ranks[number]
        if rank.windows - 1 in still_open and rank.begun:
            rank.ahead[rank.windows - 1], rank.begun = rank.begun, ()
        for window in rank.ahead.keys() - set(still_open):
            self._close(number, rank.ahead.pop(window), "skipped")

    def _close(self, number: int, batches: tuple[int, ...], fate: Fate) -> None:
        """A window is closed: its batches have been trained on, or wait in buffers with its pushes."""
        rank = self._ranks[number]
        if self._ledger is not None and self._plan is not None and self._plan.shared:
            self._ledger.enter(number, batches, fate)
        if rank.buffered and batches:
            self._unapplied.append((rank.buffered, batches))
        rank.buffered = set()

    def _settle(self) -> dict[int, Ticket]:
        tickets: dict[int, Ticket] = {}
        for rank in list(self._waiting):
            if self._point is None:
                self._point = self._due()
            if self._point is None and (window := self._window(rank)) is not None:
                tickets[rank] = window
        if self._point is None:
            self._point = self._due()
        if self._point is not None:
            for rank in self._waiting:
                if rank not in tickets:
                    self._told.add(rank)
                    tickets[rank] = Ticket(first=self._count, steps=self._known_to(rank), point=self._point)
            if self._told >= self._ranks.keys() and not self._point.ends_epoch:
                self._point, self._told = None, set()
        for rank in tickets:
            del self._waiting[rank]
        return tickets

    def _due(self) -> SyncPoint | None:
        plan = self._plan
        assert plan is not None
        finished, spent = self._finished(), self._spent()
        validate = self._crossed() or self._validation_wanted or (finished and plan.validate_at_end) or self._stop
        validate &= plan.validates and self._validated_at != self._count and not self._skip
        ends = finished or spent or self._stop or self._skip
        if not (validate or ends):
            return None
        if (finished or spent) and not (self._stop or self._skip) and self._under_way():
            return None  # what a rank that dies now has not trained on must find the others still at work
        self._checked, self._validation_wanted = self._count, False
        if validate:
            self._validated_at = self._count
        return SyncPoint(validate=validate, ends_epoch=ends, finished=finished or self._skip, stop=self._stop)

    def _finished(self) -> bool:
        """Whether all batches of the epoch have been begun."""
        plan = self._plan
        assert plan is not None
        if not plan.shared and all(rank.exhausted for rank in self._ranks.values()):
            return True
        return plan.batches is not None and self._count >= plan.batches

    def _spent(self) -> bool:
        """Whether all steps that the fit may make have been begun."""
        plan = self._plan
        assert plan is not None
        return plan.steps is not None and (self._windows if plan.counts_windows else self.steps) >= plan.steps

    def _under_way(self) -> bool:
        """Whether windows, or their pushes, are under way."""
        return any(rank.busy or rank.flying for rank in self._ranks.values())

    def _crossed(self) -> bool:
        """Whether a multiple of the validation interval lies between the last look and this."""
        plan = self._plan
        assert plan is not None
        if plan.validate_every is None:
            return False
        return (plan.offset + self._count) // plan.validate_every > (plan.offset + self._checked) // plan.validate_every

    def _may_be_spent(self) -> bool:
        """Whether the windows under way may use up the steps that are left: their number is known only afterwards."""
        assert self._plan is not None
        if self._plan.steps is None or self._plan.counts_windows:
            return False
        busy = sum(rank.busy for rank in self._ranks.values())
        most = max((-(-r.steps // (r.windows - r.busy)) for r in self._ranks.values() if r.windows > r.busy), default=1)
        return busy > 0 and self.steps + busy * most >= self._plan.steps

    def _window(self, rank: int) -> Ticket | None:
        plan, asking = self._plan, self._ranks[rank]
        assert plan is not None
        if asking.exhausted or self._may_be_spent() or self._finished() or self._spent():
            return None
        size = plan.window if plan.batches is None else min(plan.window, plan.batches - self._count)
        fresh: list[int] = []
        if plan.shared:
            while len(asking.held) < size + plan.hold and (number := self._take()) is not None:
                asking.held.append(number)
                fresh.append(number)
            size = min(size, len(asking.held))
            if size == 0:
                return None  # what is left is in other ranks' hands
            asking.begun = tuple(asking.held.popleft() for _ in range(size))
        first, self._count = self._count, self._count + size
        self._windows += 1
        asking.windows, asking.busy = asking.windows + 1, True
        return Ticket(first=first, batches=size, numbers=tuple(fresh), steps=self._known_to(rank))

    def _known_to(self, rank: int) -> int:
        """Steps that a rank's weights may know of: those that are in the server's, and its own."""
        return self.brought + self._ranks[rank].unpushed

    def _take(self) -> int | None:
        if self._returned:
            return self._returned.popleft()
        assert self._plan is not None
        if self._next >= (self._plan.batches or 0):
            return None
        self._next += 1
        return self._next - 1
