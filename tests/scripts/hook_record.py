"""A module and a callback that write down every hook they are called through."""

from typing import Any

import lightning.pytorch as pl
import torch


def _text(value: Any) -> str:
    if isinstance(value, (str, int, float, bool)) or value is None:
        return repr(value)
    return type(value).__name__ if isinstance(value, (torch.optim.Optimizer, pl.Trainer)) else "…"


def _note(record: list[str], owner: str, name: str, args: tuple, kwargs: dict) -> None:
    words = [_text(a) for a in args] + [f"{k}={_text(v)}" for k, v in sorted(kwargs.items())]
    record.append(f"{owner}.{name}({', '.join(words)})")


class RecordingCallback(pl.Callback):
    """Writes down each hook with its arguments."""

    def __init__(self, record: list[str]) -> None:
        self.record = record


def _callback_hook(name: str) -> Any:
    def hook(self: RecordingCallback, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any):
        _note(self.record, "callback", name, args, kwargs)

    return hook


for _name in dir(pl.Callback):
    if _name.startswith("on_") or _name in ("setup", "teardown"):
        setattr(RecordingCallback, _name, _callback_hook(_name))


class _Plain(pl.LightningModule):
    def __init__(self, record: list[str]) -> None:
        super().__init__()
        self.record = record
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("v", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        each_step = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        each_epoch = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [
            {"scheduler": each_step, "interval": "step"},
            {"scheduler": each_epoch, "interval": "epoch", "monitor": "v"},
        ]


class RecordingNet(_Plain):
    """Writes down each hook with its arguments, and does what it would have done."""


_HOOKS = [n for n in dir(pl.LightningModule) if n.startswith("on_")] + [
    "setup", "teardown", "configure_optimizers", "configure_model", "configure_callbacks", "prepare_data",
    "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward",
    "transfer_batch_to_device", "training_step", "validation_step",
]  # fmt: skip


def _module_hook(name: str) -> Any:
    def hook(self: RecordingNet, *args: Any, **kwargs: Any) -> Any:
        _note(self.record, "module", name, args, kwargs)
        return getattr(_Plain, name)(self, *args, **kwargs)

    return hook


for _name in _HOOKS:
    if callable(getattr(pl.LightningModule, _name, None)):
        setattr(RecordingNet, _name, _module_hook(_name))
