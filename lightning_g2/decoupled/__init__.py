"""PD-ASGD: forward and backward passes in threads of their own, layers updated as soon as their gradient exists."""

from lightning_g2.decoupled.ambient import free_threaded
from lightning_g2.decoupled.local import LocalApply, clip_
from lightning_g2.decoupled.options import DecoupledOptions
from lightning_g2.decoupled.report import RunReport
from lightning_g2.decoupled.runner import DecoupledRunner
from lightning_g2.decoupled.scheduler import Scheduler, ThreadScheduler, TurnScheduler
from lightning_g2.decoupled.update import Apply, GradientUpdate

__all__ = [
    "Apply",
    "DecoupledOptions",
    "DecoupledRunner",
    "GradientUpdate",
    "LocalApply",
    "RunReport",
    "Scheduler",
    "ThreadScheduler",
    "TurnScheduler",
    "clip_",
    "free_threaded",
]
