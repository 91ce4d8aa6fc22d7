"""A byte-level GPT, about one million parameters by default."""

from __future__ import annotations

import math
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_g2.callbacks.progress import limit_fraction
from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.schedule import ElapsedFractionLR

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


class ByteGPT(pl.LightningModule):
    """GPT over bytes with tied embeddings and without dropout, trained by next-byte prediction.

    Logs ``train_loss`` and ``val_loss``: cross entropy in nats a byte.

    Args:
        width: width of the hidden states; a multiple of ``heads``.
        layers: number of transformer blocks.
        heads: attention heads of a block.
        block_size: longest input, in bytes.
        optimizer: ``"adamw"`` or ``"sgd"``.
        lr: peak learning rate.
        betas: decay rates of AdamW's two moments.
        weight_decay: decay of matrices; vectors (norms) are never decayed.
        momentum: momentum of SGD.
        schedule: ``"cosine"`` warms up, then falls to zero over the elapsed fraction of the Trainer's ``max_time``
            and ``max_steps`` (whichever is further); ``"constant"`` keeps ``lr``.
        warmup: share of training spent warming up, 0 ≤ warmup < 1.

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
        optimizer: Literal["adamw", "sgd"] = "adamw",
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        momentum: float = 0.9,
        schedule: Literal["cosine", "constant"] = "cosine",
        warmup: float = 0.05,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        _check_shape(width=width, layers=layers, heads=heads, block_size=block_size)
        _check_optimizer(optimizer, lr=lr, betas=betas, weight_decay=weight_decay, momentum=momentum)
        _check_schedule(schedule, warmup=warmup)
        self.optimizer_name, self.lr, self.betas = optimizer, lr, (betas[0], betas[1])
        self.weight_decay, self.momentum = weight_decay, momentum
        self.schedule, self.warmup, self.block_size = schedule, warmup, block_size
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

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of one batch of crops, shape (batch, block_size + 1), int64."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, batch_size=batch.shape[0])
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss of one batch of held-out crops, shape (batch, block_size + 1), int64."""
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True, batch_size=batch.shape[0])

    def configure_optimizers(self) -> Any:
        """The optimizer, and for ``schedule="cosine"`` a scheduler stepped after every batch."""
        decayed = [p for p in self.parameters() if p.requires_grad and p.dim() >= 2]
        plain = [p for p in self.parameters() if p.requires_grad and p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        optimizer: torch.optim.Optimizer
        if self.optimizer_name == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, fused=True)
        else:
            optimizer = torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)
        if self.schedule == "constant":
            return optimizer
        scheduler = ElapsedFractionLR(optimizer, self._elapsed_fraction, warmup=self.warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _elapsed_fraction(self, scheduler_steps: int) -> float:
        # Not the scheduler's count: under the server's clock that is the steps of all ranks.
        fraction = limit_fraction(self.trainer, self.trainer.global_step)
        if fraction is None:
            raise ConfigurationError(
                "schedule='cosine': needs an end to fall towards; set Trainer(max_time=...) or Trainer(max_steps=...), "
                "or schedule='constant'"
            )
        return fraction


def _check_shape(*, width: int, layers: int, heads: int, block_size: int) -> None:
    for name, value in {"width": width, "layers": layers, "heads": heads, "block_size": block_size}.items():
        if value < 1:
            raise ConfigurationError(f"{name}={value}: must be ≥ 1; see ByteGPT for the default")
    if width % heads:
        raise ConfigurationError(f"width={width}: must be a multiple of heads={heads}; try {heads * (width // heads)}")


def _check_optimizer(name: str, *, lr: float, betas: tuple[float, float], weight_decay: float, momentum: float) -> None:
    if name not in ("adamw", "sgd"):
        raise ConfigurationError(f"optimizer={name!r}: must be 'adamw' or 'sgd'")
    if not 0.0 < lr < math.inf:
        raise ConfigurationError(f"lr={lr}: must be > 0 and finite; try 2e-3")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigurationError(f"betas={betas}: must be two numbers ≥ 0 and < 1; try (0.9, 0.95)")
    if not 0.0 <= weight_decay < math.inf:
        raise ConfigurationError(f"weight_decay={weight_decay}: must be ≥ 0 and finite; 0 turns it off")
    if not 0.0 <= momentum < 1.0:
        raise ConfigurationError(f"momentum={momentum}: must be ≥ 0 and < 1; 0 turns it off")


def _check_schedule(schedule: str, *, warmup: float) -> None:
    if schedule not in ("cosine", "constant"):
        raise ConfigurationError(f"schedule={schedule!r}: must be 'cosine' or 'constant'")
    if not 0.0 <= warmup < 1.0:
        raise ConfigurationError(f"warmup={warmup}: must be ≥ 0 and < 1; 0 starts at the full learning rate")
