from __future__ import annotations

import pytest
import torch

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.wordnet import (
    LEXICOGRAPHER_CLASSES,
    PADDING,
    UNKNOWN,
    Glosses,
    WordNetDataModule,
    collate,
    number_words,
    read_glosses,
    split_words,
)


def test_a_gloss_has_the_class_of_its_second_field(tmp_path):
    (tmp_path / "data.noun").write_text(
        "  1 The licence | is not a gloss  \n"
        "00001740 03 n 01 entity 0 003 ~ 00001930 n 0000 | that which is perceived (living or nonliving)  \n"
        '00002137 06 n 02 cup 0 mug 1 000 | a small vessel; "a | in a cup"  \n'
    )
    assert read_glosses(tmp_path) == [
        ("that which is perceived (living or nonliving)", 3), ('a small vessel; "a | in a cup"', 6)
    ]  # fmt: skip


def test_all_files_are_read_in_one_order(wordnet_folder):
    glosses = read_glosses(wordnet_folder)
    assert len(glosses) == 450
    assert [glosses[index][1] for index in (0, 29, 30, 40, 449)] == [0, 44, 2, 3, 43]
    assert {number for _, number in glosses} == set(range(LEXICOGRAPHER_CLASSES))


@pytest.mark.parametrize(
    "line", ["00001740 03 n 01 entity", "00001740 xx n | gloss", "00001740 45 n | gloss", "| gloss"]
)
def test_a_line_in_another_format_is_refused(tmp_path, line):
    (tmp_path / "data.verb").write_text(f"  1 licence\n{line}\n")
    with pytest.raises(ConfigurationError, match=r"data.verb, line 2: must be 'offset class ... \| gloss'"):
        read_glosses(tmp_path)


def test_missing_data_name_the_package(tmp_path):
    with pytest.raises(ConfigurationError, match=r"holds no data.adj, .*'apt-get install wordnet-base'"):
        WordNetDataModule(path=str(tmp_path)).setup()


def test_words_are_lower_case_and_bare():
    assert split_words('A small vessel; "it\'s 2-handled"') == ["a", "small", "vessel", "it", "s", "2", "handled"]


def test_frequent_words_have_the_low_numbers():
    numbers = number_words([("b a b c", 0), ("b c a", 1), ("d", 2)], vocabulary=5)
    assert numbers == {"b": 2, "a": 3, "c": 4}


def test_a_batch_is_padded_and_unknown_words_are_marked():
    glosses = Glosses([("red fox", 4), ("", 1), ("fox or red fox", 2)], {"red": 2, "fox": 3}, max_words=3)
    words, classes = collate([glosses[index] for index in range(len(glosses))])
    assert words.tolist() == [[2, 3, PADDING], [UNKNOWN, PADDING, PADDING], [3, UNKNOWN, 2]]
    assert classes.tolist() == [4, 1, 2]


def test_held_out_glosses_are_every_kth_and_their_words_unknown(wordnet_folder):
    data = WordNetDataModule(path=str(wordnet_folder), val_fraction=0.1, batch_size=32)
    train = torch.cat([classes for _, classes in data.train_dataloader()])
    val = torch.cat([classes for _, classes in data.val_dataloader()])
    assert sorted(val.tolist()) == list(range(45)), "each tenth of ten glosses a class"
    assert train.bincount().tolist() == [9] * 45
    words, _ = next(iter(data.val_dataloader()))
    assert (words == UNKNOWN).sum(dim=1).tolist() == [1] * 45, "only the last offset, 9, is in no training gloss"
    assert words.max() < data.vocabulary


def test_a_slice_is_evenly_spaced(wordnet_folder):
    data = WordNetDataModule(path=str(wordnet_folder), max_glosses=90, val_fraction=0.5)
    assert len(data.train_dataloader().dataset) + len(data.val_dataloader().dataset) == 90
    assert torch.cat([classes for _, classes in data.val_dataloader()]).unique().numel() == 45


def test_nothing_is_read_before_setup():
    WordNetDataModule(path="/does/not/exist")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"batch_size=0: must be ≥ 1"),
        ({"vocabulary": 2}, r"vocabulary=2: must be ≥ 3"),
        ({"max_words": 0}, r"max_words=0: must be ≥ 1"),
        ({"max_glosses": 1}, r"max_glosses=1: must be ≥ 2"),
        ({"num_workers": -1}, r"num_workers=-1: must be ≥ 0"),
        ({"val_fraction": 0.0}, r"val_fraction=0.0: must be > 0 and ≤ 0.5"),
    ],
)
def test_a_bad_option_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        WordNetDataModule(**options)
