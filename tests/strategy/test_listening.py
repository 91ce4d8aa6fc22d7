"""A job of one host can be reached from this host only: the sockets of its processes, while it trains."""

import json
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path


def test_everything_listens_on_loopback(run_job: Callable, tmp_path: Path) -> None:
    job = run_job("listening.py", tmp_path)
    assert job.code == 0, job.output
    for name, facts in json.loads((tmp_path / "listening.json").read_text()).items():
        servers = [process for process in facts["processes"] if process["server"]]
        assert len(servers) == {"shm": 1, "rpc": 2}[name]
        others = [process for process in facts["processes"] if not process["server"]]
        ranks = [process for process in others if process["sockets"]]
        assert len(ranks) == 2
        found = [socket for process in facts["processes"] for socket in process["sockets"]]
        assert len(found) >= 1 + 2 + 2 + len(servers), "the store, gloo and RPC of both ranks, RPC of servers"
        assert [address for address, _ in found if not ip_address(address).is_loopback] == []
        assert facts["port"] in [port for _, port in found], "the store"
