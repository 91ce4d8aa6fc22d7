"""The command that runs this program once more, for another rank of the node."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

_CONFIG_FILE = "config.pickle"
_TOLD_BY_HYDRA = ("${now:", "${hydra:", "${python_version:")
"""Resolvers that only a process which composes a configuration has."""


def rank_command(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a process that runs this program as another rank.

    A job of a Hydra app is not composed again, which in a sweep would be the whole sweep, and in any case another time
    of day, another folder and another number of the job: the process is given this job's configuration.

    Args:
        folder: where to put the configuration; it must be there until the process has read it.

    Returns:
        The words of the command, and the environment variables to add.
    """
    import __main__

    module = getattr(__main__.__spec__, "name", None)
    program = ["-m", module] if module else [getattr(__main__, "__file__", None) or os.path.abspath(sys.argv[0])]
    job = hydra_job()
    if job is None:
        return [sys.executable, *program, *sys.argv[1:]], {}
    saved = folder / _CONFIG_FILE
    saved.write_bytes(pickle.dumps(_frozen(job)))
    environment = {"PYTHONWARNINGS": _joined(",", "PYTHONWARNINGS", "ignore:Experimental rerun CLI option:UserWarning")}
    if module:  # it is looked for from where the app was called, which is not where a job that has its folder runs
        environment["PYTHONPATH"] = _joined(os.pathsep, "PYTHONPATH", str(job.hydra.runtime.cwd))
    return [sys.executable, *program, "--experimental-rerun", str(saved)], environment


def hydra_job() -> Any | None:
    """The configuration, Hydra's own part included, of the Hydra job that this process runs; None where it runs none.

    Each job of a sweep has an object of its own.
    """
    if "hydra.core.hydra_config" not in sys.modules:
        return None
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    # Who composes by hand may have set Hydra's configuration, too; only a job has a folder.
    if not HydraConfig.initialized() or OmegaConf.is_missing(HydraConfig.get().runtime, "output_dir"):
        return None
    return HydraConfig.get()._get_parent()  # type: ignore[attr-defined]


def _frozen(job: Any) -> Any:
    """A copy in which all that only this process can tell is told; other interpolations stay what they are."""
    frozen = copy.deepcopy(job)
    told = _task_times()
    _times(frozen).update(told)
    _freeze(frozen)
    told.update(_times(frozen))  # what this process has not asked for yet it will be told as the other ranks are
    return frozen


def _times(config: Any) -> dict[Any, Any]:
    """What ``${now:...}`` has answered in a configuration; each has its own answers."""
    from omegaconf import OmegaConf

    times: dict[Any, Any] = OmegaConf.get_cache(config)["now"]
    return times


def _task_times() -> dict[Any, Any]:
    """Those answers in the configuration that Hydra has given to the user's function, which only its frame knows."""
    from hydra.core.utils import run_job

    for frame, _ in traceback.walk_stack(None):
        if frame.f_code is run_job.__code__:
            return _times(frame.f_locals["task_cfg"])
    return {}


def _freeze(node: Any) -> None:
    from omegaconf import DictConfig, OmegaConf, read_write
    from omegaconf.errors import OmegaConfBaseException

    keys: list[Any] = list(node.keys()) if isinstance(node, DictConfig) else list(range(len(node)))
    for key in keys:
        if OmegaConf.is_interpolation(node, key):
            text = str(node._get_node(key)._value())
            if any(name in text for name in _TOLD_BY_HYDRA):
                try:
                    value = node[key]
                except OmegaConfBaseException:
                    continue  # nor could this process have read it
                with read_write(node):
                    node[key] = value
        elif not OmegaConf.is_missing(node, key) and OmegaConf.is_config(node[key]):
            _freeze(node[key])


def _joined(separator: str, name: str, value: str) -> str:
    return separator.join(filter(None, [os.environ.get(name), value]))
