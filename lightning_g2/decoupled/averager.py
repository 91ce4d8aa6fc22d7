"""LAP-SGD's averager: replicas that train lock-free are pulled together while they go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Mean = Callable[[Tensor], Tensor]
"""Takes one replica's flat weights, shape (P,); returns the mean over all replicas once all have come. A collective."""

_LATE_INTERVAL = 16


def lap_rounds(batches: int) -> list[int]:
    """After how many of a replica's batches it is averaged: after each in the first half, then after every sixteenth.

    Args:
        batches: that each replica trains on in all.

    Source:
        B. Chatterjee, V. Kungurtsev, D. Alistarh, "Scaling the Wild: Decentralizing Hogwild!-style Shared-memory SGD"
        (2022).
    """
    return [*range(1, batches // 2 + 1), *range(batches // 2 + _LATE_INTERVAL, batches + 1, _LATE_INTERVAL)]


class Averager:
    """Averages one replica's weights with those of the others, in a thread of its own.

    A round takes a snapshot s, has the mean m over all replicas computed, and adds m - s to the live weights. What
    other threads have updated meanwhile stays: nobody waits for a round, and no update is lost.

    A context manager: entering starts the thread, leaving waits for the rounds that are left, since the other replicas
    wait for them; on an exception they are given up, and ``mean`` has to fail on the others.

    Args:
        parameters: of the replica, floating, of one dtype and device.
        mean: averages; called once for each round.
        rounds: numbers of the replica's batches after which a round is due, ascending; as many on every replica.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], mean: Mean, rounds: Sequence[int]) -> None:
        self._parameters = list(parameters)
        self._mean = mean
        self._rounds = list(rounds)
        self._through = 0
        self._ending = self._abandoned = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="averager")
        self._error: BaseException | None = None

    def __enter__(self) -> Averager:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with self._condition:
            self._ending, self._abandoned = True, kind is not None
            self._condition.notify_all()
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def batch_through(self) -> None:
        """A batch of the replica is through, in whichever thread."""
        with self._condition:
            self._through += 1
            self._condition.notify_all()

    def average(self) -> None:
        """Make one round."""
        with torch.no_grad():
            snapshot = torch.cat([p.data.flatten() for p in self._parameters])
            correction = self._mean(snapshot.clone()) - snapshot
            parts = torch.split(correction, [p.numel() for p in self._parameters])
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.data.add_(part.view_as(parameter))

    def _run(self) -> None:
        try:
            for due in self._rounds:
                with self._condition:
                    self._condition.wait_for(lambda due=due: self._through >= due or self._ending)  # type: ignore[misc]
                    if self._abandoned:
                        return
                self.average()
        except BaseException as error:
            self._error = error


class MeanOfThreads:
    """A :data:`Mean` over replicas in the threads of one process.

    Args:
        replicas: how many.
    """

    def __init__(self, replicas: int) -> None:
        self._given: list[Tensor] = []
        self._lock = threading.Lock()
        self._result = torch.empty(0)
        self._barrier = threading.Barrier(replicas, action=self._average)

    def __call__(self, weights: Tensor) -> Tensor:
        """The mean, once all replicas have called.

        Raises:
            threading.BrokenBarrierError: another replica has given up.
        """
        with self._lock:
            self._given.append(weights)
        self._barrier.wait()
        result = self._result
        self._barrier.wait()  # the next mean may begin
        return result

    def abort(self) -> None:
        """A replica gives up; all that wait fail."""
        self._barrier.abort()

    def _average(self) -> None:
        if self._given:
            self._result, self._given = torch.stack(self._given).mean(0), []
