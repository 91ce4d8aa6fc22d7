"""Workers in the threads of one process, for ``g2-bench pd``: lock-free on one set of weights, or in step on copies."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_g2.decoupled import DecoupledOptions, DecoupledRunner, LocalApply, RunReport, ThreadScheduler
from lightning_g2.decoupled.averager import Averager, MeanOfThreads, lap_rounds
from lightning_g2.decoupled.scheduler import Cost
from lightning_g2.decoupled.versions import Versions

_POLL_S = 0.01
Loss = Callable[[Any, Any], Tensor]


@dataclass
class Job:
    """What all rivals train alike.

    Attributes:
        module: trained in place.
        loss: of a batch.
        batches: all there are; whichever worker is free takes the next.
        rate: learning rate of SGD.
        momentum: of SGD.
        score: judges the weights, 0 to 1; None where only the pace counts.
        interval: batches between judgements.
    """

    module: nn.Module
    loss: Loss
    batches: Sequence[Any]
    rate: float
    momentum: float = 0.9
    score: Callable[[nn.Module], float] | None = None
    interval: int = 10

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """SGD over a module."""
        return torch.optim.SGD(module.parameters(), lr=self.rate, momentum=self.momentum)


@dataclass
class Outcome:
    """How a rival did.

    Attributes:
        seconds: from the first batch to the last.
        scores: seconds, batches that were through, score.
        reports: of each worker's threads; empty for workers in step.
        memory_bytes: most memory beyond that before the run.
    """

    seconds: float = 0.0
    scores: list[tuple[float, int, float]] = field(default_factory=list)
    reports: list[RunReport] = field(default_factory=list)
    memory_bytes: int = 0

    def reached(self, target: float) -> tuple[float, int] | None:
        """Seconds and batches until the score first was so high; None if it never was."""
        return next(((t, n) for t, n, score in self.scores if score >= target), None)


def averaged(job: Job, options: Sequence[DecoupledOptions], costs: Sequence[Cost | None], replicas: int) -> Outcome:
    """Replicas as on hosts of their own, averaged while their workers go on (LAP-SGD); worker i is on i mod replicas.

    Args:
        job: what is trained; its module is the first replica's.
        options: of each worker.
        costs: as in :func:`asynchronous`.
        replicas: how many.
    """
    share = len(job.batches) // replicas
    mean, done = MeanOfThreads(replicas), _Count()
    works: list[Callable[[], None]] = []
    runners: list[DecoupledRunner] = []
    for replica in range(replicas):
        module = job.module if replica == 0 else copy.deepcopy(job.module)
        averager = Averager(list(module.parameters()), mean, lap_rounds(share))
        apply = LocalApply(job.optimizer(module), dict(module.named_parameters()), options[replica])
        versions, supply = Versions.of_module(module), _Supply(job.batches[replica * share : (replica + 1) * share])

        def through(*_: Any, averager: Averager = averager) -> None:
            done.add(1)
            averager.batch_through()

        own = [
            DecoupledRunner(
                module, job.loss, apply, options[worker],
                scheduler=ThreadScheduler(costs[worker]), versions=versions, after_batch=through,
            )
            for worker in range(replica, len(options), replicas)
        ]  # fmt: skip
        runners += own

        def train(own: list[DecoupledRunner] = own, averager: Averager = averager, supply: _Supply = supply) -> None:
            try:
                with averager:
                    _together([partial(_feed, runner, supply) for runner in own])
            except BaseException:
                mean.abort()
                raise

        works.append(train)
    outcome = _watched(job, works, done)
    outcome.reports = [runner.report for runner in runners]
    return outcome


def asynchronous(job: Job, options: Sequence[DecoupledOptions], costs: Sequence[Cost | None]) -> Outcome:
    """Workers that share weights and batches, each with threads of its own.

    Args:
        job: what is trained.
        options: of each worker.
        costs: modelled compute of each worker; None for one that really computes.
    """
    parameters = dict(job.module.named_parameters())
    optimizer = job.optimizer(job.module)
    apply = LocalApply(optimizer, parameters, options[0])  # one for all: a parameter's first step is made alone
    done, versions = _Count(), Versions.of_module(job.module)
    runners = [
        DecoupledRunner(
            job.module, job.loss, apply, one,
            scheduler=ThreadScheduler(cost), versions=versions, after_batch=lambda *_: done.add(1),
        )
        for one, cost in zip(options, costs, strict=True)
    ]  # fmt: skip
    supply = _Supply(job.batches)

    outcome = _watched(job, [partial(_feed, runner, supply) for runner in runners], done)
    outcome.reports = [runner.report for runner in runners]
    return outcome


def synchronous(job: Job, costs: Sequence[Cost | None]) -> Outcome:
    """Workers in step, as in DDP: each has a copy, gradients are averaged once all are there.

    Args:
        job: what is trained; its module is the first worker's copy.
        costs: modelled compute of each worker, by layer as above.
    """
    copies = [job.module, *(copy.deepcopy(job.module) for _ in costs[1:])]
    optimizer = job.optimizer(job.module)
    layers = sum(1 for part in job.module.modules() if any(True for _ in part.parameters(recurse=False)))
    done = _Count()

    def step() -> None:
        with torch.no_grad():
            for parameter, *others in zip(*(c.parameters() for c in copies), strict=True):
                assert parameter.grad is not None
                for other in others:
                    parameter.grad += other.grad
                parameter.grad /= len(copies)
            optimizer.step()
            for parameter, *others in zip(*(c.parameters() for c in copies), strict=True):
                for other in others:
                    other.copy_(parameter)
        done.add(len(copies))

    barrier = threading.Barrier(len(copies), action=step)

    def work(rank: int) -> None:
        try:
            for number in range(rank, len(job.batches) - len(job.batches) % len(copies), len(copies)):
                copies[rank].zero_grad()
                job.loss(copies[rank], job.batches[number]).backward()  # type: ignore[no-untyped-call]
                _sleep(costs[rank], layers)
                barrier.wait()
        except BaseException:
            barrier.abort()
            raise

    return _watched(job, [lambda rank=rank: work(rank) for rank in range(len(copies))], done)  # type: ignore[misc]


def _sleep(cost: Cost | None, layers: int) -> None:
    if cost is not None:
        time.sleep(sum(cost("forward", layer) + cost("backward", layer) for layer in range(layers)))


def _feed(runner: DecoupledRunner, supply: _Supply) -> None:
    with runner:
        for batch in supply:
            runner.submit(batch)


def _together(works: Sequence[Callable[[], None]]) -> None:
    """Run works in threads and wait for them; the first error is raised here."""
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()


class _Count:
    """Batches that are through."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self.value += number


class _Supply:
    """Batches, each to whichever worker asks first."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = iter(batches)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._lock:
                batch = next(self._batches, None)
            if batch is None:
                return
            yield batch


def _watched(job: Job, works: Sequence[Callable[[], None]], done: _Count) -> Outcome:
    """Run workers in threads, judging the weights meanwhile; the first error of a worker is raised here."""
    outcome, errors = Outcome(), list[BaseException]()
    before = _memory()

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    start, judged = time.perf_counter(), 0
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        threads[0].join(_POLL_S) if threads[0].is_alive() else time.sleep(_POLL_S)
        outcome.memory_bytes = max(outcome.memory_bytes, _memory() - before)
        if job.score is not None and done.value >= judged + job.interval:
            judged = done.value
            outcome.scores.append((time.perf_counter() - start, judged, job.score(job.module)))
    outcome.seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    if job.score is not None:
        outcome.scores.append((outcome.seconds, done.value, job.score(job.module)))
    return outcome


def _memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
