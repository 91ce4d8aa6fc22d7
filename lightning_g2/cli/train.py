"""``g2-train``: the shipped experiments as a Hydra app.

One call composes the configuration once, resolves it, and writes it as ``job.yaml`` into the job's folder. Lightning
then starts the other ranks by running this command again; they find ``job.yaml`` through an environment variable and
never ask Hydra. So no rank can see another time of day, another folder or the sweep that the job belongs to, whatever
characters the folder's name has. The jobs of a sweep run one after another, each in a process of its own, since
process groups and launcher variables of one training would leak into the next. Where torchrun or SLURM has started
the ranks, rank 0 composes and tells the others the job.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import lightning_g2
from lightning_g2.callbacks.report import REPORT_FILE, ReportCallback, format_report
from lightning_g2.cli.outside import outside_environment, tell, told
from lightning_g2.errors import ConfigurationError, G2Error

JOB_VARIABLE = "LIGHTNING_G2_JOB"
"""Environment variable that names the resolved job for a process that must not compose it again."""

JOB_FILE = "job.yaml"

Job = dict[str, Any]

_USER_ERRORS = (G2Error, MisconfigurationException, OmegaConfBaseException, InstantiationException)


def config_dir() -> Path:
    """Folder of the configuration: inside the installed package, or beside it in a checkout.

    Raises:
        ConfigurationError: neither exists.
    """
    package = Path(lightning_g2.__file__).resolve().parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigurationError(f"{package / 'conf'}: holds no config.yaml; install the package again, or use a checkout")


def resolve(cfg: DictConfig) -> Job:
    """Plain values instead of interpolations.

    Args:
        cfg: the composed configuration.

    Returns:
        Nested dicts and lists.

    Raises:
        OmegaConfBaseException: a value is missing or an interpolation leads nowhere.
    """
    job = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(job, dict)
    return {str(key): value for key, value in job.items()}


def load_job(path: str | Path) -> Job:
    """Job that another process resolved and saved.

    Args:
        path: its ``job.yaml``.

    Returns:
        Nested dicts and lists.
    """
    loaded = OmegaConf.load(path)
    assert isinstance(loaded, DictConfig)
    return resolve(loaded)


def build(node: Any) -> Any:
    """Instantiate a ``_target_`` node; an error of this package or of Lightning comes out as it was raised.

    Args:
        node: a resolved node.

    Returns:
        The object.

    Raises:
        InstantiationException: any other error in the target, quoted.
    """
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, (G2Error, MisconfigurationException)):
            raise error.__cause__ from None
        raise


def is_asynchronous(job: Job) -> bool:
    """Whether the job trains with ``g2async``."""
    strategy = job["strategy"]
    return isinstance(strategy, Mapping) and str(strategy.get("_target_")).endswith(".G2AsyncStrategy")


def build_strategy(job: Job) -> Any:
    """The Trainer's ``strategy``: an object, or a name as it is. Gate options that are null are left out."""
    strategy = job["strategy"]
    if isinstance(strategy, Mapping) and strategy.get("gate_options"):
        options = {name: value for name, value in strategy["gate_options"].items() if value is not None}
        strategy = {**strategy, "gate_options": options or None}
    return build(strategy) if isinstance(strategy, Mapping) else strategy


def build_callbacks(job: Job) -> list[pl.Callback]:
    """The straggler if there is one, the callbacks group without its nulls, and the report, last."""
    nodes = {"straggler": job.get("straggler"), **(job.get("callbacks") or {})}
    if not is_asynchronous(job):
        nodes.pop("monitor", None)  # it listens to a parameter server
    if not job.get("logger"):
        nodes.pop("lr", None)  # it refuses to work without a logger
    callbacks = [build(node) for node in nodes.values() if node is not None]
    return [*callbacks, ReportCallback(output_dir=job["output_dir"], strategy=job["strategy_name"])]


def build_trainer(job: Job, callbacks: list[pl.Callback]) -> pl.Trainer:
    """The Trainer, which validates at the end also when it ends by ``max_steps``."""
    options = dict(job["trainer"])
    if options["max_steps"] > 0 and options["val_check_interval"] is None:
        # On endless data Lightning validates when time is up, but not when the steps are.
        options["val_check_interval"] = options["max_steps"] * options["accumulate_grad_batches"]
    bar = any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks)
    logger = build(job["logger"]) if job.get("logger") else False
    trainer = build({**options, "_partial_": True})(
        strategy=build_strategy(job), callbacks=callbacks, logger=logger, enable_progress_bar=bar
    )
    assert isinstance(trainer, pl.Trainer)
    return trainer


def set_threads(threads: int | None) -> None:
    """Fix the CPU threads of this process and of the ranks it starts; None leaves PyTorch's choice.

    Ranks on one machine that each take every core fight for them, and a rank alone would seem slower per thread than
    it is. The variable is set as well because Lightning chooses a number of its own where it is absent.
    """
    if threads is None:
        return
    if threads < 1:
        raise ConfigurationError(f"threads={threads}: must be ≥ 1; null leaves it to PyTorch")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def run_job(job: Job) -> float | None:
    """Train, and on rank 0 print the report.

    Args:
        job: resolved configuration.

    Returns:
        Validation loss on rank 0, nats; None on other ranks and without validation.
    """
    _quieten()
    set_threads(job["threads"])
    pl.seed_everything(job["seed"], workers=True, verbose=False)
    datamodule, model = build(job["data"]), build(job["model"])
    callbacks = build_callbacks(job)
    trainer = build_trainer(job, callbacks)
    trainer.fit(model, datamodule=datamodule)
    report = next(callback for callback in callbacks if isinstance(callback, ReportCallback)).report
    if report is None:
        return None
    print(f"\n{format_report(report)}", flush=True)
    return report.val_loss


def _quieten() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.g2async").setLevel(
        logging.INFO
    )  # its start-up line says how the job is set up
    # Crops are cut in less time than a worker process needs to hand them over.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Lightning's own use of PyTorch, which no user of this command can change.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")


@contextmanager
def announced(path: Path) -> Iterator[None]:
    """Let processes started within find the job."""
    os.environ[JOB_VARIABLE] = str(path)
    try:
        yield
    finally:
        os.environ.pop(JOB_VARIABLE, None)


def run_in_process(path: Path) -> float | None:
    """Run a saved job in a process of its own and read its validation loss, for sweepers.

    Args:
        path: its ``job.yaml``.

    Returns:
        Validation loss, nats; None without validation.

    Raises:
        SystemExit: the job failed; with its exit code.
    """
    command = [sys.executable, "-m", "lightning_g2.cli.train"]
    code = subprocess.run(command, env={**os.environ, JOB_VARIABLE: str(path)}, check=False).returncode
    if code:
        raise SystemExit(code if code > 0 else 128 - code)
    loss = json.loads((path.parent / REPORT_FILE).read_text(encoding="utf-8"))["val_loss"]
    return None if loss is None else float(loss)


def _composed(cfg: DictConfig) -> float | None:
    """Hydra's task: save the resolved job, then run it."""
    job = resolve(cfg)
    environment = outside_environment()
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if environment is not None and sweep:
        raise ConfigurationError(
            f"a sweep, started by {type(environment).__name__.removesuffix('Environment')}: its jobs would share one "
            "set of ranks; start g2-train -m itself, which starts the ranks of each job, or start one job at a time"
        )
    path = Path(job["output_dir"]) / JOB_FILE
    OmegaConf.save(OmegaConf.create(job), path)
    if sweep:
        return run_in_process(path)
    if environment is not None:
        tell(job, environment)
    with announced(path):
        return run_job(job)


def _or_exit(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except _USER_ERRORS as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"g2-train: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def main() -> None:
    """Entry point of ``g2-train``; see ``g2-train --help`` for the groups and values."""
    saved = os.environ.get(JOB_VARIABLE)
    if saved:
        _or_exit(lambda: run_job(load_job(saved)))
        return
    environment = outside_environment()
    if environment is not None and environment.global_rank() > 0:
        _or_exit(lambda: run_job(told(environment)))
        return

    def task(cfg: DictConfig) -> Any:
        return _or_exit(lambda: _composed(cfg))

    folder = str(_or_exit(config_dir))
    hydra.main(version_base="1.3", config_path=folder, config_name="config")(task)()


if __name__ == "__main__":
    main()
