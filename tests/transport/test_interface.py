"""RPC and gloo bind to the interface that leads to the job's store, unless the user has named one."""

import os
import socket

import pytest

from lightning_g2.errors import TransportError
from lightning_g2.transport.interface import choose_interface, interface_towards


def test_the_way_to_this_host_is_loopback() -> None:
    assert interface_towards("127.0.0.1", 29500) == "lo"


def test_an_interface_that_exists_is_chosen_and_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TP_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert choose_interface("127.0.0.1", 29500) in [name for _, name in socket.if_nameindex()]
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["TP_SOCKET_IFNAME"]) == ("mine", "lo")
    monkeypatch.setenv("TP_SOCKET_IFNAME", "other")
    assert choose_interface("nowhere.invalid", 29500) == "other", "nothing is looked up where all is said"


def test_a_host_without_a_way_is_named() -> None:
    with pytest.raises(TransportError, match=r"MASTER_ADDR='255\.255\.255\.255': this host has no way there"):
        interface_towards("255.255.255.255", 29500)
