"""Shared fixtures: jobs in real processes, and what they may leave behind (nothing)."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tests" / "scripts"


@dataclass(frozen=True)
class Job:
    """A finished job: its exit code, all it printed, how long it took, and the processes it left (by pid)."""

    code: int
    output: str
    seconds: float
    left: tuple[int, ...]


def session_processes(session: str) -> list[int]:
    """Pids of live processes that carry a mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except (OSError, IndexError):
                continue
            if session.encode() in environment and state != "Z" and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def environment_is_given_back() -> Iterator[None]:
    """A Trainer in the test's own process leaves a rank and a port behind, by which the next job would be misled."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def run_job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Job]]:
    """Run a script, of tests/scripts or by its full path, in a process of its own and wait for its end.

    ``program`` is what runs the script, such as ``-m torch.distributed.run``.
    """
    mark = f"G2_TEST_MARK=job-{os.getpid()}-{abs(hash(request.node.nodeid))}"

    def run(
        *arguments: object, timeout_s: float = 360.0, env: dict[str, str] | None = None, program: tuple[str, ...] = ()
    ) -> Job:
        words = [str(a) for a in arguments]
        command = [sys.executable, *program, str(SCRIPTS / words[0]), *words[1:]]
        name, value = mark.split("=")
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", name: value, **(env or {})
        }  # fmt: skip
        for inherited in ("MASTER_PORT", "MASTER_ADDR", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"):
            if env is None or inherited not in env:
                environment.pop(inherited, None)
        start = time.monotonic()
        log = tmp_path / f"job-{time.monotonic_ns()}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path, start_new_session=True
            )
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = -999
        seconds = time.monotonic() - start
        limit = time.monotonic() + 60.0
        while (left := session_processes(mark)) and time.monotonic() < limit:
            time.sleep(0.05)  # ranks that succeed may end a moment after rank 0
        for pid in left:
            os.kill(pid, 9)
        output = log.read_text(errors="replace")
        assert code != -999, f"job hung for {timeout_s} s; its output:\n{output}"
        return Job(code, output, seconds, tuple(left))

    yield run
    for pid in session_processes(mark):
        os.kill(pid, 9)


@pytest.fixture
def fashion_mnist_folder(tmp_path: Path) -> Path:
    """A folder with IDX files in the shape of Fashion-MNIST: 160 + 40 images, a bright stripe for each class."""
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for part, count in (("train", 160), ("t10k", 40)):
        images, classes = bytearray(), bytes(index % 10 for index in range(count))
        for label in classes:
            image = bytearray(28 * 28)
            image[2 * label * 28 : (2 * label + 3) * 28] = bytes([255]) * (3 * 28)
            images += image
        head = b"\0\0\x08\x03" + b"".join(extent.to_bytes(4, "big") for extent in (count, 28, 28))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + count.to_bytes(4, "big") + classes)
    return folder


@pytest.fixture
def wordnet_folder(tmp_path: Path) -> Path:
    """A folder with data files in the format of WordNet: 450 glosses, each with the word that tells its class."""
    folder = tmp_path / "wordnet"
    folder.mkdir()
    classes = {"adj": [0, 1, 44], "adv": [2], "noun": range(3, 29), "verb": range(29, 44)}
    for kind, numbers in classes.items():
        lines = ["  1 This software and database is made by a test.  "]
        lines += [
            f'{offset:08d} {number:02d} {kind[0]} 01 lemma 0 000 | a kind{number} of Thing; "it\'s thing {offset}"  '
            for number in numbers
            for offset in range(10)
        ]
        (folder / f"data.{kind}").write_text("\n".join(lines) + "\n")
    return folder
