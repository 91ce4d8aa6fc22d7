"""Lightning's multiprocessing launcher, with workers that end with the reason and are never left behind."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle
from lightning.fabric.strategies.launchers.multiprocessing import _check_bad_cuda_fork, _check_missing_main_guard
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from torch import multiprocessing as mp
from torch.distributed import rpc
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException, start_processes

from lightning_g2.errors import ConfigurationError
from lightning_g2.strategy.launcher import CHILD_GRACE_S, GRACE_S, G2ScriptLauncher, end_processes
from lightning_g2.strategy.refusal import refuse_world_size
from lightning_g2.transport.process import describe_exit

_PEER_ERROR = "lightning_g2.errors.PeerFailedError: rank"
"""Last line of a traceback that only repeats another rank's error."""


class G2WorkerLauncher(_MultiProcessingLauncher):
    """Runs every rank of the node, rank 0 included, in a process that ``multiprocessing`` starts.

    Lightning's own launcher terminates all processes as soon as one fails. This one first lets the failure reach the
    other ranks through the server, ends what does not end, and raises the error of the rank that failed by itself.

    Args:
        strategy: the strategy.
        start_method: ``"spawn"`` or ``"fork"``.
        on_child_exit: called in rank 0 with the local rank and a description of a process that failed; returns
            whether the job goes on without it.

    Attributes:
        failed: whether a launch has failed, in the process that called it.
    """

    def __init__(self, strategy: DDPStrategy, start_method: Any, *, on_child_exit: Callable[[int, str], bool]) -> None:
        super().__init__(strategy, start_method)
        self._strategy: DDPStrategy = strategy
        self._on_child_exit = on_child_exit
        self._failed_child: str | None = None
        self._results: Any = None  # in rank 0, what leads to the main process
        self.failed = False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run the function in every process; returns what rank 0's returned, and takes over what the trainer holds."""
        environment = self._strategy.cluster_environment
        assert environment is not None
        G2ScriptLauncher.forget_former_ranks()
        self._check(trainer)
        context = mp.get_context(self._start_method)
        results, news = context.SimpleQueue(), context.SimpleQueue()
        states = _GlobalStateSnapshot.capture() if self._start_method == "spawn" else None
        with _environment(MASTER_PORT=str(environment.main_port), TORCH_CPP_LOG_LEVEL="ERROR"):
            group = start_processes(  # type: ignore[no-untyped-call]
                self._run_rank,
                args=(trainer, function, args, kwargs, results, states, news),
                nprocs=self._strategy.num_processes,
                start_method=self._start_method,
                join=False,
            )
        self.procs = group.processes
        output = self._await(group, results, news)
        if trainer is None:
            return output
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    def failed_child(self) -> str | None:
        """How the first failed process ended; None while none has. Known in rank 0 only."""
        return self._failed_child

    def forgive(self, local_rank: int) -> None:
        """The job goes on without a rank of this node; however its process ends, that is no failure of the job."""
        if self._results is not None:
            self._results.put(_Forgiven(local_rank))

    def _check(self, trainer: Trainer | None) -> None:
        environment = self._strategy.cluster_environment
        assert environment is not None
        if environment.creates_processes_externally:
            raise ConfigurationError(
                f"start_method={self._start_method!r}: {type(environment).__name__} says that this process is a rank "
                "already, started from outside; use strategy='g2async', which starts none then"
            )
        refuse_world_size(environment, devices=self._strategy.num_processes, nodes=self._strategy.num_nodes)
        if self._start_method == "fork" and rpc._init_counter:
            raise ConfigurationError(
                "start_method='fork' after a rank has trained in this process: torch gives a process, and what is "
                "forked from it, one RPC identity for good; start the session anew, and train a rank alone with "
                "strategy='g2async_fork' and devices=1, which leaves it clean"
            )
        if self._start_method == "spawn":
            _check_missing_main_guard()
        else:
            _check_bad_cuda_fork()
        if self._already_fit and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            raise NotImplementedError(
                "trainer.fit() a second time: processes that start anew have nothing of the first fit but the weights; "
                "make a new Trainer for it, and pass ckpt_path to go on from a checkpoint"
            )

    # --- in a rank's process ------------------------------------------------------------------------------------------

    def _run_rank(
        self, local_rank: int, trainer: Trainer | None, function: Any, args: Any, kwargs: Any, results: Any,
        states: Any, news: Any,
    ) -> None:  # fmt: skip
        if "__mp_main__" in sys.modules:  # what the user's script defines, which the server cannot import
            cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
        if local_rank == 0:
            self._results = results
            threading.Thread(target=self._listen, args=(news,), name="g2-news", daemon=True).start()
        try:
            self._wrapping_function(local_rank, trainer, function, args, kwargs, results, states)
        except BaseException as error:
            if trainer is not None:
                _interrupt(trainer, error)
            if isinstance(error, KeyboardInterrupt):
                raise SystemExit(1) from error
            raise

    def _listen(self, news: Any) -> None:
        while True:
            local_rank, how = news.get()
            failed, self._failed_child = self._failed_child, f"rank {local_rank} of this node failed: {how}"
            if self._on_child_exit(local_rank, how):
                self._failed_child = failed
                self.forgive(local_rank)
            else:
                self._failed_child = failed or self._failed_child

    # --- in the main process ------------------------------------------------------------------------------------------

    def _await(self, group: ProcessContext, results: Any, news: Any) -> Any:
        """Wait for all ranks to end; returns what rank 0 has sent.

        Raises:
            ProcessException: a rank failed.
        """
        running = {process.sentinel: rank for rank, process in enumerate(self.procs)}
        failed: list[int] = []
        forgiven: set[int] = set()
        received: list[Any] = []
        deadline: float | None = None
        try:
            while not forgiven.issuperset(running.values()) and (deadline is None or time.monotonic() < deadline):
                wait([results._reader, *running], None if deadline is None else deadline - time.monotonic())
                if not results.empty():  # taken at once: rank 0 could not end while it sends something large
                    received.append(results.get())
                    if isinstance(received[-1], _Forgiven):
                        forgiven.add(received.pop().local_rank)
                        failed = [rank for rank in failed if rank not in forgiven]
                        deadline = deadline if failed else None
                for sentinel, rank in list(running.items()):
                    process = self.procs[rank]
                    if process.is_alive():
                        continue
                    del running[sentinel]
                    process.join()
                    if process.exitcode and rank not in forgiven:
                        failed.append(rank)
                        news.put((rank, _ending(process)))
                        deadline = deadline or time.monotonic() + GRACE_S
        except BaseException:
            self.failed = True
            self.kill(signal.SIGINT)  # Ctrl-C in a terminal has reached them already, a signal to this process has not
            end_processes(self.procs, grace_s=CHILD_GRACE_S)
            raise
        end_processes(self.procs, grace_s=0.0)
        if failed:
            self.failed = True
            raise _culprit(group, failed)
        if not received:
            raise SystemExit(0)  # rank 0 left by sys.exit(0)
        return received[0]


@dataclass(frozen=True)
class _Forgiven:
    """Rank 0's word to the main process: the job goes on without this rank of the node."""

    local_rank: int


def _interrupt(trainer: Trainer, error: BaseException) -> None:
    """What Lightning does in the process that called the trainer, done in the one that trains."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C would leave the server to itself
    call._interrupt(trainer, error)
    trainer._teardown()


def _culprit(group: ProcessContext, failed: list[int]) -> Exception:
    """The error of the first rank that failed by itself, not because of another."""
    traces: dict[int, str | None] = {}
    for rank, name in enumerate(group.error_files):
        file = Path(name)
        if file.exists():
            traces[rank] = pickle.loads(file.read_bytes())
            file.unlink()
    rank = next((r for r in failed if _PEER_ERROR not in (traces.get(r) or "")), failed[0])
    process, trace = group.processes[rank], traces.get(rank)
    if trace is not None:
        return ProcessRaisedException(f"rank {rank} of this node failed:\n{trace}", rank, process.pid)
    return ProcessExitedException(
        f"rank {rank} of this node failed: {_ending(process)}", rank, process.pid, process.exitcode
    )


def _ending(process: BaseProcess) -> str:
    assert process.pid is not None
    assert process.exitcode is not None
    return describe_exit(process.pid, process.exitcode)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set variables for processes that are started within, unless the user has set them."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
