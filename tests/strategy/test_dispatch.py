from __future__ import annotations

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from lightning_g2.strategy.dispatch import BatchOrder, batches_of, dispatched, reason_against


class Numbers(Dataset):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Endless:
    def __iter__(self):
        while True:
            yield 0


class OwnLoader(DataLoader):
    def __init__(self, words: str) -> None:
        super().__init__(Numbers(), batch_size=len(words), collate_fn=list)
        self.words = words


def drawn(loader: DataLoader, epoch: int = 0) -> list:
    batches = batches_of(loader)
    batches.draw(3, epoch)
    batches.give(range(len(batches)))
    return list(loader)


def test_an_order_gives_back_what_was_drawn():
    for batches in ([[3, 1], [2], [], [9, 9]], [4, 2, 7], [[(1, 2)], [(3, 4)]], [["a"], ["b", "c"]]):
        order = BatchOrder(batches)
        assert [order[i] for i in range(len(order))] == batches


def test_all_batches_come_in_the_order_of_their_numbers():
    loader = dispatched(DataLoader(Numbers(), batch_size=4), lambda value: value)
    assert torch.cat(drawn(loader)).tolist() == list(range(23))
    batches = batches_of(loader)
    batches.draw(3, 0)
    batches.give([2, 0])
    assert [batch.tolist() for batch in loader] == [[8, 9, 10, 11], [0, 1, 2, 3]]


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else():
    loader = dispatched(DataLoader(Numbers(), batch_size=4, shuffle=True), lambda value: value)
    torch.manual_seed(1)
    first = torch.cat(drawn(loader)).tolist()
    torch.manual_seed(2)
    assert torch.cat(drawn(loader)).tolist() == first
    before = torch.random.get_rng_state()
    batches_of(loader).draw(3, 0)
    assert torch.equal(before, torch.random.get_rng_state()), "drawing leaves the user's random state alone"
    assert torch.cat(drawn(loader, epoch=1)).tolist() != first


def test_a_loader_of_the_users_own_class_keeps_everything_else():
    given = OwnLoader("four")
    loader = dispatched(given, lambda value: value)
    assert (type(loader), loader.words, loader.collate_fn) == (OwnLoader, "four", list)
    assert drawn(loader)[1] == [4, 5, 6, 7]
    assert batches_of(given) is None
    assert len(list(given)) == 6, "the given loader is as it was"


def test_without_collation_indices_are_handed_out():
    loader = dispatched(DataLoader(Numbers(), batch_size=None), lambda value: value)
    assert drawn(loader) == list(range(23))


def test_a_batch_sampler_is_handed_out_batch_by_batch():
    sampler = BatchSampler(RandomSampler(range(23)), 5, drop_last=True)
    loader = dispatched(DataLoader(Numbers(), batch_sampler=sampler), lambda value: value)
    assert [len(batch) for batch in drawn(loader)] == [5] * 4


def test_workers_hold_one_batch_each_and_go_on_when_there_are_more():
    loader = dispatched(DataLoader(Numbers(), num_workers=2, prefetch_factor=8), lambda value: value)
    batches = batches_of(loader)
    batches.draw(0, 0)
    batches.give([0, 1])
    seen, iterator = [], iter(loader)
    assert not batches._given, "both workers have one"
    for number in range(2, 10):
        batches.give([number])
        seen.append(int(next(iterator)))
        assert len(batches._given) == 0
    seen += [int(x) for x in iterator]
    assert seen == list(range(10))


def test_samples_are_counted_where_batches_are_equal():
    loader = dispatched(DataLoader(Numbers(), batch_size=4), lambda value: value)
    assert [batches_of(loader).samples(n) for n in (0, 2, 6)] == [0, 8, 23]


def test_what_cannot_be_handed_out_is_told_apart():
    assert reason_against(DataLoader(Numbers())) is None
    assert "iterable" in reason_against(DataLoader(Stream()))
    assert "splits the data" in reason_against(DataLoader(Numbers(), sampler=DistributedSampler(Numbers(), 2, 0)))
    assert "no length" in reason_against(DataLoader(Numbers(), batch_sampler=Endless()))
    assert "not a torch DataLoader" in reason_against([1, 2])
