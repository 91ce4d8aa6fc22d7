"""Forward and backward threads under the trainer: plain Lightning where they take turns, exact counts where not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_g2 import G2AsyncStrategy, StragglerCallback
from lightning_g2.callbacks.thread_report import ThreadReport
from lightning_g2.decoupled.layer import Layout
from lightning_g2.decoupled.options import DecoupledOptions
from lightning_g2.decoupled.report import RunReport
from lightning_g2.decoupled.versions import Versions
from lightning_g2.errors import ConfigurationError
from lightning_g2.strategy.threads.refusal import refuse_stepping, refuse_training, thread_options

BATCHES, SAMPLES = 24, 48  # of tests/scripts/threads_exact.py, an epoch
ALONE = {"servers": 0, "forward_threads": 2, "backward_threads": 2}


def test_threads_that_take_turns_are_plain_lightning_bit_for_bit(run_job: Callable, tmp_path: Path) -> None:
    """Weights, moments, schedules, what is logged, hooks and the counts they see; without and with a server."""
    job = run_job("threads_plain.py", tmp_path)
    assert job.code == 0, job.output
    assert job.left == ()
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert {name: case["unequal"] for name, case in facts.items()} == {name: [] for name in facts}, facts
    assert {name: case["steps"] for name, case in facts.items()} == {
        "sgd": 6, "adamw": 16, "server": 6, "block": 16, "gpt": 16,
    }  # fmt: skip
    assert all(case["rows"] > 4 and case["hooks"] > 30 for name, case in facts.items() if name != "gpt")


@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        (ALONE, {"val_check_interval": 7}),
        ({"forward_threads": 1, "max_graphs": 5}, {"val_check_interval": 7, "accumulate_grad_batches": 3}),
    ],
    ids=["alone", "server"],
)
def test_one_rank_makes_every_update_once(run_job: Callable, tmp_path: Path, options: dict, trainer: dict) -> None:
    job = run_job("threads_exact.py", tmp_path, 1, json.dumps(options), json.dumps(trainer))
    assert job.code == 0, job.output
    facts = json.loads((tmp_path / "rank0.json").read_text())
    windows = 2 * BATCHES // trainer.get("accumulate_grad_batches", 1)
    _assert_exact([facts], windows)
    assert facts["ends"] == 2 * list(range(BATCHES)), "in order"
    assert sorted(facts["samples"]) == sorted(2 * [float(i) for i in range(SAMPLES)])
    assert all([values, steps] == [[float(-steps)], steps] for values, steps in facts["saved"])
    assert len(facts["saved"]) == windows // 5
    assert facts["resumed"] == [float(-windows)]
    assert facts["threads"] == [f"forward-{i}" for i in range(options["forward_threads"])]
    assert set(facts["ages"].values()) == {windows}


@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        ({"forward_threads": 2, "transport": "shm"}, {"val_check_interval": 7}),
        (
            {"backward_threads": 2, "transport": "rpc", "update": "block", "wire_dtype": "bf16"},
            {"accumulate_grad_batches": 3, "val_check_interval": 7},
        ),
    ],
    ids=["shm", "rpc"],
)
def test_two_ranks_lose_and_double_nothing(run_job: Callable, tmp_path: Path, options: dict, trainer: dict) -> None:
    """Windows are asked for ahead, their pushes end in any order: counts are still those of one process."""
    job = run_job("threads_exact.py", tmp_path, 2, json.dumps(options), json.dumps(trainer))
    assert job.code == 0, job.output
    assert job.left == ()
    ranks = [json.loads((tmp_path / f"rank{i}.json").read_text()) for i in range(2)]
    _assert_exact(ranks, 2 * BATCHES // trainer.get("accumulate_grad_batches", 1))
    trained = [sample for facts in ranks for sample in facts["samples"]]
    assert sorted(trained) == sorted(2 * [float(i) for i in range(SAMPLES)])


def _assert_exact(ranks: list[dict], windows: int) -> None:
    assert sum(facts["batches"] for facts in ranks) == 2 * BATCHES
    for facts in ranks:
        assert facts["values"] == [float(-windows)]
        assert facts["global_step"] == facts["steps"] == facts["schedule"] == facts["version"] == windows
        assert (facts["pushes"], facts["trained"]) == (windows, 2 * SAMPLES)
        assert len(facts["validated"]) == 7
        assert all([values, steps] == [[float(-steps)], steps] for values, steps in facts["validated"])
        assert all(logged == of_batch for logged, of_batch in facts["logged"])
        assert 1 <= facts["peak"] <= 5
        assert facts["left"] == []


def test_whatever_ends_a_fit_ends_its_threads(run_job: Callable, tmp_path: Path) -> None:
    job = run_job("threads_ends.py", tmp_path, 1, "forward,backward,hook,SIGINT,SIGTERM,none")
    assert job.code == 0, job.output
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert {case: fact["error"] for case, fact in facts.items()} == {
        "forward": "InjectedError", "backward": "InjectedError", "hook": "InjectedError", "SIGINT": "SystemExit",
        "SIGTERM": "SIGTERMException", "none": "NoneType",
    }  # fmt: skip
    assert all(fact["left"] == [] for fact in facts.values())
    assert "in training_step" in facts["forward"]["text"]
    assert 'raise InjectedError("injected in backward")' in facts["backward"]["text"]


def test_an_error_in_a_thread_of_one_rank_ends_all(run_job: Callable, tmp_path: Path) -> None:
    job = run_job("threads_ends.py", tmp_path, 2, "backward")
    assert job.code != 0
    assert job.left == ()
    assert "PeerFailedError: rank 1 failed, so the job ends: InjectedError: injected in backward" in job.output


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"forward_threads": 0}, "forward_threads=0: must be an integer ≥ 1"),
        ({"max_graphs": 3}, "max_graphs=3 without threads: give forward_threads or backward_threads, too"),
        ({"forward_threads": 1, "local_steps": 4}, "local_steps=4 with forward and backward threads"),
        ({"forward_threads": 1, "aggregate": 2}, "aggregate=2 with forward and backward threads"),
        ({"forward_threads": 1, "rounds": 2}, "rounds=2 with forward and backward threads"),
        ({"forward_threads": 1, "record": "a"}, "record='a' with forward and backward threads"),
        ({"forward_threads": 1, "pull": "prefetch"}, "pull='prefetch' with forward and backward threads"),
        ({"forward_threads": 1, "update": "block", "push": "layerwise"}, "push='layerwise' with forward and backward"),
        ({"forward_threads": 1, "consistency": "atomic"}, "consistency='atomic' with forward and backward threads"),
        ({"forward_threads": 1, "servers": 0, "wire_dtype": "bf16"}, "wire_dtype='bf16' with servers=0"),
        ({"servers": 0}, "servers=0: must be an integer ≥ 1"),
        ({"forward_threads": 1, "correction": "pipemare", "weights": "stashed"}, "use weights='current'"),
    ],
)
def test_options_that_contradict_threads(options: dict, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        G2AsyncStrategy(**options)


def test_layerwise_pushes_are_what_threads_make_anyway() -> None:
    assert G2AsyncStrategy(forward_threads=1, push="layerwise").options.threaded


class _Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _ByHand(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _Iterates(_Net):
    def training_step(self, dataloader_iter: object) -> Tensor:  # type: ignore[override]
        return torch.zeros(())


class _Synchronises(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(1)


class _LooksAtGradients(_Net):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks at all gradients."""


def _trainer(**options: object) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, **(quiet | options))


@pytest.mark.parametrize(
    ("options", "module", "match"),
    [
        ({}, _ByHand, "manual optimization with forward and backward threads.*leave forward_threads"),
        ({}, _Iterates, r"training_step\(dataloader_iter\).*take batch"),
        ({}, _Synchronises, "SyncBatchNorm 'norm'.*use BatchNorm"),
        ({}, _LooksAtGradients, "_LooksAtGradients.on_before_optimizer_step"),
        ({"callbacks": [LambdaCallback(on_before_backward=print)]}, _Net, "LambdaCallback.on_before_backward"),
        (
            {"callbacks": [GradientAccumulationScheduler({2: 4})]},
            _Net,
            "GradientAccumulationScheduler.*accumulate",
        ),
        ({"precision": "bf16-true"}, _Net, "precision='bf16-true'.*use '32-true' or 'bf16-mixed'"),
    ],
)
def test_what_threads_cannot_take_over_is_refused_by_name(options: dict, module: type, match: str) -> None:
    with pytest.raises(MisconfigurationException, match=match):
        refuse_training(_trainer(**options), module())


def test_a_gradient_scaler_and_a_compiled_module_are_refused() -> None:
    trainer = _trainer(precision="bf16-mixed")
    refuse_training(trainer, _Net())
    trainer.precision_plugin.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(MisconfigurationException, match=r"GradScaler looks at all gradients.*use 'bf16-mixed'"):
        refuse_training(trainer, _Net())
    module = _Net()
    module._compiler_ctx = {"compiler": "dynamo"}  # what Lightning leaves on a module under torch.compile
    with pytest.raises(MisconfigurationException, match=r"_Net under torch.compile.*compile functions that it calls"):
        refuse_training(_trainer(), module)


def test_clipping_by_the_norm_of_the_whole_needs_the_whole() -> None:
    trainer = _trainer(gradient_clip_val=1.0)
    with pytest.raises(MisconfigurationException, match=r"gradient_clip_val=1.0 by norm.*clip_scope='layer'.*'block'"):
        thread_options(G2AsyncStrategy(forward_threads=1).options, trainer)
    by_layer = thread_options(G2AsyncStrategy(forward_threads=1, clip_scope="layer").options, trainer)
    whole = thread_options(G2AsyncStrategy(forward_threads=1, update="block", weights="stashed").options, trainer)
    assert (by_layer.clip_norm, by_layer.clip_scope, by_layer.clip_value) == (1.0, "layer", None)
    assert (whole.clip_norm, whole.clip_scope) == (1.0, "global")
    trainer = _trainer(gradient_clip_val=0.5, gradient_clip_algorithm="value", accumulate_grad_batches=4)
    by_value = thread_options(G2AsyncStrategy(forward_threads=1).options, trainer)
    assert (by_value.clip_norm, by_value.clip_value, by_value.accumulate) == (None, 0.5, 4)


def test_hooks_that_threads_would_pass_by_are_refused() -> None:
    module = _Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    refuse_stepping([optimizer], module)
    with pytest.raises(MisconfigurationException, match="2 optimizers"):
        refuse_stepping([optimizer, optimizer], module)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(MisconfigurationException, match=r"optimizer SGD with step hooks.*on_train_batch_end"):
        refuse_stepping([optimizer], module)
    handle.remove()
    module.layer.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(MisconfigurationException, match=r"parameter 'layer.weight' with gradient hooks"):
        refuse_stepping([optimizer], module)


def test_refusals_come_before_a_server_starts() -> None:
    strategy = G2AsyncStrategy(forward_threads=1)
    with pytest.raises(MisconfigurationException, match="manual optimization"):
        _trainer(strategy=strategy).fit(_ByHand(), DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2))
    assert strategy._session is None
    with pytest.raises(ConfigurationError, match="servers=0 with 2 ranks"):
        pl.Trainer(strategy=G2AsyncStrategy(**ALONE), accelerator="cpu", devices=2, logger=False)


# --- what is logged ---------------------------------------------------------------------------------------------------


def test_histograms_hold_the_updates_since_the_last_entry() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    versions = Versions.of_module(module)
    report, tags = RunReport(Layout.of(module), DecoupledOptions(), versions), ThreadReport()
    assert tags.histograms(report) == {}
    versions.advance(0, read=0, start=0, reached=None)
    versions.advance(0, read=0, start=0, reached=None)
    drawn = tags.histograms(report)
    assert set(drawn) == {"g2/threads/age/0", "g2/threads/lag/0"}, "the other layer has had no update"
    assert drawn["g2/threads/age/0"].tolist() == [0.0, 1.0]
    versions.advance(0, read=0, start=2, reached=None)
    assert tags.histograms(report)["g2/threads/age/0"].tolist() == [2.0]
    assert tags.scalars(report)["g2/threads/age_mean"] == pytest.approx(1.0)
    assert Counter(tag.split("/")[1] for tag in tags.scalars(report)) == {"threads": 6}


def test_a_straggler_is_slowed_by_what_threads_tell_it() -> None:
    straggler, trainer = StragglerCallback(rank=0, factor=3.0), _trainer()
    straggler.note_compute(trainer, 0.5)
    assert straggler.delay_s() == pytest.approx(1.0)
