"""Memory of this process and of the server that it has started, as the kernel accounts for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_FIELDS = {"Rss": "rss", "Pss": "pss", "Pss_Anon": "anonymous", "Pss_Shmem": "shared"}


def memory(pid: int | str = "self") -> dict[str, int]:
    """Bytes of a process: ``rss``, ``pss``, and of the latter ``anonymous`` and ``shared`` (memory files).

    In the proportional set size (PSS) a page that n processes map counts one n-th for each: summed over the processes
    of a job every page counts once.
    """
    sizes: dict[str, int] = {}
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as table:
        for line in table:
            name, _, rest = line.partition(":")
            if name in _FIELDS:
                sizes[_FIELDS[name]] = 1024 * int(rest.split()[0])
    return sizes


def own_memory() -> dict[str, int]:
    """Bytes of this process."""
    return memory()


def servers_of(pid: int) -> Iterator[int]:
    """Server processes that a process has started."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it has ended meanwhile
            if parent == pid and b"lightning_g2.transport" in command:
                yield int(entry.name)


def server_memory() -> dict[str, int]:
    """Bytes of the server that this process has started."""
    return memory(next(servers_of(os.getpid())))
