"""Asynchronous training for PyTorch Lightning, routed on the Lie algebra g2.

Importing the package registers the strategies, and does nothing else::

    import lightning_g2
    Trainer(strategy="g2async", devices=2)

It works with ``lightning.pytorch``, and with ``pytorch_lightning`` if that is imported first and alone.
"""

import os as _os

# A server process sets this before it imports anything: it needs neither Lightning nor the user's script.
if _os.environ.get("_LIGHTNING_G2_ROLE") != "server":
    from lightning_g2.namespace import users_namespace as _users_namespace

    with _users_namespace():
        from lightning_g2.callbacks import G2MonitorCallback, G2RoutingCallback, StragglerCallback
        from lightning_g2.strategy import G2AsyncStrategy
        from lightning_g2.strategy.registration import register as _register

    _register()

    __all__ = ["G2AsyncStrategy", "G2MonitorCallback", "G2RoutingCallback", "StragglerCallback"]
