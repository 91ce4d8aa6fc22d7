"""What g2async cannot do, refused by name before training."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.trainer.connectors import accelerator_connector
from torch.optim import LBFGS, Optimizer

from lightning_g2.errors import ConfigurationError
from lightning_g2.strategy.options import G2AsyncOptions


def refuse_environment(accelerator: Accelerator | None, *, sync_batchnorm: bool) -> None:
    """Refuse builds, devices and plugins that cannot work.

    Raises:
        MisconfigurationException: RPC is missing from torch, the accelerator is neither CPU nor CUDA, or SyncBatchNorm
            was asked for.
    """
    if not dist.is_available() or not dist.rpc.is_available():
        raise MisconfigurationException(
            "strategy='g2async' needs torch.distributed.rpc, which this build of torch does not have; install a Linux "
            "build of torch with distributed support, or use another strategy"
        )
    if not isinstance(accelerator, (CPUAccelerator, CUDAAccelerator)):
        raise MisconfigurationException(
            f"accelerator={type(accelerator).__name__}: g2async runs on CPU and CUDA devices; "
            "pass accelerator='cpu' or 'cuda'"
        )
    if sync_batchnorm:
        raise MisconfigurationException(
            "sync_batchnorm=True: SyncBatchNorm makes ranks wait for each other in every forward; leave it out, "
            "g2async averages BatchNorm statistics at sync points"
        )


def refuse_servers(options: G2AsyncOptions, *, nodes: int) -> None:
    """Refuse servers that this host or the job's hosts cannot have.

    Raises:
        ConfigurationError: shared memory is asked for between hosts, several servers are to do what one alone can, or
            servers are to compute on a device that is not here.
    """
    if options.transport == "shm" and nodes > 1:
        raise ConfigurationError(
            f"transport='shm' with num_nodes={nodes}: hosts share no memory; leave the option out, and ranks use "
            "shared memory to a server of their own host and rpc to others"
        )
    servers = options.server_count(nodes)
    if servers > 1 and options.record is not None:
        raise ConfigurationError(
            f"record={options.record!r} on {nodes} nodes: a trace is written by the one server "
            "that applies all pushes; add servers=1"
        )
    if servers > 1 and options.rounds is not None:
        raise ConfigurationError(
            f"rounds={options.rounds!r} with servers={servers}: each server would end its rounds by itself, so that a "
            "push could be taken in by one and dropped by another; use servers=1"
        )
    if servers > 1 and options.local_steps > 1:
        raise ConfigurationError(
            f"local_steps={options.local_steps} with servers={servers}: the outer optimizer is kept by one server; use "
            "servers=1"
        )
    kind, _, index = options.server_device.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"server_device={options.server_device!r}: this host has {torch.cuda.device_count()} CUDA devices; use "
            "server_device='cpu' or a device that every host with a server has"
        )


def refuse_notebook(start_method: str, *, ranks: int) -> None:
    """Refuse ways to start ranks that an interactive session does not have.

    Raises:
        MisconfigurationException: ranks would run a script that there is none of.
    """
    interactive = accelerator_connector._IS_INTERACTIVE  # type: ignore[attr-defined]
    if interactive and start_method != "fork" and (ranks > 1 or start_method == "spawn"):
        name = "g2async" if start_method == "popen" else f"g2async_{start_method}"
        raise MisconfigurationException(
            f"strategy={name!r} in an interactive session: its ranks are processes that run your script, and a "
            "notebook is none; use strategy='g2async_fork' (on CUDA before anything has used the device), "
            "strategy='g2async' with devices=1, or put the training into a script"
        )


def refuse_world_size(environment: ClusterEnvironment, *, devices: int, nodes: int) -> None:
    """Refuse a job of which others have started more or fewer ranks than the trainer counts.

    Raises:
        ValueError: the numbers differ; Lightning's own checks.
        MisconfigurationException: the numbers differ.
    """
    environment.validate_settings(num_devices=devices, num_nodes=nodes)
    expected = devices * nodes
    if not isinstance(environment, LightningEnvironment):
        given, where = environment.world_size(), type(environment).__name__
    else:  # it takes the trainer's number for granted
        variable = os.environ.get("WORLD_SIZE", "")
        given, where = int(variable) if variable.isdigit() else expected, "the environment variable WORLD_SIZE"
        if given == nodes and not environment.creates_processes_externally:
            return  # some schedulers that start one process a node count nodes
    if given != expected:
        raise MisconfigurationException(
            f"{where} says {given} ranks, devices={devices} and num_nodes={nodes} say {expected}: both must agree; "
            "change what starts the ranks, or the Trainer's devices and num_nodes"
        )


def refuse_recording(options: G2AsyncOptions, *, optimizers: int) -> None:
    """Refuse to record what a trace cannot hold.

    Raises:
        ConfigurationError: there are several optimizers.
    """
    if options.record is not None and optimizers > 1:
        raise ConfigurationError(
            f"record={options.record!r} with {optimizers} optimizers: a trace holds one push a "
            "gradient; record a module with one optimizer"
        )


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that cannot be stepped by a server.

    Raises:
        MisconfigurationException: an optimizer evaluates its closure more than once.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise MisconfigurationException(
                "optimizer LBFGS: it evaluates its closure several times a step, on weights that only the server has; "
                "use an optimizer that steps once for each gradient"
            )
