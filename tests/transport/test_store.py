"""The job's key-value store listens at the address of its host's name, and a process group shares it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import psutil
import pytest
import torch.distributed as dist

from lightning_g2.transport import bulletin
from lightning_g2.transport.store import _listener, open_store


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listening(port: int) -> list[str]:
    return [c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == port]


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    yield
    bulletin._stores.clear()


def test_a_process_group_shares_it_and_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    port = _port()
    store = open_store("127.0.0.1", port)
    store.set("who", "hosts it")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=0, world_size=1)
    assert _listening(port) == ["127.0.0.1"]
    del store
    assert dist.TCPStore("127.0.0.1", port, is_master=False).get("who") == b"hosts it"
    dist.destroy_process_group()
    assert _listening(port) == []


def test_what_was_posted_before_is_in_the_same_store() -> None:
    port = _port()
    bulletin.post("127.0.0.1", port, "job", "text")
    again = open_store("127.0.0.1", port)
    assert again.get("job") == b"text"
    assert _listening(port) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("name", "address", "nodes"),
    [
        ("a-service", "192.0.2.1", 1),  # an address that is reserved for documents: nobody has it
        ("this-host", "127.0.1.1", 2),  # as many hosts know their own name; others have another address for it
    ],
)
def test_where_no_address_fits_all_hosts_torch_listens_and_that_is_said(
    name: str, address: str, nodes: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with caplog.at_level(logging.WARNING):
        assert _listener(name, 0, nodes) is None
    assert f"MASTER_ADDR={name!r} is no address of this host" in caplog.text


def test_two_nodes_on_one_host_meet_on_loopback() -> None:
    listener = _listener("127.0.0.1", 0, 2)
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_taken_port_is_torchs_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RuntimeError, match=r"(?i)address already in use|EADDRINUSE"):
            open_store("127.0.0.1", taken.getsockname()[1])
