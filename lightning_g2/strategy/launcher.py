"""Lightning's script launcher, with children that are watched and never left behind."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_g2.transport.process import describe_exit

_POLL_S = 0.2
_GRACE_S = 15.0
"""How long the main process may take to learn of a child's failure and to end because of it."""

CHILD_GRACE_S = 5.0
"""How long children may take to end by themselves after the main process has failed."""


class G2ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the script once for each further rank of the node.

    Lightning's own launcher kills every process some seconds after a child fails. This one first lets the failure reach
    the other ranks through the server, so that each ends with the reason, and kills only what does not end.

    Args:
        on_child_exit: called from a watching thread with the local rank and a description of a child that failed.
    """

    def __init__(self, *args: Any, on_child_exit: Callable[[int, str], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_child_exit = on_child_exit
        self._running = False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the children, watch them, and run the function."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=self._watch, name="g2-child-watch", daemon=True).start()
            atexit.register(self._judge_children)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        self._running = True
        try:
            return function(*args, **kwargs)
        finally:
            self._running = False

    def end_children(self) -> None:
        """After a failure: let the children end by themselves, then end them."""
        atexit.unregister(self._judge_children)  # the main process's own exit code says what happened
        end_processes(self.procs, grace_s=CHILD_GRACE_S)

    def _judge_children(self) -> None:
        """At the main process's own end: a child that fails after its training makes the job fail, too."""
        atexit.unregister(self._judge_children)
        deadline = time.monotonic() + CHILD_GRACE_S
        while any(p.poll() is None for p in self.procs) and time.monotonic() < deadline:
            time.sleep(0.02)
        if (how := self.failed_child()) is not None:
            print(f"lightning_g2: {how}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)

    def failed_child(self) -> str | None:
        """How the first failed child ended; None while none has."""
        for local_rank, process in enumerate(self.procs, start=1):
            if process.poll():
                return f"rank {local_rank} of this node failed: {describe_exit(process)}"
        return None

    def _call_children_scripts(self) -> None:
        # TensorPipe reports every peer that leaves as an error; children read this before they load torch.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        super()._call_children_scripts()

    def _watch(self) -> None:
        failed = self._await_failure()
        if failed is None:
            return
        self._on_child_exit(failed, describe_exit(self.procs[failed - 1]))
        deadline = time.monotonic() + _GRACE_S
        while self._running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self._running:
            self._give_up()

    def _await_failure(self) -> int | None:
        """Local rank of the first child that fails; None once all have ended well."""
        while True:
            codes = [process.poll() for process in self.procs]
            for local_rank, code in enumerate(codes, start=1):
                if code:
                    return local_rank
            if all(code == 0 for code in codes):
                return None
            time.sleep(_POLL_S)

    def _give_up(self) -> None:
        # The main thread hangs where no error reaches it, most likely in a collective with the dead rank.
        failed = "; ".join(f"rank {i}: {describe_exit(p)}" for i, p in enumerate(self.procs, start=1) if p.returncode)
        message = "lightning_g2: a rank failed and the others did not end by themselves; ending the job"
        print(f"{message}. {failed}", file=sys.stderr, flush=True)
        end_processes(self.procs, grace_s=0.0)
        os._exit(1)  # the server ends with this process


def end_processes(processes: list[subprocess.Popen[Any]], *, grace_s: float) -> None:
    """Give processes some time to end by themselves, then terminate and at last kill them."""
    deadline = time.monotonic() + grace_s
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        alive = [p for p in processes if p.poll() is None]
        for process in alive:
            end(process)
        limit = time.monotonic() + 2.0
        while any(p.poll() is None for p in alive) and time.monotonic() < limit:
            time.sleep(0.05)
