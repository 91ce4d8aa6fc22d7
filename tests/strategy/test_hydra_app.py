"""A user's own Hydra app: every rank of a job has rank 0's configuration and folder, and no rank runs the sweep."""

import json
from collections.abc import Callable
from pathlib import Path

from omegaconf import OmegaConf

VALUES = (
    "+lr=0.1", "+seed=0", "+follows=${seed}", "+stamp=${now:%Y_%S_%f}", "+where=${hydra:runtime.output_dir}",
    "+number=${hydra:job.name}-${hydra:job.num}", "hydra.job.chdir=true",
)  # fmt: skip


def test_a_sweep_in_awkward_folders(run_job: Callable, tmp_path: Path) -> None:
    folders = '"a b/c=d ${now:%f}"'
    job = run_job("hydra_app.py", "-m", *VALUES, "seed=1,2", f"hydra.sweep.dir={folders}")
    assert job.code == 0, job.output
    (sweep,) = (tmp_path / "a b").iterdir()
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "multirun.yaml"]
    for number in range(2):
        folder = sweep / str(number)
        notes = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
        assert notes[0] == notes[1]
        note = notes[0]
        assert note["ranks"] == 2
        assert (note["cfg"]["seed"], note["cfg"]["follows"], note["raw"]) == (number + 1, number + 1, "${seed}")
        assert note["cfg"]["number"] == f"hydra_app-{number}"
        assert {note["cwd"], note["folder"], note["cfg"]["where"]} == {str(folder)}
        assert note["called_from"] == str(tmp_path)
        hparams = OmegaConf.load(folder / "hparams.yaml")
        assert {**hparams.cfg, "stamp": ""} == {**note["cfg"], "stamp": ""}
        assert not str(hparams.cfg.stamp).startswith("$")
    assert "Experimental" not in job.output
    assert job.left == ()
