"""Glosses of WordNet and the 45 classes that its lexicographers sorted them into."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_g2.errors import ConfigurationError

DEFAULT_PATH = "/usr/share/wordnet"
LEXICOGRAPHER_CLASSES = 45
"""Numbers 0 to 44 of lexnames(5WN): adjectives, adverbs, nouns of 26 kinds, verbs of 15 and participles."""

PADDING = 0
UNKNOWN = 1
_RESERVED = 2
_FILES = ("data.adj", "data.adv", "data.noun", "data.verb")
_WORD = re.compile(r"[a-z0-9]+")

Gloss = tuple[str, int]
"""A gloss and its class."""


def read_glosses(folder: Path) -> list[Gloss]:
    """Glosses of WordNet's data files, format wndb(5WN).

    Args:
        folder: holds data.adj, data.adv, data.noun and data.verb, or some of them.

    Returns:
        Glosses and classes in the files' order.

    Raises:
        ConfigurationError: there is no such file, or a line of one is not in the format.
    """
    present = [folder / name for name in _FILES if (folder / name).is_file()]
    if not present:
        raise ConfigurationError(
            f"path={folder}: holds no {', '.join(_FILES)}; on Debian run 'apt-get install wordnet-base', which puts "
            f"them into {DEFAULT_PATH}, or name the folder 'dict' of any WordNet 3.0 or 3.1"
        )
    return [gloss for path in present for gloss in _read_file(path)]


def _read_file(path: Path) -> list[Gloss]:
    glosses = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("  ") or not line:  # the licence, at the top of each file
            continue
        record, bar, gloss = line.partition(" | ")
        fields = record.split()
        if not bar or len(fields) < 2 or not fields[1].isdigit() or int(fields[1]) >= LEXICOGRAPHER_CLASSES:
            raise ConfigurationError(
                f"path={path}, line {number}: must be 'offset class ... | gloss' with a class of 00 to 44; give a data "
                "file of WordNet 3.0 or 3.1"
            )
        glosses.append((gloss.strip(), int(fields[1])))
    return glosses


def split_words(gloss: str) -> list[str]:
    """Words of a gloss in lower case, without punctuation."""
    return _WORD.findall(gloss.lower())


def number_words(glosses: Sequence[Gloss], *, vocabulary: int) -> dict[str, int]:
    """Numbers of the most frequent words, from 2 on; 0 is padding and 1 any other word.

    Args:
        glosses: where to count.
        vocabulary: number of word numbers, 0 and 1 included.

    Returns:
        Number by word; equally frequent words in alphabetical order.
    """
    counts = Counter(word for gloss, _ in glosses for word in split_words(gloss))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ranked[: vocabulary - _RESERVED], start=_RESERVED)}


class Glosses(Dataset[tuple[Tensor, Tensor]]):
    """Glosses as word numbers.

    Args:
        glosses: texts and classes.
        numbers: number by word.
        max_words: a longer gloss is cut.
    """

    def __init__(self, glosses: Sequence[Gloss], numbers: dict[str, int], *, max_words: int) -> None:
        self._classes = torch.tensor([number for _, number in glosses])
        self._words = [
            # A gloss without a word is one unknown word, so that every sentence has something to read.
            torch.tensor([numbers.get(w, UNKNOWN) for w in split_words(text)[:max_words]] or [UNKNOWN])
            for text, _ in glosses
        ]

    def __len__(self) -> int:
        """Number of glosses."""
        return len(self._classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Word numbers, shape (words,), and the class, shape (), both int64."""
        return self._words[index], self._classes[index]


def collate(items: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Pad glosses to one length.

    Args:
        items: word numbers and classes.

    Returns:
        Word numbers, shape (batch, words), int64, and classes, shape (batch,), int64.
    """
    words, classes = zip(*items, strict=True)
    return pad_sequence(list(words), batch_first=True, padding_value=PADDING), torch.stack(classes)


class WordNetDataModule(pl.LightningDataModule):
    """Glosses to classify into 45 lexicographer classes. Nothing is downloaded.

    Args:
        path: folder with WordNet's data files; Debian's package ``wordnet-base`` provides the default.
        batch_size: glosses in a batch of one rank.
        vocabulary: number of word numbers, those for padding and for unknown words included.
        max_words: longer glosses are cut.
        val_fraction: share of glosses held out, every k-th, > 0 and ≤ 0.5.
        max_glosses: take about this many, evenly spaced; None takes all 117,659.
        num_workers: DataLoader worker processes for training.

    Raises:
        ConfigurationError: an option is out of range, or the data are missing.
    """

    def __init__(
        self,
        *,
        path: str = DEFAULT_PATH,
        batch_size: int = 64,
        vocabulary: int = 10_000,
        max_words: int = 32,
        val_fraction: float = 0.05,
        max_glosses: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        smallest = {"batch_size": 1, "vocabulary": _RESERVED + 1, "max_words": 1, "max_glosses": 2, "num_workers": 0}
        for name, least in smallest.items():
            value = locals()[name]
            if value is not None and value < least:
                raise ConfigurationError(f"{name}={value}: must be ≥ {least}; see WordNetDataModule for the default")
        if not 0.0 < val_fraction <= 0.5:
            raise ConfigurationError(f"val_fraction={val_fraction}: must be > 0 and ≤ 0.5; try 0.05")
        self.path, self.batch_size, self.vocabulary, self.max_words = Path(path), batch_size, vocabulary, max_words
        self.val_fraction, self.max_glosses, self.num_workers = val_fraction, max_glosses, num_workers
        self._train: Glosses | None = None
        self._val: Glosses | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read, split and number the glosses once in each process."""
        if self._train is not None:
            return
        glosses = read_glosses(self.path)
        step = 1 if self.max_glosses is None else max(1, len(glosses) // self.max_glosses)
        glosses = glosses[::step]
        period = min(round(1.0 / self.val_fraction), len(glosses))
        train = [gloss for index, gloss in enumerate(glosses) if index % period != period - 1]
        val = glosses[period - 1 :: period]
        numbers = number_words(train, vocabulary=self.vocabulary)  # words of held-out glosses are not to be known
        self._train = Glosses(train, numbers, max_words=self.max_words)
        self._val = Glosses(val, numbers, max_words=self.max_words)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Shuffled batches of word numbers, (batch, words), and classes, (batch,), both int64."""
        self.setup()
        assert self._train is not None
        return DataLoader(self._train, self.batch_size, shuffle=True, collate_fn=collate, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """The same of the held-out glosses, in order."""
        self.setup()
        assert self._val is not None
        return DataLoader(self._val, 4 * self.batch_size, collate_fn=collate)
