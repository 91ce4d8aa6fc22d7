import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_g2 import G2AsyncStrategy, G2RoutingCallback
from lightning_g2.errors import ConfigurationError


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gait": "g2"}, "gait='g2': not an option of g2async; the options of g2async are gate, gate_options"),
        ({"find_unused_parameters": True}, "find_unused_parameters=True: not an option of g2async; parameters without"),
        ({"ddp_comm_hook": print}, "not an option of g2async; there is no all-reduce to hook into"),
        ({"pull": "never"}, "pull='never': must be one of 'fresh', 'prefetch', None"),
        ({"push": "half"}, "push='half': must be one of 'whole', 'layerwise'"),
        ({"bucket_bytes": 0}, "bucket_bytes=0: must be an integer ≥ 1"),
        ({"consistency": "eventual"}, "consistency='eventual': must be one of 'atomic', 'layerwise', None"),
        ({"push": "layerwise", "consistency": "atomic"}, "there is no moment at which every push is whole"),
        ({"push": "layerwise", "aggregate": 2}, "aggregate=2 with push='layerwise'"),
        ({"push": "layerwise", "rounds": 2}, "rounds=2 with push='layerwise'"),
        ({"wire_dtype": "int8"}, "wire_dtype='int8': must be one of 'float32', 'bf16', 'fp16', None"),
        ({"lr_clock": "wall"}, "lr_clock='wall': must be one of 'server', 'local'"),
        ({"transport": "carrier-pigeon"}, "transport='carrier-pigeon': must be one of 'shm', 'rpc', None"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore': must be one of 'reject', 'stop'"),
        ({"master_dtype": "float16"}, "master_dtype='float16': must be one of 'float32', None"),
        ({"servers": 0}, "servers=0: must be an integer ≥ 1, or None for one server on each node"),
        ({"servers": True}, "servers=True: must be an integer"),
        ({"server_device": "mps"}, "server_device='mps': must be 'cpu', 'cuda' or, of several devices, 'cuda:<index>'"),
        ({"local_steps": 0}, "local_steps=0: must be an integer ≥ 1"),
        ({"local_steps": 2.5}, "local_steps=2.5: must be an integer ≥ 1"),
        ({"outer_lr": 0.5, "outer": "nesterov"}, "outer='nesterov', outer_lr=0.5 with local_steps=1: the server steps"),
        ({"local_steps": 4, "outer": "adam"}, "outer='adam': must be one of 'nesterov', 'delayed_nesterov', None"),
        ({"local_steps": 4, "outer_lr": 0}, "outer_lr=0: must be a number > 0"),
        ({"local_steps": 4, "outer_momentum": 1.0}, "outer_momentum=1.0: must be a number ≥ 0 and < 1"),
        ({"local_steps": 4, "outer_delay": 0}, "outer_delay=0: must be an integer ≥ 1"),
        ({"local_steps": 4, "outer": "nesterov", "outer_delay": 2}, "outer_delay=2 with outer='nesterov'"),
        ({"local_steps": 4, "pull": "prefetch"}, "pull='prefetch' with local_steps=4"),
        ({"local_steps": 4, "push": "layerwise"}, "push='layerwise' with local_steps=4"),
        ({"local_steps": 4, "aggregate": 2}, "aggregate=2 with local_steps=4: the outer step gathers"),
        ({"local_steps": 4, "rounds": 1}, "rounds=1 with local_steps=4: the outer step gathers"),
        ({"local_steps": 4, "master_dtype": "float32"}, "master_dtype='float32' with local_steps=4"),
        ({"server_threads": 0}, "server_threads=0: must be an integer ≥ 1"),
        ({"timeout_s": -1}, "timeout_s=-1: must be a number of seconds > 0"),
        ({"aggregate": 0}, "aggregate=0: must be an integer ≥ 1 and at most the number of ranks"),
        ({"aggregate": 2.0}, "aggregate=2.0: must be an integer ≥ 1"),
        ({"rounds": True}, "rounds=True: must be an integer ≥ 1"),
        ({"rounds": "some"}, "rounds='some': must be an integer ≥ 1 and at most the number of ranks, or auto"),
        ({"rounds": "auto", "local_steps": 4}, "rounds='auto' with local_steps=4: the outer step gathers"),
        ({"rounds": "auto", "push": "layerwise"}, "rounds='auto' with push='layerwise'"),
        ({"staleness_cost": 1.0}, "staleness_cost=1.0 with rounds=None: only rounds='auto' weighs it"),
        ({"staleness_cost": -1.0, "rounds": "auto"}, "staleness_cost=-1.0: must be a number ≥ 0"),
        ({"buffer_weights": "age", "aggregate": 2}, "buffer_weights='age': must be one of equal, fedbuff"),
        ({"buffer_weights": "fedbuff"}, "buffer_weights='fedbuff': must be 'equal' beside aggregate=1"),
        ({"delayed_nesterov": True}, "delayed_nesterov=True: must be False beside aggregate=1"),
        ({"delayed_nesterov": 1.5, "aggregate": 2}, "delayed_nesterov=1.5: must be one of True, False"),
        (
            {"delayed_nesterov": True, "aggregate": 2, "rounds": "auto"},
            "delayed_nesterov=True: must be False beside rounds",
        ),
        ({"aggregate": 2, "rounds": 2}, "aggregate=2 beside rounds=2: pushes are gathered either in buffers"),
        ({"late": "keep"}, "late='keep': must be one of 'drop', 'gate'"),
        ({"late": "gate"}, "late='gate' without rounds: no push is late"),
        ({"gate": "g3"}, "gate='g3': must be one of"),
        ({"gate": "g2", "gate_options": {"beta": -1.0}}, "beta=-1.0: must be ≥ 0"),
        ({"gate_options": {"beta": 1.0}}, "without gate: name the gate"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(options: dict, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        G2AsyncStrategy(**options)


@pytest.mark.parametrize("name", ["aggregate", "rounds"])
def test_more_pushes_a_version_than_ranks_are_refused_with_both_numbers(name: str) -> None:
    strategy = G2AsyncStrategy(**{name: 3})
    with pytest.raises(ConfigurationError, match=f"{name}=3: must be at most the number of ranks, which is 2"):
        pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ""),
        ({"aggregate": 2}, ", 2 pushes a version"),
        ({"rounds": 2}, ", rounds of 2, late pushes dropped"),
        ({"rounds": 1, "late": "gate"}, ", rounds of 1, late pushes gated"),
        ({"rounds": "auto"}, ", or rounds as times of arrival say, late pushes dropped"),
        ({"aggregate": 2, "buffer_weights": "fedbuff"}, ", 2 pushes a version, weighted by 1/√(1+τ)"),
        ({"aggregate": 4, "delayed_nesterov": True}, ", momentum delayed over 4 pushes"),
    ],
)
def test_the_start_line_says_how_many_pushes_make_a_version(options: dict, said: str) -> None:
    assert G2AsyncStrategy(**options).options.describe_aggregation() == said


class _Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "nodes", "match"),
    [
        ({"transport": "shm"}, 2, "transport='shm' with num_nodes=2: hosts share no memory; leave the option out"),
        ({"rounds": 2, "servers": 2}, 1, "rounds=2 with servers=2: each server would end its rounds by itself"),
        ({"rounds": "auto", "servers": 2}, 1, "rounds='auto' with servers=2: each server would end its rounds"),
        ({"rounds": 1}, 2, "rounds=1 with servers=2: each server would end its rounds by itself"),
        ({"server_device": "cuda:99"}, 1, "server_device='cuda:99': this host has [0-9]+ CUDA devices"),
    ],
)
def test_servers_that_the_hosts_cannot_have_are_refused(options: dict, nodes: int, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        pl.Trainer(strategy=G2AsyncStrategy(**options), accelerator="cpu", devices=1, num_nodes=nodes, logger=False)


def test_two_gates_for_one_push_are_refused() -> None:
    trainer = pl.Trainer(
        strategy=G2AsyncStrategy(gate="none"), accelerator="cpu", devices=1, logger=False, max_epochs=1,
        enable_checkpointing=False, enable_progress_bar=False, callbacks=[G2RoutingCallback("g2")],
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="two gates for one push"):
        trainer.fit(_Net(), DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2))
