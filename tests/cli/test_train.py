from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.strategies import DDPStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_g2.callbacks.straggler import StragglerCallback
from lightning_g2.cli import train
from lightning_g2.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted(path.stem for path in (train.config_dir() / "experiment").glob("*.yaml"))
TIMEOUT_S = 300

# A console script has no module name, so Lightning starts the other ranks from the script's path.
CONSOLE_SCRIPT = "import sys\nfrom lightning_g2.cli.train import main\nsys.exit(main())\n"


def g2_train(*overrides: str, cwd: Path, program: tuple[str, ...] = ("-m", "lightning_g2.cli.train"), **environ: str):
    kept = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")}
    return subprocess.run(
        [sys.executable, *program, *overrides],
        cwd=cwd, env={**kept, "PYTHONPATH": str(ROOT), **environ}, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip


def files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.rglob(pattern))


def composed(*overrides: str):
    with initialize_config_dir(str(train.config_dir()), version_base="1.3"):
        cfg = compose("config", overrides=["output_dir=/o", "strategy_name=x", *overrides])
    return train.resolve(cfg)


def check_job(folder: Path, *, strategy: str, ranks: int) -> dict:
    """One event file with curves, and a report that agrees with itself."""
    (event_file,) = files(folder, "events.out.tfevents.*")
    events = EventAccumulator(str(event_file)).Reload()
    assert {"train_loss", "val_loss"} <= set(events.Tags()["scalars"])
    assert any(tag.startswith("lr-") for tag in events.Tags()["scalars"])
    facts = json.loads((folder / "report.json").read_text())
    assert (facts["strategy"], facts["ranks"]) == (strategy, ranks)
    assert facts["val_loss"] == pytest.approx(events.Scalars("val_loss")[-1].value)
    assert facts["samples"] == sum(facts[f"rank{rank}_samples"] for rank in range(ranks))
    assert 0.0 <= facts["idle_fraction"] < 1.0
    return facts


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_runs_on_one_rank(tmp_path, experiment):
    short = ["trainer.max_steps=4", "trainer.log_every_n_steps=1", "data.max_bytes=500000", "data.val_batches=2"]
    done = g2_train(f"experiment={experiment}", "strategy=single", *short, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (job_file,) = files(tmp_path / "outputs", "job.yaml")
    facts = check_job(job_file.parent, strategy="single", ranks=1)
    assert (facts["samples"], facts["rank0_pushes"], facts["idle_fraction"]) == (4 * 24, 4, 0.0)
    assert "rank  samples  pushes  mean τ  max τ  mean weight  rejected  samples/s  idle %" in done.stdout
    assert f"tensorboard --logdir {facts['log_dir']}" in done.stdout


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_runs_asynchronously(tmp_path, experiment):
    short = ["trainer.max_steps=4", "trainer.log_every_n_steps=1", "data.max_bytes=500000", "data.val_batches=2"]
    done = g2_train(f"experiment={experiment}", *short, "hydra.run.dir=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = check_job(tmp_path / "out", strategy="g2async", ranks=2)
    assert sum(facts[f"rank{rank}_{kind}"] for rank in range(2) for kind in ("pushes", "rejected")) == 4
    assert "Traceback" not in done.stderr
    assert "tensorpipe" not in done.stderr


@pytest.mark.timeout(TIMEOUT_S)
def test_two_ranks_of_a_console_script_share_one_folder_whose_name_is_awkward(tmp_path):
    (tmp_path / "g2-train").write_text(CONSOLE_SCRIPT)
    done = g2_train(
        "experiment=smoke", "strategy=ddp", "straggler.factor=null", "straggler.seconds=0.4",
        'hydra.run.dir="a b/${now:%S-%f} c=d"',
        cwd=tmp_path, program=("g2-train",),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b", "g2-train"]
    (folder,) = (tmp_path / "a b").iterdir()
    facts = check_job(folder, strategy="ddp", ranks=2)
    assert facts["rank0_samples"] == facts["rank1_samples"] == 8 * 24
    assert facts["rank0_idle_s"] > 0.5  # rank 1 slept 8 · 0.4 s, most of it while rank 0 had its gradient ready
    assert facts["rank1_idle_s"] < facts["rank0_idle_s"]
    assert f"tensorboard --logdir '{folder}/tensorboard'" in done.stdout
    assert "block_size: 64" in (folder / "tensorboard" / "hparams.yaml").read_text().splitlines()


SCALARS = {
    "g2/openness", "g2/entropy", "g2/ess", "g2/rescued", "g2/rejected", "g2/staleness_mean", "g2/staleness_max",
    "g2/late", "g2/pushes_per_s", "g2/server_version", "g2/rank0/samples_per_s", "g2/rank1/samples_per_s",
    "g2/openness_stale", "g2/bytes_sent", "g2/bytes_saved", "g2/rank1/bytes_sent",
}  # fmt: skip


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("logger", ["tensorboard", "csv"])
def test_the_servers_telemetry_reaches_rank_0s_logger(tmp_path, logger):
    done = g2_train(
        "experiment=smoke", f"logger={logger}", "trainer.max_steps=40", "trainer.log_every_n_steps=10",
        "hydra.run.dir=out", "straggler.factor=null", "straggler.seconds=0.05",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (facts["strategy"], facts["ranks"]) == ("g2async", 2)
    assert facts["rank0_pushes"] + facts["rank1_pushes"] == 40
    assert facts["samples"] == 40 * 24
    # Both begin with the first weights; who pushes second is one version late, whichever it is.
    assert max(facts["rank0_staleness_max"], facts["rank1_staleness_max"]) >= 1
    assert "gate g2_spectral (rank 16, thermal, β=4" in done.stderr
    if logger == "csv":
        (table,) = files(tmp_path, "metrics.csv")
        assert set(table.read_text().splitlines()[0].split(",")) >= SCALARS
        return
    (event_file,) = files(tmp_path, "events.out.tfevents.*")
    events = EventAccumulator(str(event_file), size_guidance={"histograms": 0}).Reload()
    assert set(events.Tags()["scalars"]) >= SCALARS
    for tag in ("g2/friction", "g2/weight", "g2/staleness"):
        # 40 steps of the job, an entry for every 10 in which rank 0 looks, from rank 0 only.
        tens = [(entry.step + 1) // 10 for entry in events.Histograms(tag)]
        assert tens == sorted({*tens})
        assert 1 <= tens[0] <= tens[-1] == 4
    assert sum(entry.histogram_value.num for entry in events.Histograms("g2/weight")) == 40, "each push once"
    friction = [entry.histogram_value for entry in events.Histograms("g2/friction")]
    assert sum(value.num for value in friction) <= facts["rank0_pushes"] + facts["rank1_pushes"]
    assert all(0.0 <= value.min <= value.max <= 8 / 3 + 1e-6 for value in friction)
    openness = [entry.value for entry in events.Scalars("g2/openness")]
    assert len(openness) == len(events.Histograms("g2/weight"))
    assert all(0.0 <= value <= 1.0 for value in openness)


@pytest.mark.timeout(TIMEOUT_S)
def test_a_sweep_runs_each_job_once(tmp_path):
    done = g2_train(
        "-m", "experiment=smoke", "strategy=ddp", "seed=1,2", "hydra.sweep.dir=sweep", "callbacks.progress=null",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [path.parent.name for path in files(tmp_path, "job.yaml")] == ["0", "1"]
    facts = [check_job(tmp_path / "sweep" / job, strategy="ddp", ranks=2) for job in "01"]
    assert [train.load_job(tmp_path / "sweep" / job / "job.yaml")["seed"] for job in "01"] == [1, 2]
    assert facts[0]["val_loss"] != facts[1]["val_loss"]
    assert done.stdout.count("samples/s") == 2


@pytest.mark.timeout(TIMEOUT_S)
def test_a_wrong_value_ends_the_command_before_training(tmp_path):
    done = g2_train("experiment=smoke", "strategy=ddp", "model.lr=-1", "hydra.run.dir=out", cwd=tmp_path)
    assert done.returncode == 2
    assert "g2-train: lr=-1: must be > 0" in done.stderr
    assert "Traceback" not in done.stderr
    assert not files(tmp_path, "events.out.tfevents.*")


def test_the_documented_overrides_compose():
    job = composed(
        "strategy=ddp", "gate=none", "model.lr=1e-3", "trainer.max_time=00:00:00:30", "straggler.factor=8", "seed=2"
    )
    assert job["strategy"] == {"_target_": "lightning_g2.strategy.MeteredDDPStrategy"}
    assert job["gate"] == {"name": "none", "options": {}}
    assert job["model"]["lr"] == 1e-3
    assert job["trainer"]["max_time"] == "00:00:00:30"
    assert job["straggler"]["factor"] == 8
    assert job["data"]["seed"] == job["seed"] == 2


def test_by_default_a_slow_rank_trains_asynchronously_for_two_minutes():
    job = composed()
    assert train.is_asynchronous(job)
    assert (job["strategy"]["gate"], job["trainer"]["devices"]) == ("g2_spectral", 2)
    assert job["trainer"]["max_time"] == "00:00:02:00"
    assert (job["straggler"]["rank"], job["straggler"]["factor"]) == (1, 4.0)


def test_a_rank_alone_has_one_device():
    job = composed("strategy=single")
    assert (job["strategy"], job["trainer"]["devices"]) == ("auto", 1)


def test_null_gate_options_are_left_to_the_package():
    job = composed("gate=g2", "gate.options.beta=2.0")
    job["strategy"]["_target_"] = "builtins.dict"
    built = train.build_strategy(job)
    assert (built["gate"], built["gate_options"]) == ("g2", {"beta": 2.0, "bounded_delay": 2})


def test_a_strategy_composes_in_a_foreign_app(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults:\n  - strategy: ddp\n")
    search = f"hydra.searchpath=[file://{train.config_dir()}]"
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert isinstance(instantiate(compose("mine", overrides=[search]).strategy), DDPStrategy)
        cfg = compose("mine", overrides=[search, "strategy=g2async"])
    assert (cfg.strategy.gate, cfg.strategy.gate_options) == (None, None)


def test_the_telemetry_is_for_asynchronous_training_only():
    callbacks = train.build_callbacks(composed("strategy=ddp"))
    names = [type(callback).__name__ for callback in callbacks]
    assert names == ["StragglerCallback", "LimitProgressBar", "LearningRateMonitor", "ReportCallback"]
    assert isinstance(callbacks[0], StragglerCallback)


@pytest.mark.parametrize(
    "path", files(train.config_dir(), "*.yaml"), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_every_line_of_the_configuration_is_commented(path):
    assert [line for line in path.read_text().splitlines() if line.strip() and "#" not in line] == []


@pytest.mark.parametrize("layout", ["checkout", "wheel"])
def test_the_configuration_is_found(tmp_path, monkeypatch, layout):
    folder = tmp_path / ("lightning_g2/conf" if layout == "wheel" else "conf")
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    monkeypatch.setattr("lightning_g2.__file__", str(tmp_path / "lightning_g2" / "__init__.py"))
    assert train.config_dir() == folder


def test_a_missing_configuration_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_g2.__file__", str(tmp_path / "lightning_g2" / "__init__.py"))
    with pytest.raises(ConfigurationError, match=r"holds no config.yaml; install the package again"):
        train.config_dir()


@pytest.mark.parametrize(("code", "status"), [(2, 2), (-9, 137)])
def test_a_failed_job_ends_the_sweep_with_its_code(tmp_path, monkeypatch, code, status):
    monkeypatch.setattr(train.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code))
    with pytest.raises(SystemExit, match=f"^{status}$"):
        train.run_in_process(tmp_path / "job.yaml")


def test_the_end_by_steps_validates_too(tmp_path):
    job = composed("experiment=smoke", "strategy=single", "trainer.accumulate_grad_batches=2", "~logger")
    job["trainer"]["default_root_dir"] = str(tmp_path)
    trainer = train.build_trainer(job, callbacks=[])
    assert trainer.val_check_interval == 16


def test_the_job_is_announced_only_while_it_runs():
    with train.announced(Path("/o/job.yaml")):
        assert os.environ[train.JOB_VARIABLE] == "/o/job.yaml"
    assert train.JOB_VARIABLE not in os.environ


def test_threads_must_be_positive():
    with pytest.raises(ConfigurationError, match=r"threads=0: must be ≥ 1"):
        train.set_threads(0)


@pytest.mark.timeout(TIMEOUT_S)
def test_ranks_that_torchrun_starts_share_one_job(tmp_path):
    program = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lightning_g2.cli.train")
    done = g2_train(
        "experiment=smoke", "hydra.run.dir=out/${now:%f}", "hydra.job.chdir=true", "logger=csv",
        "trainer.enable_checkpointing=true", cwd=tmp_path, program=program, OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (folder,) = (tmp_path / "out").iterdir()
    assert json.loads((folder / "report.json").read_text())["ranks"] == 2
    assert len(files(tmp_path, "*.ckpt")) == 1


@pytest.mark.timeout(TIMEOUT_S)
def test_a_sweep_of_ranks_started_from_outside_is_refused(tmp_path):
    program = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "lightning_g2.cli.train")
    done = g2_train("-m", "experiment=smoke", "seed=1,2", cwd=tmp_path, program=program, OMP_NUM_THREADS="1")
    assert done.returncode != 0
    assert "a sweep, started by TorchElastic: its jobs would share one set of ranks; start g2-train -m" in done.stderr
