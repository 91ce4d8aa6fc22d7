"""What decoupled threads cannot go with, refused by name before training."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_g2.callbacks.straggler import StragglerCallback
from lightning_g2.decoupled import DecoupledOptions
from lightning_g2.strategy.layerwise_refusal import overrides
from lightning_g2.strategy.options import G2AsyncOptions

_MODULE_HOOKS = (
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping",
    "optimizer_step", "optimizer_zero_grad",
)  # fmt: skip
_CALLBACK_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")


def thread_options(options: G2AsyncOptions, trainer: Trainer) -> DecoupledOptions:
    """What the strategy's options and the trainer's settings mean for the threads.

    Raises:
        MisconfigurationException: gradients are to be clipped by the norm of the whole, layer by layer.
    """
    clip, by_value = trainer.gradient_clip_val, trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    by_norm = clip is not None and clip > 0 and not by_value
    if by_norm and options.update == "layer" and options.clip_scope == "global":
        _refuse(
            f"gradient_clip_val={clip} by norm",
            "the norm of the whole gradient is known only when the first layers have been updated",
            "clip each layer by its own norm with G2AsyncStrategy(clip_scope='layer') or each entry with "
            "Trainer(gradient_clip_algorithm='value'), or update the whole at once with update='block' (and "
            "weights='stashed' for the gradient of one set of weights)",
        )
    return options.threads(
        accumulate=trainer.accumulate_grad_batches,
        clip_norm=float(clip) if by_norm and clip is not None else None,
        clip_value=float(clip) if clip and by_value else None,
    )


def refuse_training(trainer: Trainer, module: LightningModule) -> None:
    """Refuse settings, modules and hooks that threads cannot take over.

    Raises:
        MisconfigurationException: there is one.
    """
    plain = "leave forward_threads and backward_threads out"
    if not module.automatic_optimization:
        _refuse("manual optimization", "only the module knows which backward and which step belong together", plain)
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        _refuse(
            "training_step(dataloader_iter)", "batches are loaded ahead of the training steps", "take batch instead"
        )
    if getattr(module, "_compiler_ctx", None) is not None:
        _refuse(
            f"{type(module).__name__} under torch.compile", "compiled code is tied to the module's own parameters",
            "compile functions that it calls instead",
        )  # fmt: skip
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.SyncBatchNorm):
            _refuse(f"SyncBatchNorm {name!r}", "it waits for other ranks in every forward", "use BatchNorm")
    _refuse_precision(trainer.precision_plugin)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(c, GradientAccumulationScheduler) for c in callbacks):
        _refuse("GradientAccumulationScheduler", "windows have one size", "set Trainer(accumulate_grad_batches=…)")
    for hook in _MODULE_HOOKS:
        if overrides(module, hook, LightningModule):
            _refuse(f"{type(module).__name__}.{hook}", "gradients exist in threads alone, layer by layer", plain)
    for callback in callbacks:
        for hook in _CALLBACK_HOOKS:
            if overrides(callback, hook, Callback) and not isinstance(callback, StragglerCallback):
                _refuse(f"{type(callback).__name__}.{hook}", "gradients exist in threads alone, layer by layer", plain)


def _refuse_precision(plugin: Precision) -> None:
    if getattr(plugin, "scaler", None) is not None:
        _refuse(
            f"precision={plugin.precision!r}",
            "its GradScaler looks at all gradients before it says whether there is a step", "use 'bf16-mixed'",
        )  # fmt: skip
    if type(plugin) not in (Precision, MixedPrecision):
        _refuse(
            f"precision={plugin.precision!r}",
            "it changes the default dtype of the whole process for the time of a training step",
            "use '32-true' or 'bf16-mixed', or convert the module and its inputs yourself",
        )


def refuse_stepping(optimizers: list[Optimizer], module: LightningModule) -> None:
    """Refuse optimizers and parameters with hooks that threads would pass by.

    Raises:
        MisconfigurationException: there is one.
    """
    if len(optimizers) != 1:
        _refuse(f"{len(optimizers)} optimizers", "a backward may bring gradients for any of them", "use one")
    (optimizer,) = optimizers
    hooks = (
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )  # fmt: skip
    if any(hooks):
        _refuse(
            f"optimizer {type(optimizer).__name__} with step hooks", "layers are stepped one by one, in threads",
            "do what they do in on_train_batch_end",
        )  # fmt: skip
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            _refuse(f"parameter {name!r} with gradient hooks", "each batch has leaves of its own", "take them off")


def _refuse(what: str, reason: str, remedy: str) -> None:
    raise MisconfigurationException(f"{what} with forward and backward threads: {reason}; {remedy}")
