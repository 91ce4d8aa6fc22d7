"""Large values travel in pieces and arrive exactly."""

import pytest
import torch

from lightning_g2.errors import ProtocolError
from lightning_g2.server import Parcel, pack, unpack
from lightning_g2.transport import chunks
from lightning_g2.transport.chunks import Depot, Hollow, read_piece, write_piece


@pytest.mark.parametrize("limit", [1, 7, 64, 10_000])
def test_pieces_of_any_size_make_the_whole(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", limit)
    value = {
        "half": torch.randn(5).bfloat16(), "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5),
        "complex": torch.randn(3, dtype=torch.complex64), "strided": torch.randn(4, 6).t(), "text": "kept",
    }  # fmt: skip
    depot = Depot()
    parcel = pack(value, copy=False)
    sent = Hollow.of(parcel, (0, 1))
    depot.expect(sent)
    for start, stop in chunks.pieces(parcel.size_bytes):
        assert stop - start <= limit
        depot.take(sent.key, start, read_piece(parcel.tensors, start, stop))
    arrived = depot.collect(sent)
    back = depot.lay_out(pack(arrived), rank=0)
    fetched = back.allocate()
    for start, stop in chunks.pieces(fetched.size_bytes):
        write_piece(fetched.tensors, start, depot.fetch(back.key, start, stop))
    for key, tensor in value.items():
        other = unpack(fetched)[key]
        assert torch.equal(other, tensor) if isinstance(tensor, torch.Tensor) else other == tensor
    with pytest.raises(ProtocolError, match="not here"):
        depot.fetch(back.key, 0, 1)


def test_pieces_beyond_two_to_the_31_lie_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    big = torch.empty(2**31 + 1, dtype=torch.uint8, device="meta")
    assert chunks.pieces(big.numel()) == [(0, 2**30), (2**30, 2**31), (2**31, 2**31 + 1)]
    after = torch.zeros(4, dtype=torch.uint8)
    write_piece((big, after), 2**31 + 2, torch.tensor([1, 2], dtype=torch.uint8))
    assert after.tolist() == [0, 1, 2, 0]
    assert read_piece((big, after), 2**31 + 2, 2**31 + 4).tolist() == [1, 2]


def test_a_parcel_keeps_what_is_shared_and_shares_nothing_with_the_object() -> None:
    shared = torch.ones(3)
    parcel = pack([shared, shared])
    assert isinstance(parcel, Parcel)
    assert parcel.size_bytes == 12
    one, two = unpack(parcel)
    assert one is two
    shared.zero_()
    assert torch.equal(one, torch.ones(3))
