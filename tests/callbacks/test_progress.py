from __future__ import annotations

from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import Timer

from lightning_g2.callbacks.progress import LimitProgressBar, limit_fraction


class FrozenTimer(Timer):
    def time_elapsed(self, stage: str = "train") -> float:
        return 30.0


def trainer(*, max_steps: int = -1, duration: str | None = None, **logged: float) -> SimpleNamespace:
    callbacks = [] if duration is None else [FrozenTimer(duration)]
    return SimpleNamespace(
        max_steps=max_steps, callbacks=callbacks, global_step=7, strategy=None, progress_bar_metrics=logged, loggers=[]
    )


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, None),
        ({"max_steps": 20}, 0.25),
        ({"max_steps": 4}, 1.0),
        ({"duration": "00:00:01:00"}, 0.5),
        ({"max_steps": 20, "duration": "00:00:01:00"}, 0.5),
        ({"max_steps": 6, "duration": "00:00:01:00"}, 5 / 6),
    ],
)
def test_the_share_of_the_nearer_limit(options, share):
    assert limit_fraction(trainer(**options), 5) == share


def test_the_bar_shows_step_loss_openness_and_staleness_in_order():
    job = trainer(tau=1.5, val_loss=2.0, train_loss=2.5, openness=0.9, other=1.0)
    shown = LimitProgressBar().get_metrics(job, None)
    assert list(shown.items()) == [("step", "7"), ("loss", 2.5), ("openness", 0.9), ("τ", 1.5), ("val_loss", 2.0)]
