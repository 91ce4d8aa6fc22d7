"""Lightning's callbacks and tools. ``one``: plain Lightning, then g2async on one rank. ``two``: g2async on two ranks.

Every case trains a small module and returns what it has come to; the facts of each rank go to one file.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hook_record import RecordingCallback, RecordingNet
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from small_nets import Adversaries, Clipped, Net, Overrides, Scheduled, Silent, Sized, loader, state

import lightning_g2

MODE, OUT, NAMES = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
DEVICES = 2 if MODE == "two" else 1
STRATEGY = "g2async"


def trainer(name: str, **options: Any) -> pl.Trainer:
    return pl.Trainer(**{
        "strategy": STRATEGY, "devices": DEVICES, "accelerator": "cpu", "logger": False, "max_epochs": 3,
        "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False,
        "num_sanity_val_steps": 0, "default_root_dir": OUT / STRATEGY / name, "log_every_n_steps": 1, **options,
    })  # fmt: skip


def run(name: str, net: pl.LightningModule, **options: Any) -> tuple[pl.Trainer, dict[str, Any]]:
    """Fit, then test with what the module now holds."""
    it = trainer(name, **options)
    it.fit(net, loader(), loader(16))
    validated = float(it.callback_metrics["v"])
    tested = it.test(net, loader(16), verbose=False)[0]["v"]
    return it, {"state": state(net), "tested": tested, "v": validated, "steps": it.global_step}


def keep(name: str) -> cb.ModelCheckpoint:
    return cb.ModelCheckpoint(OUT / STRATEGY / name, save_top_k=0, save_last=True)


# --- callbacks that put weights of their own into the module ----------------------------------------------------------


def ema() -> dict[str, Any]:
    epochs = cb.ModelCheckpoint(OUT / STRATEGY / "ema", save_top_k=-1, filename="{epoch}", monitor="v")
    callbacks = [cb.EMAWeightAveraging(decay=0.8), epochs]
    it, facts = run("ema", Net(), callbacks=callbacks, enable_checkpointing=True)
    it.strategy.barrier()
    saved = torch.load(OUT / STRATEGY / "ema" / "epoch=1.ckpt", weights_only=True)
    names = ("state_dict", "current_model_state", "averaging_state")
    best = it.validate(Net(), loader(16), ckpt_path=OUT / STRATEGY / "ema" / "epoch=2.ckpt", verbose=False)[0]["v"]
    return facts | {name: saved[name] for name in names} | {"best": best}


def swa() -> dict[str, Any]:
    return run("swa", Net(), callbacks=[cb.StochasticWeightAveraging(0.05, swa_epoch_start=1)])[1]


def swa_without_norm() -> dict[str, Any]:
    callback = cb.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)
    _, facts = run("swa_without_norm", Net(norm=False), callbacks=[callback])
    return facts | {"average": state(callback._average_model), "averaged": int(callback.n_averaged)}


def pruning() -> dict[str, Any]:
    net = Net(norm=False)
    lottery = cb.ModelPruning("l1_unstructured", amount=0.5, parameters_to_prune=[(net.net[0], "weight")])
    _, facts = run("pruning", net, callbacks=[lottery])
    return facts | {"zeros": int((net.net[0].weight == 0).sum())}


def clipped() -> dict[str, Any]:
    net = Clipped()
    before = state(net)
    _, facts = run("clipped", net)
    return facts | {"before": before}


def clipped_over_rpc() -> dict[str, Any]:
    net = Clipped()
    before = state(net)
    strategy = lightning_g2.G2AsyncStrategy(transport="rpc", pull="prefetch")
    return run("clipped_over_rpc", net, strategy=strategy)[1] | {"before": before}


def adversaries() -> dict[str, Any]:
    net, it = Adversaries(), trainer("adversaries", max_steps=20, max_epochs=-1)
    it.fit(net, loader(80))
    return {"state": state(net), "steps": it.global_step, "moved": net.moved}


# --- observers and flags ----------------------------------------------------------------------------------------------


def observers() -> dict[str, Any]:
    counts = {"starts": 0}
    timer, directory = cb.Timer(duration="00:01:00:00"), OUT / STRATEGY / "observers"
    callbacks = [
        cb.GradientAccumulationScheduler({0: 1, 1: 2}), cb.LearningRateMonitor("step"), cb.DeviceStatsMonitor(True),
        cb.RichModelSummary(), cb.RichProgressBar(), timer, keep("observers"),
        cb.LambdaCallback(on_train_epoch_start=lambda *_: counts.update(starts=counts["starts"] + 1)),
        cb.OnExceptionCheckpoint(directory),
    ]  # fmt: skip
    loggers = [CSVLogger(directory, name="csv", version=0), TensorBoardLogger(directory, name="board", version=0)]
    if MODE == "two":
        loggers.append(WandbLogger(save_dir=directory, offline=True))
    it, facts = run(
        "observers", Net(), callbacks=callbacks, logger=loggers, profiler=SimpleProfiler(directory, "simple"),
        enable_progress_bar=True, enable_model_summary=True, enable_checkpointing=True, num_sanity_val_steps=1,
        reload_dataloaders_every_n_epochs=1, detect_anomaly=True, gradient_clip_val=0.5,
    )  # fmt: skip
    rows = (directory / "csv" / "version_0" / "metrics.csv").read_text() if it.is_global_zero else ""
    return facts | counts | {"rows": rows, "elapsed": timer.time_elapsed("train") > 0}


def flags() -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        it, facts = run(
            "flags", Net(), overfit_batches=2, inference_mode=False, benchmark=True, deterministic=True,
            use_distributed_sampler=False, profiler=PyTorchProfiler(OUT / STRATEGY / "flags", "torch"),
        )  # fmt: skip
    torch.use_deterministic_algorithms(False)
    batches = len(it.lightning_module.losses)
    return facts | {"warned": [str(w.message) for w in caught if "deterministic" in str(w.message)], "batches": batches}


def fast_dev_run() -> dict[str, Any]:
    return run("fast_dev_run", Net(), fast_dev_run=2, profiler=AdvancedProfiler(OUT / STRATEGY, "advanced"))[1]


def overrides() -> dict[str, Any]:
    net = Overrides()
    return run("overrides", net)[1] | {"calls": net.calls}


def hooks() -> dict[str, Any]:
    record: list[str] = []
    it = trainer(
        "hooks", max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, num_sanity_val_steps=1,
        callbacks=[RecordingCallback(record)], val_check_interval=1.0,
    )  # fmt: skip
    net = RecordingNet(record)
    it.fit(net, loader(36), loader(16))
    it.save_checkpoint(OUT / STRATEGY / "hooks.ckpt")
    return {"record": record, "state": state(net)}


# --- compiled modules -------------------------------------------------------------------------------------------------


def compiled() -> dict[str, Any]:
    whole, part, facts = Silent(), Silent(), {}
    for name, net in {"whole": torch.compile(whole, backend="eager"), "part": part}.items():
        if name == "part":
            part.net = torch.compile(part.net, backend="eager")
        it = trainer("compiled", max_epochs=1)
        it.fit(net, loader())
        path = OUT / STRATEGY / f"{name}.ckpt"
        it.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)["state_dict"]
        facts[f"keys_{name}"] = list(saved)
        plain = Net()
        plain.load_state_dict({key.replace("_orig_mod.", ""): value for key, value in saved.items()})
        facts[name] = state(plain)
    return facts


# --- tuners -----------------------------------------------------------------------------------------------------------


def lr_finder() -> dict[str, Any]:
    net, it = Net(optimizer="adam"), trainer("lr_finder", max_epochs=2)
    before = state(net)
    found = Tuner(it).lr_find(
        net, loader(384), loader(16), num_training=80, min_lr=1e-4, max_lr=0.1, early_stop_threshold=None
    )
    between, suggested = state(net), found.suggestion()
    it.fit(net, loader(), loader(16))
    return {
        "before": before, "between": between, "suggested": suggested, "lr": net.lr, "lrs": list(found.results["lr"]),
        "state": state(net), "used": it.optimizers[0].param_groups[0]["lr"], "steps": it.global_step,
        "files": [p.name for p in OUT.rglob(".lr_find*")],
    }  # fmt: skip


def finder_within_fit() -> dict[str, Any]:
    net = Scheduled()
    finder = cb.LearningRateFinder(min_lr=1e-4, max_lr=0.1, num_training_steps=20, update_attr=False)
    it = trainer("finder_within_fit", max_epochs=4, callbacks=[finder])
    it.fit(net, loader(96), loader(16))
    schedule = it.lr_scheduler_configs[0].scheduler
    return {
        "state": state(net), "schedule": schedule.last_epoch, "lr": schedule.get_last_lr()[0], "steps": it.global_step
    }  # fmt: skip


def batch_size_finder() -> dict[str, Any]:
    net, finder = Sized(), cb.BatchSizeFinder(init_val=2, steps_per_trial=2)
    it = trainer("batch_size_finder", max_epochs=1, callbacks=[finder], limit_train_batches=8)
    it.fit(net)
    return {
        "sizes": net.sizes, "size": net.batch_size, "optimal": finder.optimal_batch_size, "state": state(net),
        "steps": it.global_step, "files": [p.name for p in OUT.rglob(".scale_batch_size*")],
    }  # fmt: skip


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    case.__name__: case
    for case in (
        ema, swa, swa_without_norm, pruning, clipped, adversaries, observers, overrides, hooks, lr_finder,
        batch_size_finder, clipped_over_rpc, finder_within_fit, flags, fast_dev_run, compiled,
    )
}  # fmt: skip

if __name__ == "__main__":
    facts: dict[str, dict[str, Any]] = {}
    for name in NAMES or CASES:
        for strategy in ("auto", "g2async") if MODE == "one" else ("g2async",):
            STRATEGY = strategy
            pl.seed_everything(5, verbose=False)
            facts.setdefault(name, {})[strategy] = CASES[name]()
            print(f"{strategy}: {name} done", flush=True)
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            torch.save(facts, OUT / f"{MODE}{rank}.pt")
