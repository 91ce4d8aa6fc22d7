"""A byte-level GPT, about one million parameters by default."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.recipe import RecipeModule

VOCABULARY = 256


class Block(nn.Module):
    """Pre-norm transformer block: causal attention with one fused query-key-value matrix, then a 4x wide MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states, shape (batch, time, width), to the same shape."""
        batch, time, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, time, width))
        hidden: Tensor = x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))
        return hidden


class ByteGPT(RecipeModule):
    """GPT over bytes with tied embeddings and without dropout, trained by next-byte prediction.

    Logs ``train_loss`` and ``val_loss``: cross entropy in nats a byte.

    Args:
        width: width of the hidden states; a multiple of ``heads``.
        layers: number of transformer blocks.
        heads: attention heads of a block.
        block_size: longest input, in bytes.
        **recipe: optimizer, learning rate and schedule, see :class:`~lightning_g2.tasks.recipe.RecipeModule`.

    Raises:
        ConfigurationError: a hyper-parameter is out of range; on construction, or for ``schedule="cosine"``
            without a limit to scale to, before the first step.
    """

    def __init__(
        self,
        *,
        width: int = 128,
        layers: int = 5,
        heads: int = 4,
        block_size: int = 64,
        **recipe: Any,
    ) -> None:
        super().__init__(**recipe)
        self.save_hyperparameters()
        _check_shape(width=width, layers=layers, heads=heads, block_size=block_size)
        self.block_size = block_size
        self.byte_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("positions", torch.arange(block_size), persistent=False)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            # Residual branches are scaled down so that the variance at the output does not grow with depth.
            residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte.

        Args:
            tokens: byte values, shape (batch, time), int64, time ≤ ``block_size``.

        Returns:
            Logits, shape (batch, time, 256).
        """
        assert isinstance(self.positions, Tensor)
        x = self.byte_embedding(tokens) + self.position_embedding(self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.byte_embedding.weight)

    def loss(self, batch: Tensor) -> Tensor:
        """Cross entropy of the next byte over crops of shape (batch, block_size + 1), int64; nats a byte."""
        logits = self(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def _check_shape(*, width: int, layers: int, heads: int, block_size: int) -> None:
    for name, value in {"width": width, "layers": layers, "heads": heads, "block_size": block_size}.items():
        if value < 1:
            raise ConfigurationError(f"{name}={value}: must be ≥ 1; see ByteGPT for the default")
    if width % heads:
        raise ConfigurationError(f"width={width}: must be a multiple of heads={heads}; try {heads * (width // heads)}")
