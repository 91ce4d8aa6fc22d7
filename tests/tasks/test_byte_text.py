from __future__ import annotations

import itertools
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.byte_text import (
    SEGMENT_BYTES,
    ByteTextDataModule,
    EndlessCrops,
    FixedCrops,
    read_documents,
    source_files,
    split_documents,
    take_crops,
)


def write(folder: Path, names: str) -> None:
    for name in names.split():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def module(**options) -> ByteTextDataModule:
    return ByteTextDataModule(**{"block_size": 8, "batch_size": 4, "val_batches": 3, "max_bytes": 200_000, **options})


def first(data_module: ByteTextDataModule, *, rank: int = 0) -> torch.Tensor:
    data_module.trainer = SimpleNamespace(global_rank=rank)
    return next(iter(data_module.train_dataloader()))


def test_sources_are_sorted_and_without_tests(tmp_path):
    write(tmp_path, "b.py a/z.py a/test/no.py tests/no.py site-packages/no.py note.txt test.py")
    assert [path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path)] == ["a/z.py", "b.py", "test.py"]


def test_a_folder_named_test_above_the_data_does_not_hide_them(tmp_path):
    write(tmp_path / "test", "a.py")
    assert len(source_files(tmp_path / "test")) == 1


def test_the_standard_library_is_megabytes_and_reads_the_same_twice():
    folder = Path(sysconfig.get_paths()["stdlib"])
    documents = read_documents(folder, max_bytes=2_000_000)
    assert sum(map(len, documents)) == 2_000_000
    assert documents == read_documents(folder, max_bytes=2_000_000)


def test_a_file_is_cut_into_segments(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"x" * (2 * SEGMENT_BYTES + 1))
    assert [len(document) for document in read_documents(path)] == [SEGMENT_BYTES, SEGMENT_BYTES, 1]


def test_whole_files_are_held_out():
    documents = [bytes([index]) for index in range(40)]
    train, val = split_documents(documents, val_fraction=0.05)
    assert val == [bytes([19]), bytes([39])]
    assert sorted(train + val) == documents


def test_of_few_documents_one_is_held_out():
    assert split_documents([b"a", b"b", b"c"], val_fraction=0.05) == ([b"a", b"b"], [b"c"])


def test_crops_are_the_bytes_at_their_places():
    crops = take_crops(torch.arange(20, dtype=torch.uint8), torch.tensor([0, 17]), block_size=2)
    assert crops.tolist() == [[0, 1, 2], [17, 18, 19]]


def test_training_never_ends_and_reaches_the_last_byte():
    crops = EndlessCrops(torch.arange(5, dtype=torch.uint8), block_size=2, batch_size=8, seed=1, rank=0)
    seen = torch.cat(list(itertools.islice(crops, 50)))
    assert seen.shape == (400, 3)
    assert set(seen[:, 0].tolist()) == {0, 1, 2}


def test_ranks_and_seeds_draw_different_crops_and_a_repetition_the_same():
    batches = [first(module(seed=seed), rank=rank) for seed, rank in ((1, 0), (1, 1), (2, 0))]
    for one, other in itertools.combinations(batches, 2):
        assert not torch.equal(one, other)
    assert torch.equal(batches[0], first(module(seed=1), rank=0))


@pytest.mark.filterwarnings("ignore:This process.*fork")
def test_workers_draw_different_crops():
    data_module = module(num_workers=2)
    data_module.trainer = SimpleNamespace(global_rank=0)
    one, other = itertools.islice(data_module.train_dataloader(), 2)
    assert not torch.equal(one, other)


def test_validation_is_the_same_for_every_seed_and_rank():
    sets = []
    for seed, rank in ((1, 0), (2, 1)):
        data_module = module(seed=seed)
        data_module.trainer = SimpleNamespace(global_rank=rank)
        sets.append(torch.stack(list(data_module.val_dataloader())))
    assert sets[0].shape == (3, 4, 9)
    assert torch.equal(sets[0], sets[1])


def test_validation_spans_the_text_evenly():
    data = torch.arange(100, dtype=torch.uint8)
    starts = torch.cat(list(FixedCrops(data, block_size=9, batch_size=2, batches=2)))[:, 0]
    assert starts.tolist() == [0, 30, 60, 90]


def test_nothing_is_read_before_setup(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr("lightning_g2.tasks.byte_text.read_documents", refuse)
    module()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "/does/not/exist"}, r"path=/does/not/exist: does not exist; .*package"),
        ({"block_size": 0}, r"block_size=0: must be ≥ 1"),
        ({"batch_size": 0}, r"batch_size=0: must be ≥ 1"),
        ({"val_batches": 0}, r"val_batches=0: must be ≥ 1"),
        ({"val_fraction": 0.6}, r"val_fraction=0.6: must be"),
        ({"val_fraction": 0.0}, r"val_fraction=0.0: must be"),
        ({"num_workers": -1}, r"num_workers=-1: must be"),
        ({"max_bytes": 0}, r"max_bytes=0: must be"),
        ({"seed": -1}, r"seed=-1: must be"),
    ],
)
def test_a_bad_option_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        module(**options)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"holds no text; leave path empty"):
        module(path=str(tmp_path)).setup()


def test_too_little_text_is_refused(tmp_path):
    write(tmp_path, "a.py b.py")  # each holds its own name, 4 bytes
    with pytest.raises(ConfigurationError, match=r"bytes for .*, must be more than block_size=8"):
        module(path=str(tmp_path)).setup()
