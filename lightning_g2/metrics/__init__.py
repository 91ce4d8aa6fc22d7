"""Metrics of torchmetrics over the pushes that a server has taken in.

Each is updated with :class:`~lightning_g2.values.PushRecord` values, one or many at a time, so that they work together
in a ``MetricCollection``. Their states are sums, minima and maxima: merging the states of replicas that saw different
pushes gives what one replica that saw them all would give.
"""

from lightning_g2.metrics.friction import Friction
from lightning_g2.metrics.goodput import Goodput
from lightning_g2.metrics.openness import Openness
from lightning_g2.metrics.staleness import Staleness

__all__ = ["Friction", "Goodput", "Openness", "Staleness"]
