"""The recipes of examples/launch, run as far as one machine goes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.namespaces import two_hosts
from tests.strategy.test_launchers import free_port

RECIPES = ROOT / "examples" / "launch"

SRUN = """\
#!/usr/bin/env bash
# Stands in for srun on one host: starts each task with what SLURM would tell it.
pids=()
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
  SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 "$@" & pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""


def _path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def _check(output: str, ranks: int) -> None:
    (found,) = re.findall(rf"^{ranks} ranks, val_loss (\S+)$", output, flags=re.MULTILINE)
    assert 0.0 < float(found) < 1.0, output


def _shell(run_job: Callable, recipe: str, folder: Path, *words: str, env: dict[str, str]) -> str:
    """Run a recipe by bash, as its head says, in a folder that it may take for the one of its program."""
    start = folder / "start.py"
    start.write_text("import os, sys\nos.execvp('bash', ['bash', *sys.argv[1:]])\n")
    job = run_job(start, RECIPES / recipe, *words, env={"PATH": _path(), **env})
    assert job.code == 0, job.output
    assert job.left == ()
    return job.output


def test_torchrun_on_one_host(run_job: Callable, tmp_path: Path) -> None:
    _check(_shell(run_job, "torchrun.sh", tmp_path, "--epochs=1", env={}), 2)


def test_the_slurm_script(run_job: Callable, tmp_path: Path) -> None:
    """The tasks of one of its hosts, with a stand-in for srun."""
    text = (RECIPES / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, flags=re.MULTILINE))
    assert {"nodes", "ntasks-per-node", "signal"} <= set(asked)
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    ranks = asked["ntasks-per-node"]
    env = {
        "PATH": f"{srun.parent}{os.pathsep}{_path()}", "SLURM_SUBMIT_DIR": str(RECIPES), "SLURM_NNODES": "1",
        "SLURM_JOB_ID": f"1{free_port()[-4:]}", "SLURM_JOB_NAME": asked["job-name"], "SLURM_NTASKS": ranks,
        "SLURM_NTASKS_PER_NODE": ranks, "SLURM_NODELIST": "a-host-without-an-address",
    }  # fmt: skip
    _check(_shell(run_job, "slurm.sbatch", tmp_path, "--epochs=1", env=env), int(ranks))


@pytest.mark.slow
def test_torchrun_on_two_hosts(tmp_path: Path) -> None:
    start = tmp_path / "start.py"
    start.write_text("import os, sys\nos.execvp('bash', ['bash', *sys.argv[1:]])\n")
    with two_hosts(tmp_path) as hosts:
        hosts.launch(str(start), RECIPES / "torchrun.sh", "--epochs=1", env={"NODES": "2", "PATH": _path()})
        nodes = hosts.wait(300.0)
        assert [node.code for node in nodes] == [0, 0], "\n".join(node.output for node in nodes)
        _check(nodes[0].output, 4)
        assert hosts.left() == []


def test_the_kubernetes_manifest_hangs_together() -> None:
    """What an API server would not refuse, but would not work: names, labels and numbers that have to agree."""
    parts = {part["kind"]: part for part in yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())}
    versions = {"Service": "v1", "NetworkPolicy": "networking.k8s.io/v1", "Job": "batch/v1"}
    assert {kind: part["apiVersion"] for kind, part in parts.items()} == versions
    service, policy, job = parts["Service"]["spec"], parts["NetworkPolicy"]["spec"], parts["Job"]["spec"]
    pod = job["template"]["spec"]
    labels = job["template"]["metadata"]["labels"]
    assert service["clusterIP"] == "None", "headless: a name for each pod"
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"] == policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    assert (job["completionMode"], job["backoffLimit"], pod["restartPolicy"]) == ("Indexed", 0, "Never")
    assert pod["subdomain"] == parts["Service"]["metadata"]["name"]
    (container,) = pod["containers"]
    command = container["command"]
    assert job["completions"] == job["parallelism"] == int(command[command.index("--nodes") + 1])
    env = {variable["name"]: variable for variable in container["env"]}
    assert env["MASTER_ADDR"]["value"] == f"{parts['Job']['metadata']['name']}-0.{pod['subdomain']}"
    assert 0 < int(env["MASTER_PORT"]["value"]) < 2**16
    assert all(isinstance(variable.get("value", ""), str) for variable in env.values()), "numbers have to be quoted"
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert env["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"] == index
    assert container["securityContext"]["runAsNonRoot"] is True
