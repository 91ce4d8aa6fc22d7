"""Asynchronous training for PyTorch Lightning, routed on the Lie algebra g2.

Importing the package registers the strategy, and does nothing else::

    import lightning_g2
    Trainer(strategy="g2async", devices=2)
"""

import os as _os

# A server process sets this before it imports anything: it needs neither Lightning nor the user's script.
if _os.environ.get("_LIGHTNING_G2_ROLE") != "server":
    from lightning.pytorch.strategies import StrategyRegistry as _StrategyRegistry

    from lightning_g2.callbacks import G2MonitorCallback, G2RoutingCallback, StragglerCallback
    from lightning_g2.strategy import G2AsyncStrategy

    for _name, _start_method in (("g2async", "popen"), ("g2async_spawn", "spawn"), ("g2async_fork", "fork")):
        if _name not in _StrategyRegistry:
            _StrategyRegistry.register(
                _name,
                G2AsyncStrategy,
                description=f"Asynchronous ranks, parameter server, gradients routed on g2; started by {_start_method}",
                start_method=_start_method,
            )

    __all__ = ["G2AsyncStrategy", "G2MonitorCallback", "G2RoutingCallback", "StragglerCallback"]
