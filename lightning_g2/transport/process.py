"""Start, watch and stop a server process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

ROLE_VARIABLE = "_LIGHTNING_G2_ROLE"
"""Private environment variable, set before a server imports anything: it keeps Lightning out of the process."""

_TAIL_LINES = 15


@dataclass(frozen=True)
class ServerAddress:
    """How the members of one RPC session find each other.

    Attributes:
        store_host: host of the job's key-value store.
        store_port: its port.
        session: name that no other session of the job has.
        ranks: number of ranks.
        servers: number of servers, the last members of the session.
        server: which of them is meant.
        init_counter: how often rank 0's process has initialised RPC before; all members adopt it.
        timeout_s: limit of the handshake, seconds.
        threads: intra-op threads of the server.
        secret: what members must know of each other.
        heartbeat_timeout_s: silence after which a rank is dropped, seconds.
    """

    store_host: str
    store_port: int
    session: str
    ranks: int
    init_counter: int
    timeout_s: float
    threads: int
    secret: str
    servers: int = 1
    server: int = 0
    heartbeat_timeout_s: float = 10.0

    @property
    def server_name(self) -> str:
        """The server's RPC name; see :meth:`name_of`."""
        return self.name_of(self.server)

    def name_of(self, server: int) -> str:
        """A server's RPC name.

        It must sort before the ranks': while RPC starts, everyone talks to the first name, and so ranks never connect
        to each other. A rank that dies then disturbs no other.
        """
        return f"{self.session}-parameter-server{server}"

    def rank_name(self, rank: int) -> str:
        """A rank's RPC name."""
        return f"{self.session}-rank{rank}"


class ServerProcess:
    """A server in a process of its own: ``python -m lightning_g2.transport``.

    Its standard input is a lifeline: the address goes down it, and when it closes, because :meth:`stop` was called or
    because the parent is gone in whatever way, the server ends. What it writes to standard error is kept in an unnamed
    file and quoted when the server is lost.

    Args:
        address: the session that the server shall join.
        device: where it shall keep weights and moments.
    """

    def __init__(self, address: ServerAddress, *, device: str = "cpu") -> None:
        self._address = address
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id once started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process; it comes up while the caller goes on."""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "lightning_g2.transport"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            env=self.environment(),
            # Ctrl-C in a terminal reaches the whole foreground group; the server ends with its parent, not before it.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        # Modules of the user's that define an optimizer must be importable in the server, too.
        line = json.dumps({"address": asdict(self._address), "path": [p for p in sys.path if p]})
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def environment(self) -> dict[str, str]:
        """The variables that the process is started with."""
        package_root = str(Path(__file__).resolve().parents[2])
        environment = dict(os.environ)
        environment[ROLE_VARIABLE] = "server"
        environment["PYTHONPATH"] = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment["OMP_NUM_THREADS"] = str(self._address.threads)
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # TensorPipe reports every peer that leaves as an error
        if self._device.partition(":")[0] == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""  # a CUDA context would cost memory
        return environment

    def poll(self) -> str | None:
        """None while the process runs, otherwise how it ended, with the last lines it wrote."""
        if self._process is None or self._process.poll() is None:
            return None
        tail = self._tail()
        how = describe_exit(self._process.pid, self._process.returncode)
        return f"server {how}" + (f"; its last lines:\n{tail}" if tail else "")

    def wait(self, timeout_s: float) -> str | None:
        """Like :meth:`poll`, but gives the process some time to end."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
        return self.poll()

    def stop(self, *, grace_s: float = 5.0) -> None:
        """Close the lifeline and wait; kill the process if it has not ended after ``grace_s`` seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None and not process.stdin.closed:
            with suppress(BrokenPipeError):  # it may have ended already
                # A byte, not only the end of the pipe: data loading workers that are still alive hold it open, too.
                process.stdin.write(b"\n")
                process.stdin.flush()
            with suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._stderr is not None:
            self._stderr.close()

    def _tail(self) -> str:
        if self._stderr is None or self._stderr.closed:
            return ""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def describe_exit(pid: int, code: int) -> str:
    """How a process ended; a negative code is the signal that killed it."""
    return f"process {pid} " + (f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")
