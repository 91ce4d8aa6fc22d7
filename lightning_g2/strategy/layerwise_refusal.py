"""What layer-wise pushes cannot go with, refused by name before training: all that needs whole gradients."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lightning_g2.callbacks.straggler import StragglerCallback
from lightning_g2.routing import Gate
from lightning_g2.server import inner_optimizers

_MODULE_HOOKS = (
    "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step",
    "optimizer_zero_grad",
)  # fmt: skip
_CALLBACK_HOOKS = ("on_after_backward", "on_before_optimizer_step")
_REMEDY = "With push='layerwise' gradients are sent while backward still runs; use push='whole'"


def refuse_whole_gradients(trainer: Trainer, module: LightningModule) -> None:
    """Refuse settings and hooks that work on gradients between backward and the optimizer's step.

    Raises:
        MisconfigurationException: there is one.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not module.automatic_optimization:
        _refuse("manual optimization", "only the module knows which backward belongs to which step")
    if trainer.accumulate_grad_batches > 1 or any(isinstance(c, GradientAccumulationScheduler) for c in callbacks):
        several = trainer.accumulate_grad_batches
        what = f"accumulate_grad_batches={several}" if several > 1 else "GradientAccumulationScheduler"
        _refuse(what, "a gradient is whole only after several backwards; larger batches need no accumulation")
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE:
        _refuse(
            f"gradient_clip_val={trainer.gradient_clip_val} by norm",
            "the norm is known only when all gradients are; gradient_clip_algorithm='value' clips each entry",
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        _refuse(
            f"precision={trainer.precision!r}",
            "its GradScaler looks at all gradients before it says whether there is a step; use 'bf16-mixed'",
        )
    for name in _MODULE_HOOKS:
        if overrides(module, name, LightningModule):
            _refuse(f"{type(module).__name__}.{name}", "it may change gradients that the server has applied already")
    for callback in callbacks:
        for name in _CALLBACK_HOOKS:
            if overrides(callback, name, Callback) and not isinstance(callback, StragglerCallback):
                _refuse(
                    f"{type(callback).__name__}.{name}", "it may change gradients that the server has applied already"
                )


def refuse_stepping_in_parts(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers whose step on some parameters and then on the others may differ from one step on all.

    Raises:
        MisconfigurationException: there are several, one that is not torch's own, or one with step pre-hooks.
    """
    if len(optimizers) != 1:
        _refuse(f"{len(optimizers)} optimizers", "a backward may bring gradients for any of them")
    (optimizer,) = optimizers
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim") or inner_optimizers(optimizer):
        _refuse(
            f"optimizer {name}",
            "each bucket is a step on some of the parameters; torch's own optimizers keep nothing that counts steps "
            "across parameters, of others that is not known",
        )
    if optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks:
        _refuse(f"optimizer {name} with step pre-hooks", "they run after the gradients have been sent")


def refuse_gate_of_whole_pushes(gate: Gate) -> None:
    """Refuse gates that decide on a push as a whole, or compare the weights of whole pushes.

    Raises:
        MisconfigurationException: this is one.
    """
    if not gate.blockwise:
        _refuse(f"gate {gate.describe()}", "it decides on a push as a whole; gate='g2' with action='ridge' does not")
    if "base_weights" in gate.needs:
        _refuse(f"gate {gate.describe()}", "it compares base and current weights of whole pushes; take another gate")


def overrides(owner: object, name: str, base: type) -> bool:
    """Whether an object has a hook of its own.

    Args:
        owner: a module or callback.
        name: of the hook.
        base: the class that defines it.
    """
    return name in vars(owner) or getattr(type(owner), name) is not getattr(base, name)


def _refuse(what: str, reason: str) -> None:
    raise MisconfigurationException(f"{what}: {reason}. {_REMEDY}")
