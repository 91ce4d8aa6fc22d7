import os
import stat
import subprocess
import sys

import pytest
import torch

from lightning_g2.errors import TransportError
from lightning_g2.transport.segment import Segment


def test_both_ends_see_one_memory() -> None:
    server = Segment.create(10_000)
    rank = Segment.open(server.pid, server.descriptor, 10_000)
    rank.gradients.fill_(7)
    server.weights.fill_(9)
    assert torch.equal(server.gradients, torch.full((10_000,), 7, dtype=torch.uint8))
    assert torch.equal(rank.weights, torch.full((10_000,), 9, dtype=torch.uint8))
    assert stat.S_IMODE(os.fstat(server.descriptor).st_mode) == 0o600
    os.close(server.descriptor)


def test_a_segment_of_no_bytes_can_be_made() -> None:
    server = Segment.create(0)
    assert server.gradients.numel() == server.weights.numel() == 0
    os.close(server.descriptor)


def test_a_segment_that_does_not_fit_is_refused_with_its_size() -> None:
    with pytest.raises(TransportError, match=r"a rank needs \d{13,} bytes, \d+ are available on this host"):
        Segment.create(2**48)


def test_a_segment_of_another_process_that_is_gone_is_refused() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(TransportError, match="must run on one host, as one user"):
        Segment.open(ended.pid, 3, 100)
