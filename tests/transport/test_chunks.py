"""Large values travel in pieces and arrive exactly."""

import pytest
import torch

from lightning_g2.errors import ProtocolError
from lightning_g2.server import Parcel, pack, unpack
from lightning_g2.transport import chunks
from lightning_g2.transport.chunks import Depot, Hollow, Room, read_piece, write_piece


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
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**30)
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


def test_a_piece_within_one_tensor_is_not_copied_and_has_a_storage_of_its_own_size() -> None:
    tensors = (torch.arange(8, dtype=torch.bfloat16), torch.arange(100, dtype=torch.int16))
    inside = read_piece(tensors, 20, 60)
    assert inside.data_ptr() == tensors[1].data_ptr() + 4
    assert inside.untyped_storage().nbytes() == 40
    assert torch.equal(inside.view(torch.int16), tensors[1][2:22])
    across = read_piece(tensors, 14, 18)
    assert torch.equal(across.view(torch.int16)[1:], tensors[1][:1])
    assert across.untyped_storage().nbytes() == 4


def _announced(number: int, *, rank: int = 0, size: int = 4) -> tuple[Hollow, Parcel]:
    parcel = pack(torch.full((size,), float(number)))
    return Hollow.of(parcel, (rank, number)), parcel


def test_room_is_given_to_the_next_only_after_use() -> None:
    """Two parcels of one rank under way at once, then a third one in the room of the second."""
    depot, places = Depot(), []

    def arrive(number: int, **which: int) -> Hollow:
        hollow, parcel = _announced(number, **which)
        depot.expect(hollow)
        depot.take(hollow.key, 0, read_piece(parcel.tensors, 0, parcel.size_bytes))
        return hollow

    def use(whole: torch.Tensor) -> None:
        places.append((whole.data_ptr(), whole[0].item()))

    for hollow in [arrive(1), arrive(2)]:
        depot.borrow(hollow, use)
    depot.borrow(arrive(3), use)
    depot.borrow(arrive(4, rank=1), use)
    depot.borrow(arrive(5, size=8), use)
    (one, two, three, four, five) = places
    assert [value for _, value in places] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert one[0] != two[0] == three[0]
    assert three[0] not in (four[0], five[0])
    depot.borrow("no parcel", lambda value: places.append(value))
    assert places[-1] == "no parcel"


def test_a_room_holds_the_last_value_while_the_next_comes() -> None:
    room = Room()
    taken = [room.take(_announced(number)[0]).tensors[0] for number in range(4)]
    assert taken[0].data_ptr() != taken[1].data_ptr()
    assert [t.data_ptr() for t in taken[2:]] == [t.data_ptr() for t in taken[:2]]
    larger = room.take(_announced(5, size=9)[0]).tensors[0]
    assert larger.numel() == 9
