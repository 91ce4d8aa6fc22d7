"""The public names, pinned: taking one away is a breaking change."""

import subprocess
import sys
from importlib.resources import files

import lightning.pytorch as pl

import lightning_g2
import lightning_g2.algebra
import lightning_g2.callbacks
import lightning_g2.metrics
import lightning_g2.routing
import lightning_g2.simulate


def test_public_names() -> None:
    assert set(lightning_g2.__all__) == {
        "G2AsyncStrategy", "G2MonitorCallback", "G2RoutingCallback", "StragglerCallback"
    }  # fmt: skip
    assert set(lightning_g2.algebra.__all__) == {
        "associator", "fano_fisher_metric", "g2_basis", "multiplication_table", "multiply", "project_to_g2"
    }  # fmt: skip
    assert set(lightning_g2.routing.__all__) == {
        "G2Sketch", "Gate", "GateContext", "GateDecision", "RidgeFrame", "available_gates", "build_gate", "mge_weights"
    }  # fmt: skip
    assert set(lightning_g2.simulate.__all__) == {
        "Delays", "Observation", "SimulationResult", "charged", "layered", "pareto", "parse_delays", "simulate",
        "speeds", "straggler", "trace", "uniform",
    }  # fmt: skip
    assert set(lightning_g2.metrics.__all__) == {"Friction", "Goodput", "Openness", "Staleness"}
    for module in (
        lightning_g2, lightning_g2.algebra, lightning_g2.callbacks, lightning_g2.metrics, lightning_g2.routing,
        lightning_g2.simulate,
    ):  # fmt: skip
        assert all(hasattr(module, name) for name in module.__all__)


def test_importing_registers_the_strategy() -> None:
    trainer = pl.Trainer(strategy="g2async", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert type(trainer.strategy) is lightning_g2.G2AsyncStrategy


def test_the_package_is_typed() -> None:
    assert files("lightning_g2").joinpath("py.typed").is_file()


def test_importing_has_no_other_side_effect() -> None:
    code = (
        "import threading, torch, lightning.pytorch, logging, warnings;"
        "before = (threading.active_count(), torch.get_num_threads(), logging.root.level, len(warnings.filters));"
        "import lightning_g2, torch.distributed as dist;"
        "after = (threading.active_count(), torch.get_num_threads(), logging.root.level, len(warnings.filters));"
        "assert before == after, (before, after); assert not dist.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
