"""The names under which a Trainer finds the strategy."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning.pytorch.strategies import StrategyRegistry

from lightning_g2.errors import ConfigurationError
from lightning_g2.namespace import left_out
from lightning_g2.strategy.strategy import G2AsyncStrategy

NAMES = {"g2async": "popen", "g2async_spawn": "spawn", "g2async_fork": "fork"}
"""Name and start method."""


def register() -> None:
    """Register the strategies; where a Trainer of the wrong namespace would not know them, a name that says why."""
    other = left_out()
    for name, start_method in NAMES.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(
                name,
                G2AsyncStrategy,
                description=f"Asynchronous ranks, parameter server, gradients routed on g2; started by {start_method}",
                start_method=start_method,
            )
        if other is not None and name not in other.strategies.StrategyRegistry:
            other.strategies.StrategyRegistry.register(name, _refuse)


def _refuse(**_: Any) -> NoReturn:
    raise ConfigurationError(
        "a Trainer of pytorch_lightning: this process has imported lightning.pytorch as well, which lightning_g2 works "
        "with, and the classes of one are strange to the other; import all from lightning.pytorch, or import "
        "pytorch_lightning alone, before lightning_g2"
    )
