"""Runs a plan of fits in processes of its own and works out rates and times from what the ranks have read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_g2.errors import G2Error

_KEPT_BY_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""By default glibc gives a model's gradients back to the kernel after each step and has them zeroed for the next, which
for ten megabytes takes 2 ms: as much as all of the sleeping regression's arithmetic."""

_INHERITED = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")


@dataclass
class Fit:
    """What the ranks have read of one fit.

    Attributes:
        config: the fit, as it stands in the plan, with the plan's workload and number of ranks.
        ranks: by rank, ``start_s``, ``batches``, ``losses`` and, on rank 0 of g2async, ``totals`` and ``pushes``.
    """

    config: dict[str, Any]
    ranks: list[dict[str, Any]]
    _applied: list[tuple[int, float, int]] = field(default_factory=list)

    @property
    def applied(self) -> list[tuple[int, float, int]]:
        """Applied pushes in order of time: rank, monotonic seconds, samples.

        Those of g2async are the server's own records; under synchronous training each batch is one.
        """
        if not self._applied:
            batch = self.config["workload"]["batch"]
            pushes = self.ranks[0].get("pushes") or [
                (rank, row[0], batch) for rank, read in enumerate(self.ranks) for row in read["batches"]
            ]
            self._applied = sorted(map(tuple, pushes), key=lambda push: push[1])
        return self._applied

    def samples_per_s(self, *, skip: int, slow_rank: int | None = None) -> float:
        """Applied samples a second, from the push after the first ``skip`` to where the first fast rank runs dry.

        Args:
            skip: pushes of the job left out at the start.
            slow_rank: a rank whose last push says nothing about the end of the work.
        """
        start_s = self.applied[skip - 1][1]
        fast = {rank for rank, _, _ in self.applied if rank != slow_rank}
        end_s = min(max(t for r, t, _ in self.applied if r == rank) for rank in fast)
        return sum(samples for _, t, samples in self.applied if start_s < t <= end_s) / (end_s - start_s)

    def time_to_loss_s(self, target: float, *, window: int) -> float | None:
        """Seconds from the first batch's start until the mean loss of the job's latest batches is down to a target.

        Args:
            target: the loss.
            window: batches of all ranks that the mean is taken over.

        Returns:
            None if it never is.
        """
        start_s = min(read["start_s"] for read in self.ranks)
        losses = sorted(tuple(row) for read in self.ranks for row in read["losses"])
        for last in range(window, len(losses) + 1):
            if sum(loss for _, loss in losses[last - window : last]) <= window * target:
                return float(losses[last - 1][0] - start_s)
        return None

    def split_s(self, *, skip: int) -> dict[str, float]:
        """Seconds of a rank's step, and what of it goes where, as means over ranks and steps after the first ones.

        ``wait_s`` is without the server's own work, which is ``apply_s``.

        Args:
            skip: batches of each rank left out at the start.
        """
        totals = self.ranks[0].get("totals", {})
        rows = []
        for rank, read in enumerate(self.ranks):
            first, last = read["batches"][skip - 1], read["batches"][-1]
            steps = len(read["batches"]) - skip
            step, wait, gate, copy, apply = ((b - a) / steps for a, b in zip(first, last, strict=True))
            if (own := totals.get(str(rank))) is not None:
                apply = own["apply_s"] / (own["pushes"] + own["rejected"])
                wait -= apply
            rows.append((step, step - gate - copy - wait - apply, gate, copy, wait, apply))
        names = ("step_s", "compute_s", "gate_s", "copy_s", "wait_s", "apply_s")
        return {name: sum(column) / len(rows) for name, column in zip(names, zip(*rows, strict=True), strict=True)}

    @property
    def idle_fraction(self) -> float:
        """Share of their time that ranks wait for others or for the server, from first to last batch."""
        waited = sum(read["batches"][-1][1] for read in self.ranks)
        return float(waited / sum(read["batches"][-1][0] - read["start_s"] for read in self.ranks))


def run_fits(
    workload: Mapping[str, Any],
    fits: Sequence[Mapping[str, Any]],
    *,
    ranks: int,
    frees_memory: bool = False,
    timeout_s: float = 900.0,
) -> list[Fit]:
    """Run fits one after another, all in the same processes.

    Args:
        workload: see :func:`lightning_g2.cli.bench.workload.build`.
        fits: see :func:`lightning_g2.cli.bench.ranks.run_fit`.
        ranks: number of processes.
        frees_memory: whether processes give memory back to the kernel as soon as they do by default.
        timeout_s: limit of all of it, seconds.

    Returns:
        One for each of ``fits``, in their order.

    Raises:
        G2Error: a process failed.
    """
    plan: dict[str, Any] = {"workload": dict(workload), "ranks": ranks, "fits": [dict(fit) for fit in fits]}
    environment = {name: value for name, value in os.environ.items() if name not in _INHERITED}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment |= {} if frees_memory else _KEPT_BY_MALLOC
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        path = Path(folder, "plan.json")
        path.write_text(json.dumps(plan), encoding="utf-8")
        command = [sys.executable, "-m", "lightning_g2.cli.bench.ranks", str(path), folder]
        code = _ended(subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        ), timeout_s)  # fmt: skip
        if code != 0:
            output.seek(0)
            tail = "\n".join(output.read().decode(errors="replace").splitlines()[-25:])
            raise G2Error(f"the benchmark's processes ended with exit code {code}; their last lines:\n{tail}")
        read = [json.loads(Path(folder, f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    return [
        Fit({"workload": dict(workload), "ranks": ranks, **fit}, [entries[i] for entries in read])
        for i, fit in enumerate(plan["fits"])
    ]


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Exit code; whatever happens here, no rank is left behind."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise G2Error(f"the benchmark's processes ran past {timeout_s:.0f} s and were ended") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
