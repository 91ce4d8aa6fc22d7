"""Ranks that torchrun or SLURM start: each runs the command, rank 0 composes the job, the others are told it."""

from __future__ import annotations

import json
import os
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment  # type: ignore[attr-defined]

from lightning_g2.errors import ConfigurationError
from lightning_g2.transport import bulletin
from lightning_g2.transport.interface import stay_on_this_host

_WAIT_S = 120.0


def outside_environment() -> ClusterEnvironment | None:
    """What has started the ranks; None where this process is to start them."""
    for kind in (TorchElasticEnvironment, SLURMEnvironment):
        if kind.detect():
            if _nodes() == 1:
                stay_on_this_host()
            environment: ClusterEnvironment = kind()
            return environment
    return None


def tell(job: dict[str, Any], environment: ClusterEnvironment) -> None:
    """Tell the other ranks the job."""
    bulletin.post(environment.main_address, environment.main_port, _key(), json.dumps(job), nodes=_nodes())


def told(environment: ClusterEnvironment) -> dict[str, Any]:
    """The job that rank 0 has composed.

    Raises:
        ConfigurationError: rank 0 did not tell it; most likely it failed to compose it.
    """
    try:
        text = bulletin.read(environment.main_address, environment.main_port, _key(), timeout_s=_WAIT_S)
    except TimeoutError as error:
        raise ConfigurationError(
            f"rank {environment.global_rank()}: rank 0 has told no job within {_WAIT_S:.0f} s; see what it says, and "
            "check that this host reaches MASTER_ADDR"
        ) from error
    job: dict[str, Any] = json.loads(text)
    return job


def _nodes() -> int:
    """Number of hosts, as far as what has started the ranks says; torchrun hosts the store itself."""
    return int(os.environ.get("SLURM_NNODES") or os.environ.get("GROUP_WORLD_SIZE") or 2)


def _key() -> str:
    # torchrun keeps its store when it starts the ranks anew.
    return f"g2-train/job/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
