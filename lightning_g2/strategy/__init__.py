"""The Lightning strategy, and the one it is compared with."""

from lightning_g2.strategy.ddp import MeteredDDPStrategy
from lightning_g2.strategy.options import G2AsyncOptions
from lightning_g2.strategy.strategy import G2AsyncStrategy

__all__ = ["G2AsyncOptions", "G2AsyncStrategy", "MeteredDDPStrategy"]
