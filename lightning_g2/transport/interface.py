"""Which network interface leads to another host; no name is looked up but the one that was asked for."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator

from lightning_g2.errors import TransportError

VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""What gloo and TensorPipe (RPC) read. Without it each binds to the address that the host's own name stands for, which
need not exist, and falls back to one that other hosts cannot reach."""

_SIOCGIFADDR = 0x8915


def choose_interface(host: str, port: int) -> str:
    """Let gloo and RPC of this process and its children bind to the interface that leads to a host.

    What the user has set in :data:`VARIABLES` stays.

    Args:
        host: host of the job's key-value store.
        port: its port.

    Returns:
        The interface's name, as set or chosen for RPC.

    Raises:
        TransportError: there is no way to that host.
    """
    if any(variable not in os.environ for variable in VARIABLES):
        name = interface_towards(host, port)
        for variable in VARIABLES:
            os.environ.setdefault(variable, name)
    return os.environ[VARIABLES[1]]


def stay_on_this_host() -> None:
    """Let a job of one host meet on loopback, where gloo and RPC then listen; what the user has set stays."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # SLURM's environment would take the host's name
    for variable in VARIABLES:
        os.environ.setdefault(variable, "lo")


def interface_towards(host: str, port: int) -> str:
    """Name of the interface from which this host would speak to another, or on which that host's address lies.

    Raises:
        TransportError: there is no way to that host.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: the system chooses route and source address
            source = probe.getsockname()[0]
    except OSError as error:
        raise TransportError(
            f"MASTER_ADDR={host!r}: this host has no way there ({error.strerror or error}); give an address that all "
            "nodes reach"
        ) from error
    addresses = _addresses_4() if family == socket.AF_INET else _addresses_6()
    name = next((name for name, address in addresses if address == source.split("%")[0]), None)
    if name is None:
        raise TransportError(
            f"MASTER_ADDR={host!r}: no interface has the address {source} that leads there; name one in "
            f"{' and '.join(VARIABLES)}"
        )
    return name


def _addresses_4() -> Iterator[tuple[str, str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            yield name, socket.inet_ntoa(answer[20:24])


def _addresses_6() -> Iterator[tuple[str, str]]:
    with open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            fields = line.split()
            yield fields[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))
