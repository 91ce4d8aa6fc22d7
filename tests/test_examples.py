from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
ARGUMENTS = {
    "fashion_mnist_resnet18": ["--smoke", "--path", "{fashion_mnist_folder}"],
    "five_lines": [],
    "from_ddp": ["--smoke"],
    "gan": ["--smoke"],
    "lightning_cli": ["fit", "--trainer.max_epochs=1", "--model.width=4"],
    "lora": ["--smoke"],
    "wordnet_lstm": ["--smoke", "--path", "{wordnet_folder}"],
}
"""Short runs; data that a fresh machine lacks are replaced by files of the same format that the test makes."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, run_job: Callable, request: pytest.FixtureRequest) -> None:
    arguments = [
        str(request.getfixturevalue(word[1:-1])) if word.startswith("{") else word for word in ARGUMENTS[path.stem]
    ]
    job = run_job(path, *arguments)
    assert job.code == 0, job.output
    losses = [float(value) for value in re.findall(r"^.*val_loss (\S+)", job.output, flags=re.MULTILINE)]
    assert losses, job.output
    assert all(0.0 < loss < 100.0 for loss in losses)
    assert "Traceback" not in job.output
    assert job.left == ()
