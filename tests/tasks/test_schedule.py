from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.schedule import WARMUP_FLOOR, ElapsedFractionLR, share_done, warmup_cosine


def optimizer(lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def test_it_rises_to_one_and_falls_to_zero():
    values = [warmup_cosine(step / 100, warmup=0.1) for step in range(101)]
    assert values[0] == WARMUP_FLOOR
    assert values[10] == 1.0
    assert values[55] == pytest.approx(0.5)
    assert values[100] == pytest.approx(0.0)
    assert values[:11] == sorted(values[:11])
    assert values[10:] == sorted(values[10:], reverse=True)


@pytest.mark.parametrize(("fraction", "expected"), [(-1.0, 1.0), (2.0, 0.0)])
def test_a_fraction_outside_its_range_is_clamped(fraction, expected):
    assert warmup_cosine(fraction, warmup=0.0) == pytest.approx(expected)


def test_the_rate_follows_the_clock_however_often_it_is_stepped():
    clock = {"fraction": 0.0}
    rates = []
    for steps in (1, 7):
        opt = optimizer()
        scheduler = ElapsedFractionLR(opt, lambda _: clock["fraction"], warmup=0.0)
        clock["fraction"] = 0.25
        for _ in range(steps):
            opt.step()
            scheduler.step()
        rates.append(opt.param_groups[0]["lr"])
        clock["fraction"] = 0.0
    assert rates[0] == rates[1] == 0.5 * warmup_cosine(0.25, warmup=0.0)


def test_the_clock_is_given_the_number_of_steps():
    opt = optimizer()
    scheduler = ElapsedFractionLR(opt, lambda steps: steps / 4, warmup=0.0)
    for _ in range(4):
        opt.step()
        scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.0)


def test_its_state_holds_no_clock():
    state = ElapsedFractionLR(optimizer(), lambda _: 0.0).state_dict()
    assert "elapsed_fraction" not in state
    assert state["base_lrs"] == [0.5]


@pytest.mark.parametrize("warmup", [-0.1, 1.0])
def test_a_bad_warmup_is_refused(warmup):
    with pytest.raises(ConfigurationError, match=f"warmup={warmup}: must be"):
        ElapsedFractionLR(optimizer(), lambda _: 0.0, warmup=warmup)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_epochs": 2}, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]),
        (
            {"max_epochs": 2, "accumulate_grad_batches": 2},
            [0, 0, 1 / 6, 1 / 6, 2 / 6, 3 / 6, 3 / 6, 4 / 6, 4 / 6, 5 / 6],
        ),
        ({"max_steps": 4}, [0.0, 0.25, 0.5, 0.75]),
    ],
)
def test_the_share_done_is_that_of_what_ends_training(tmp_path, limits, expected):
    class Line(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.shares = torch.nn.Linear(1, 1), []

        def training_step(self, batch, batch_idx):
            self.shares.append(share_done(self.trainer))
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    model = Line()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, **limits,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(torch.ones(10, 1)), batch_size=2))
    assert model.shares == pytest.approx(expected)
