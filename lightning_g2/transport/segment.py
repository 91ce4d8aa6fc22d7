"""Shared memory between a rank and a server of the same host: RPC carries control, gradients and weights never move.

Each rank has one segment of its own: a gradient half, which the rank fills and the optimizer reads, and a weights half,
which the server fills while it answers that rank's push. Question and answer take turns, so no half is ever written
while the other side reads it.

Segments are anonymous files of the server (``memfd``): they have no name that could be left behind, and are gone when
the processes are, however those end.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_g2.errors import TransportError


@dataclass(frozen=True)
class Segment:
    """One rank's segment.

    Attributes:
        gradients: ``uint8``, shape (size_bytes,), written by the rank.
        weights: ``uint8``, shape (size_bytes,), written by the server.
        pid: the server's process.
        descriptor: the segment's file descriptor there.
    """

    gradients: Tensor
    weights: Tensor
    pid: int
    descriptor: int

    @classmethod
    def create(cls, size_bytes: int) -> Segment:
        """Make a segment, in the server.

        Raises:
            TransportError: the system has no room for it.
        """
        # The kernel does not refuse a memory file that is too large: it ends processes once memory has run out.
        length, available = _length(size_bytes), _available_bytes()
        if length > available:
            raise TransportError(
                f"shared memory: a rank needs {length} bytes, {available} are available on this host; free memory, use "
                "fewer ranks or use transport='rpc'"
            )
        descriptor = os.memfd_create("lightning_g2")
        os.fchmod(descriptor, 0o600)  # the kernel makes them for everyone
        os.posix_fallocate(descriptor, 0, length)
        return cls._map(os.getpid(), descriptor, descriptor, size_bytes)

    @classmethod
    def open(cls, pid: int, descriptor: int, size_bytes: int) -> Segment:
        """Open a server's segment, in a rank.

        Raises:
            TransportError: the server is not on this host, or belongs to another user.
        """
        try:
            own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        except OSError as error:
            raise TransportError(
                f"shared memory: the segment of server process {pid} cannot be opened ({error.strerror}); rank and "
                "server must run on one host, as one user and in one PID namespace, or use transport='rpc'"
            ) from error
        try:
            return cls._map(pid, descriptor, own, size_bytes)
        finally:
            os.close(own)

    @classmethod
    def _map(cls, pid: int, descriptor: int, own: int, size_bytes: int) -> Segment:
        whole = torch.frombuffer(mmap.mmap(own, _length(size_bytes)), dtype=torch.uint8)
        half = _length(size_bytes) // 2
        return cls(whole[:size_bytes], whole[half : half + size_bytes], pid, descriptor)


def _available_bytes() -> int:
    """Memory that can be had without swapping."""
    with open("/proc/meminfo", encoding="ascii") as table:
        kibibytes = next(line.split()[1] for line in table if line.startswith("MemAvailable:"))
    return 1024 * int(kibibytes)


def _length(size_bytes: int) -> int:
    """Length of a segment: two halves of whole pages, at least one each."""
    pages = max(1, -(-size_bytes // mmap.PAGESIZE))
    return 2 * pages * mmap.PAGESIZE
