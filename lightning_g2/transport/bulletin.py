"""A text that rank 0 of a job posts and the other ranks read, before there is a process group."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from lightning_g2.transport.store import open_store

_stores: dict[tuple[str, int], Store] = {}
"""Stores that this process holds: one that it hosts must outlive the reading, and the process group joins it then."""


def post(host: str, port: int, key: str, text: str, *, nodes: int = 1) -> None:
    """Post a text, on rank 0.

    Args:
        host: host of the job's key-value store; this one, unless what started the ranks hosts the store.
        port: its port.
        key: what the text goes by.
        text: the text.
        nodes: number of hosts that have to reach it.
    """
    store = _stores[host, port] = open_store(host, port, nodes=nodes)
    store.set(key, text)


def read(host: str, port: int, key: str, *, timeout_s: float) -> str:
    """Read a text, waiting until it is posted.

    Raises:
        TimeoutError: it was not posted in time.
    """
    limit = timedelta(seconds=timeout_s)
    try:
        store = TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        store.wait([key], limit)
    except RuntimeError as error:
        raise TimeoutError(f"{key!r} was not posted at {host}:{port} within {timeout_s:.0f} s") from error
    text: bytes = store.get(key)
    return text.decode()
