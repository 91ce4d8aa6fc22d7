"""An LSTM that reads a sentence and names its class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.classifier import Classifier
from lightning_g2.tasks.wordnet import LEXICOGRAPHER_CLASSES, PADDING


class GlossLSTM(Classifier):
    """Word embeddings, a bidirectional LSTM, the maximum over words, a linear layer.

    Logs ``train_loss`` and ``val_loss`` in nats, and ``val_acc``, the share of right answers, 0 to 1.

    Args:
        vocabulary: number of word numbers, padding and unknown words included.
        classes: number of classes.
        embedding: length of a word's vector.
        hidden: units of the LSTM in each direction.
        dropout: share of embedding and pooled entries that are dropped in training, 0 ≤ dropout < 1.
        **recipe: optimizer, learning rate and schedule, see :class:`~lightning_g2.tasks.recipe.RecipeModule`.

    Raises:
        ConfigurationError: a hyper-parameter is out of range.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 10_000,
        classes: int = LEXICOGRAPHER_CLASSES,
        embedding: int = 64,
        hidden: int = 64,
        dropout: float = 0.2,
        **recipe: Any,
    ) -> None:
        super().__init__(**recipe)
        self.save_hyperparameters()
        sizes = {"vocabulary": vocabulary, "classes": classes, "embedding": embedding, "hidden": hidden}
        for name, value in sizes.items():
            if value < 1:
                raise ConfigurationError(f"{name}={value}: must be ≥ 1; see GlossLSTM for the default")
        if not 0.0 <= dropout < 1.0:
            raise ConfigurationError(f"dropout={dropout}: must be ≥ 0 and < 1; 0 turns it off")
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=PADDING)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, words: Tensor) -> Tensor:
        """Logits of sentences.

        Args:
            words: word numbers, shape (batch, words), int64, padded at the end; each sentence has a word at least.

        Returns:
            Logits, shape (batch, classes).
        """
        lengths = (words != PADDING).sum(dim=1)
        # Packed, or else the backward direction would begin with the padding.
        packed = pack_padded_sequence(
            self.dropout(self.embedding(words)), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        least = torch.finfo(self.head.weight.dtype).min
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, padding_value=least)
        pooled = states.amax(dim=1)
        logits: Tensor = self.head(self.dropout(pooled))
        return logits
