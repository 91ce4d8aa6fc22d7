"""The job's key-value store, listening where the job can reach it and nowhere else."""

from __future__ import annotations

import errno
import logging
import os
import socket
from ipaddress import ip_address

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

_log = logging.getLogger("lightning.pytorch.g2async")

_BACKLOG = 2048


def open_store(host: str, port: int, *, nodes: int = 1) -> Store:
    """The job's key-value store, on rank 0, which hosts it unless torchrun does.

    Torch's own would listen on all interfaces. This one listens at the one address that the host's name stands for; a
    process group that is started at this port while it is open shares it.

    Args:
        host: what the job calls the store's host, ``MASTER_ADDR``.
        port: its port.
        nodes: number of hosts that have to reach it.

    Raises:
        RuntimeError: the port is taken.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return TCPStore(host, port, is_master=False, wait_for_workers=False)
    listener = _listener(host, port, nodes)
    descriptor = None if listener is None else listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor)


def _listener(host: str, port: int, nodes: int) -> socket.socket | None:
    """A socket at the address of a host's name; None where torch has to find one, or already has."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None  # torch says it better
    # Many hosts map their own name to loopback, which other hosts, where it stands for another address, do not reach.
    hidden = nodes > 1 and ip_address(target[0]).is_loopback and not _is_loopback(host)
    listener = socket.socket(family, kind, protocol)
    try:
        if hidden:
            raise OSError(errno.EADDRNOTAVAIL, "its own name is loopback here")
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:  # then this process has the store already, or torch refuses the port
            _log.warning(
                f"MASTER_ADDR={host!r} is no address of this host ({error.strerror}): the job's key-value store "
                "listens on all interfaces; give the address of one"
            )
        return None
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
