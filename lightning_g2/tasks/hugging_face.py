"""A causal language model of Hugging Face's transformers, built from a configuration, over bytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.gpt import VOCABULARY
from lightning_g2.tasks.recipe import RecipeModule


class HuggingFaceByteLM(RecipeModule):
    """Llama's architecture in any size with random weights; transformers is needed, its hub is not.

    Logs ``train_loss`` and ``val_loss``: cross entropy in nats a byte.

    Args:
        width: width of the hidden states; a multiple of ``heads``.
        layers: number of transformer blocks.
        heads: attention heads of a block.
        block_size: longest input, in bytes.
        **recipe: optimizer, learning rate and schedule, see :class:`~lightning_g2.tasks.recipe.RecipeModule`.

    Raises:
        ConfigurationError: a hyper-parameter is out of range, or transformers is not installed.
    """

    def __init__(
        self, *, width: int = 128, layers: int = 2, heads: int = 4, block_size: int = 64, **recipe: Any
    ) -> None:
        super().__init__(**recipe)
        self.save_hyperparameters()
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError as error:
            raise ConfigurationError(
                "model=HuggingFaceByteLM: transformers is not installed; run 'pip install transformers'"
            ) from error
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
            num_attention_heads=heads, max_position_embeddings=block_size, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Byte values, shape (batch, time), int64, to logits of the next byte, shape (batch, time, 256)."""
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits

    def loss(self, batch: Tensor) -> Tensor:
        """Cross entropy of the next byte over crops of shape (batch, block_size + 1), int64; nats a byte."""
        # The model shifts the labels by one itself.
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss
