"""Lightning's script launcher, with children that are watched and never left behind."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_g2.strategy.refusal import refuse_world_size
from lightning_g2.strategy.rerun import hydra_job, rank_command
from lightning_g2.transport.process import describe_exit

_POLL_S = 0.2
GRACE_S = 30.0
"""How long other processes may take to learn of one's failure and to end because of it."""

CHILD_GRACE_S = 5.0
"""How long children may take to end by themselves after the main process has failed."""

CHILD_END_S = 60.0
"""How long children may take to end by themselves after the main process has come to its own end: they run the same
script, on a host that may be busy, and one that fails at last must not be taken for one that has not."""


class G2ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the script once for each further rank of the node.

    Lightning's own launcher kills every process some seconds after a child fails. This one first lets the failure reach
    the other ranks through the server, so that each ends with the reason, and kills only what does not end.

    Args:
        on_child_exit: called from a watching thread with the local rank and a description of a child that failed;
            returns whether the job goes on without it.
    """

    _family: _Family | None = None  # of this process, whichever launcher has started it
    _forgiven: ClassVar[set[int]] = set()  # local ranks that the job goes on without, likewise

    def __init__(self, *args: Any, on_child_exit: Callable[[int, str], bool], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_child_exit = on_child_exit
        self._running = False

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook can use it: only where there is nothing to start."""
        return self.num_processes * self.num_nodes == 1

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the children, watch them, and run the function."""
        self.forget_former_ranks()
        refuse_world_size(self.cluster_environment, devices=self.num_processes, nodes=self.num_nodes)
        with tempfile.TemporaryDirectory() as folder:
            if not self.cluster_environment.creates_processes_externally:
                self._start_children(Path(folder))
                threading.Thread(target=self._watch, name="g2-child-watch", daemon=True).start()
                atexit.register(self._judge_children)
            _set_num_threads_if_needed(num_processes=self.num_processes)
            self._running = True
            try:
                return function(*args, **kwargs)
            finally:
                self._running = False

    @classmethod
    def forget_former_ranks(cls) -> None:
        """Let this process start ranks anew where those that it has started before cannot take part.

        Those of the last job of a sweep have run that job, and end; a rank alone has started none.
        """
        family = G2ScriptLauncher._family
        if family is not None and (family.alone or family.job is not hydra_job()):
            family.forget()
            G2ScriptLauncher._family = None

    def end_children(self) -> None:
        """After a failure: let the children end by themselves, then end them."""
        atexit.unregister(self._judge_children)  # the main process's own exit code says what happened
        end_processes(self.procs, grace_s=CHILD_GRACE_S)

    def forgive(self, local_rank: int) -> None:
        """The job goes on without a rank of this node; however its process ends, that is no failure of the job."""
        self._forgiven.add(local_rank)

    def _judge_children(self) -> None:
        """At the main process's own end: a child that fails after its training makes the job fail, too."""
        atexit.unregister(self._judge_children)
        needed = [p for local_rank, p in enumerate(self.procs, start=1) if local_rank not in self._forgiven]
        _await_end(needed, CHILD_END_S)
        end_processes([p for p in self.procs if p not in needed], grace_s=0.0)  # they may be frozen
        if (how := self.failed_child()) is not None:
            print(f"lightning_g2: {how}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)

    def failed_child(self) -> str | None:
        """How the first failed child ended; None while none has."""
        for local_rank, process in enumerate(self.procs, start=1):
            if local_rank not in self._forgiven and process.poll():
                return f"rank {local_rank} of this node failed: {describe_exit(process.pid, process.returncode)}"
        return None

    def _start_children(self, folder: Path) -> None:
        self._check_can_spawn_children()
        environment = self.cluster_environment
        variables = {
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
            "NODE_RANK": str(environment.node_rank()),
            "LOCAL_RANK": str(environment.local_rank()),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
            # TensorPipe reports every peer that leaves as an error; children read this before they load torch.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        alone = self.num_processes * self.num_nodes == 1
        G2ScriptLauncher._family = _Family(variables, hydra_job(), alone=alone)
        self._forgiven.clear()
        command, added = rank_command(folder) if self.num_processes > 1 else ([], {})
        for local_rank in range(1, self.num_processes):
            own = {**os.environ, **added, "LOCAL_RANK": str(local_rank)}
            self.procs.append(subprocess.Popen(command, env=own))

    def _watch(self) -> None:
        while (failed := self._await_failure()) is not None:
            process = self.procs[failed - 1]
            if not self._on_child_exit(failed, describe_exit(process.pid, process.returncode)):
                break
            self.forgive(failed)
        else:
            return
        deadline = time.monotonic() + GRACE_S
        while self._running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self._running:
            self._give_up()

    def _await_failure(self) -> int | None:
        """Local rank of the first child that fails and is needed; None once all that are needed have ended well."""
        while True:
            codes = {i: p.poll() for i, p in enumerate(self.procs, start=1) if i not in self._forgiven}
            for local_rank, code in codes.items():
                if code:
                    return local_rank
            if all(code == 0 for code in codes.values()):
                return None
            time.sleep(_POLL_S)

    def _give_up(self) -> None:
        # The main thread hangs where no error reaches it, most likely in a collective with the dead rank.
        failed = "; ".join(
            f"rank {i}: {describe_exit(p.pid, p.returncode)}" for i, p in enumerate(self.procs, start=1) if p.returncode
        )
        message = "lightning_g2: a rank failed and the others did not end by themselves; ending the job"
        print(f"{message}. {failed}", file=sys.stderr, flush=True)
        end_processes(self.procs, grace_s=0.0)
        os._exit(1)  # the server ends with this process


class _Family:
    """The ranks of which this process is the first: the variables that made it so, and the Hydra job they run."""

    def __init__(self, variables: Mapping[str, str], job: Any | None, *, alone: bool) -> None:
        self.job = job
        self.alone = alone
        self._own_group = not dist.is_initialized()
        self._before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)

    def forget(self) -> None:
        """Make this process one that has started no ranks yet."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()


def end_processes(processes: Sequence[subprocess.Popen[Any] | BaseProcess], *, grace_s: float) -> None:
    """Give processes some time to end by themselves, then terminate and at last kill them."""
    _await_end(processes, grace_s)
    for end in ("terminate", "kill"):
        alive = [process for process in processes if _is_alive(process)]
        for process in alive:
            getattr(process, end)()
        _await_end(alive, 2.0)


def _await_end(processes: Sequence[subprocess.Popen[Any] | BaseProcess], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while any(_is_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_alive(process: subprocess.Popen[Any] | BaseProcess) -> bool:
    return process.poll() is None if isinstance(process, subprocess.Popen) else process.is_alive()
