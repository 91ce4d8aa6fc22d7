"""A job on two hosts, a server on each: network namespaces that a veth pair joins."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.namespaces import NodeOutcome, TwoHosts, two_hosts

LIMIT_S = 120.0
SIZE, PUSHES = 40_000, 60


def notes(folder: Path, nodes: list[NodeOutcome]) -> list[dict]:
    assert [node.code for node in nodes] == [0, 0], "\n".join(node.output for node in nodes)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


def check_exactness(ranks: list[dict], *, pushes: int) -> None:
    for note in ranks:
        assert note["uniform"]
        assert note["validated"] == note["last"] == [-pushes], "all ranks see all pushes on all servers"
        assert note["versions"] == [pushes, pushes]
        assert sum(note["pushes"].values()) == pushes


@pytest.mark.timeout(2 * LIMIT_S)
def test_every_push_counts_on_both_hosts(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as hosts:
        hosts.launch("two_hosts.py", tmp_path, PUSHES, SIZE, 60)
        ranks = notes(tmp_path, hosts.wait(LIMIT_S))
        check_exactness(ranks, pushes=PUSHES)
        assert [note["transport"] for note in ranks] == [["shm", "rpc"]] * 2 + [["rpc", "shm"]] * 2
        sizes = ranks[0]["server_bytes"]
        assert all(abs(size - 4 * SIZE / 2) <= 64 * 2 for size in sizes), (
            "balanced by bytes, each vector on whole lines"
        )
        assert hosts.left() == []


def until_all_train(folder: Path, hosts: TwoHosts) -> None:
    limit = time.monotonic() + LIMIT_S
    while not all((folder / f"training{rank}").exists() for rank in range(4)):
        assert time.monotonic() < limit, [node.output for node in hosts.wait(0)]
        time.sleep(0.1)


# What follows takes its time; each network is named for what it is.


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT_S)
def test_a_link_capped_at_100_megabits_a_second(tmp_path: Path) -> None:
    """Token bucket filter on both ends of the veth pair: what a push and its answer take in time and bytes."""
    pushes, size = 40, 500_000
    with two_hosts(tmp_path) as hosts:
        hosts.cap_bandwidth(100)
        hosts.launch("two_hosts.py", tmp_path, pushes, size, 60)
        ranks = notes(tmp_path, hosts.wait(2 * LIMIT_S))
        check_exactness(ranks, pushes=pushes)
        # Each push crosses once, with the half of it that the other host's server owns; so does its answer.
        crossed = hosts.sent_bytes(0) + hosts.sent_bytes(1)
        least = 2 * pushes * 4 * size // 2
        print(f"\n{crossed} bytes between the hosts, {crossed / least:.2f} times those of gradients and weights alone")
        assert least < crossed < 1.35 * least, "the rest: initial weights, sync points, headers"
        steps = sorted(step for note in ranks for step in note["step_s"])
        print(f"median step {steps[len(steps) // 2]:.3f} s of {len(steps)}")


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT_S)
def test_a_delay_of_fifty_milliseconds_each_way(tmp_path: Path) -> None:
    """Packets are held by a forwarding process at each end; bandwidth is what that process manages."""
    with two_hosts(tmp_path) as hosts:
        hosts.delay(0.05)
        hosts.launch("two_hosts.py", tmp_path, PUSHES, SIZE, 60)
        ranks = notes(tmp_path, hosts.wait(2 * LIMIT_S))
        check_exactness(ranks, pushes=PUSHES)
        steps = sorted(step for note in ranks for step in note["step_s"])
        print(f"\nmedian step {steps[len(steps) // 2]:.3f} s of {len(steps)}")
        assert hosts.left() == []


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT_S)
def test_a_partition_ends_the_job_on_both_hosts(tmp_path: Path) -> None:
    """The link goes down in the middle of training: no connection is closed, packets just no longer come."""
    timeout_s = 6
    with two_hosts(tmp_path) as hosts:
        hosts.launch("two_hosts.py", tmp_path, 1_000_000, SIZE, timeout_s)
        until_all_train(tmp_path, hosts)
        hosts.cut()
        cut = time.monotonic()
        nodes = hosts.wait(LIMIT_S)
        print(f"\nboth nodes had ended {time.monotonic() - cut:.1f} s after the cut, with timeout_s={timeout_s}")
        for host, node in enumerate(nodes):
            assert node.code not in (0, None), node.output
            assert f"server {1 - host} was lost" in node.output, node.output
        assert hosts.left() == []


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT_S)
def test_the_death_of_a_server_is_named_on_both_hosts(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as hosts:
        hosts.launch("two_hosts.py", tmp_path, 1_000_000, SIZE, 60)
        until_all_train(tmp_path, hosts)
        os.kill(json.loads((tmp_path / "servers2.json").read_text())["1"], signal.SIGKILL)
        killed = time.monotonic()
        nodes = hosts.wait(LIMIT_S)
        print(f"\nboth nodes had ended {time.monotonic() - killed:.1f} s after the server")
        for node in nodes:
            assert node.code not in (0, None), node.output
            assert "server 1 was lost" in node.output, node.output
        assert "was killed by signal 9" in nodes[1].output, "the host that had started it knows how it ended"
        assert hosts.left() == []
