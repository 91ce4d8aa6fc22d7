"""Two hosts on one machine: network namespaces that are joined by a veth pair and by nothing else.

Processes of one cannot reach those of the other but over that pair; each host has a name that nothing resolves. The
namespaces have no names of their own and are held by one process each, which ends when the test's process does: there
is nothing that could be left behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT, SCRIPTS, session_processes

ADDRESSES = ("10.213.7.1", "10.213.7.2")
_DEVICES = ("g2left", "g2right")
_PORT = 29_613  # both hosts are empty: every port is free


@dataclass(frozen=True)
class NodeOutcome:
    """How one node's command ended: exit code (None: it had to be killed), all it printed, seconds it took."""

    code: int | None
    output: str
    seconds: float


class TwoHosts:
    """Both hosts, and what runs on them.

    Args:
        folder: takes the output of commands.
        holders: a process in each host's namespaces.
        enter: command words that put a command into the namespaces of a process.
    """

    def __init__(self, folder: Path, holders: list[subprocess.Popen[bytes]], enter: Sequence[str]) -> None:
        self._folder = folder
        self._holders = holders
        self._enter = list(enter)
        self._mark = f"G2_TEST_MARK=hosts-{os.getpid()}-{time.monotonic_ns()}"
        self._running: list[tuple[subprocess.Popen[bytes], Path, float]] = []

    def run(self, host: int, *words: str) -> str:
        """Run a command on a host and return what it prints."""
        done = subprocess.run(self._at(host, words), capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, f"{words} on host {host}: {done.stderr}"
        return done.stdout

    def launch(self, script: str, *arguments: object, env: dict[str, str] | None = None) -> None:
        """Start a script of tests/scripts on both hosts, as nodes 0 and 1 of one job; node 0 has the job's store."""
        name, value = self._mark.split("=")
        for host in range(2):
            environment = os.environ | {
                "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", name: value,
                "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(_PORT), "NODE_RANK": str(host), **(env or {}),
            }  # fmt: skip
            log = self._folder / f"node{host}.log"
            words = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
            with log.open("wb") as sink:
                process = subprocess.Popen(
                    self._at(host, words), stdout=sink, stderr=subprocess.STDOUT, env=environment, cwd=self._folder,
                    start_new_session=True,
                )  # fmt: skip
            self._running.append((process, log, time.monotonic()))

    def wait(self, timeout_s: float) -> list[NodeOutcome]:
        """Wait for both nodes to end; what has not ended by then is killed."""
        deadline = time.monotonic() + timeout_s
        ended = []
        for process, log, start in self._running:
            try:
                code: int | None = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            ended.append((code, log, time.monotonic() - start))
        self._running.clear()
        return [NodeOutcome(code, log.read_text(errors="replace"), seconds) for code, log, seconds in ended]

    def left(self, patience_s: float = 60.0) -> list[int]:
        """Pids of processes of the job that live on, once they have had some time to end; they are killed."""
        limit = time.monotonic() + patience_s
        while (pids := session_processes(self._mark)) and time.monotonic() < limit:
            time.sleep(0.05)
        for pid in pids:
            os.kill(pid, 9)
        return pids

    def sent_bytes(self, host: int) -> int:
        """Bytes that a host has sent to the other so far, headers of all layers included."""
        table = self.run(host, "cat", "/proc/self/net/dev").splitlines()
        counts = next(line.split(":")[1].split() for line in table if line.strip().startswith(_DEVICES[host]))
        return int(counts[8])

    def cap_bandwidth(self, megabits_per_s: int) -> None:
        """Cap what each host sends, with a token bucket filter (tc's tbf)."""
        for host, device in enumerate(_DEVICES):
            rate = ["rate", f"{megabits_per_s}mbit", "burst", "256kb", "latency", "100ms"]
            self.run(host, "tc", "qdisc", "add", "dev", device, "root", "tbf", *rate)

    def delay(self, seconds: float) -> None:
        """Replace the pair by a line on which each packet is held for some time: a forwarding process at each end."""
        self.run(0, "ip", "link", "del", _DEVICES[0])  # its peer goes with it
        (from_0, to_1), (from_1, to_0) = os.pipe(), os.pipe()
        for host, (source, sink) in enumerate(((from_1, to_1), (from_0, to_0))):
            words = [sys.executable, str(SCRIPTS / "delay_line.py"), _DEVICES[host], ADDRESSES[host], str(seconds)]
            self._holders.append(subprocess.Popen(self._at(host, words), stdin=source, stdout=sink))
        for pipe in (from_0, to_1, from_1, to_0):
            os.close(pipe)
        limit = time.monotonic() + 10.0
        while any("UP" not in self.run(h, "ip", "-br", "link").partition(d)[2] for h, d in enumerate(_DEVICES)):
            assert time.monotonic() < limit, "the line did not come up"
            time.sleep(0.05)

    def cut(self) -> None:
        """Part the hosts: the link goes down; no packet, not even one that ends a connection, comes through."""
        self.run(1, "ip", "link", "set", _DEVICES[1], "down")

    def _at(self, host: int, words: Sequence[str]) -> list[str]:
        return [*self._enter, "-t", str(self._holders[host].pid), "--", *words]


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Two hosts for a test; skips it where namespaces are not permitted or iproute2 is not installed."""
    holders: list[subprocess.Popen[bytes]] = []
    root = os.geteuid() == 0
    enter = ["nsenter", "-n", "-u"] if root else ["nsenter", "-U", "--preserve-credentials", "-n", "-u"]
    try:
        holders.append(_hold(["unshare", "-n", "-u"] if root else ["unshare", "-r", "-n", "-u"], "g2-nowhere-0"))
        holders.append(_hold([*enter, "-t", str(holders[0].pid), "--", "unshare", "-n", "-u"], "g2-nowhere-1"))
        hosts = TwoHosts(folder, holders, enter)
        _join(hosts, holders[1].pid)
    except (OSError, _NotPermittedError, AssertionError) as error:
        _end(holders)
        pytest.skip(f"two network namespaces cannot be joined here: {error}")
    try:
        yield hosts
    finally:
        hosts.left(patience_s=0.0)
        _end(holders)


class _NotPermittedError(Exception):
    pass


def _hold(words: list[str], name: str) -> subprocess.Popen[bytes]:
    """A process in new namespaces that lives until the pipe to it closes, hence no longer than this one."""
    command = [*words, "sh", "-c", f"hostname {name} && echo ready && exec cat"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline() != b"ready\n":
        reason = holder.stderr.read().decode().strip()
        _end([holder])
        raise _NotPermittedError(reason or "unshare failed")
    return holder


def _join(hosts: TwoHosts, other: int) -> None:
    left, right = _DEVICES
    hosts.run(0, "ip", "link", "add", left, "type", "veth", "peer", "name", right, "netns", str(other))
    for host, device in enumerate(_DEVICES):
        hosts.run(host, "ip", "address", "add", f"{ADDRESSES[host]}/24", "dev", device)
        hosts.run(host, "ip", "link", "set", device, "up")
        hosts.run(host, "ip", "link", "set", "lo", "up")


def _end(holders: Sequence[subprocess.Popen[bytes]]) -> None:
    for holder in holders:
        for pipe in (holder.stdin, holder.stdout, holder.stderr):
            if pipe is not None:
                pipe.close()
        holder.kill()
        holder.wait()
