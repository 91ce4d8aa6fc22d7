"""Small modules that the scripts train, and the data for them."""

import copy

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


def dataset(size: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def loader(size: int = 48, batch_size: int = 4) -> DataLoader:
    return DataLoader(dataset(size), batch_size=batch_size)


def state(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


class Net(pl.LightningModule):
    def __init__(self, norm: bool = True, lr: float = 0.05, optimizer: str = "sgd") -> None:
        super().__init__()
        self.lr, self.optimizer, self.batch_size, self.losses = lr, optimizer, 4, []
        middle = torch.nn.BatchNorm1d(8) if norm else torch.nn.Tanh()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), middle, torch.nn.Linear(8, 1))

    def loss(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(float(loss))
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("v", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        if self.optimizer == "adam":
            return torch.optim.AdamW(self.parameters(), lr=self.lr)
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Clipped(Net):
    """A critic with clipped weights, and a target network that follows it inside the same optimizer."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.target = copy.deepcopy(self.net)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for parameter in self.net.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        for behind, ahead in zip(self.target.parameters(), self.net.parameters(), strict=True):
            behind.data.mul_(0.9).add_(ahead.data, alpha=0.1)


class Adversaries(pl.LightningModule):
    """Two optimizers, stepped by hand; notes which parameters a step of either has moved."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.critic = Net(norm=False).net, torch.nn.Linear(1, 1)
        self.moved: dict[str, list[str]] = {}

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for name, optimizer, sign in (("critic", second, -1.0), ("net", first, 1.0)):
            before = state(self)
            self.toggle_optimizer(optimizer)
            self.manual_backward(sign * self.critic(self.net(batch[0])).tanh().mean())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            moved = {key.split(".")[0] for key, value in state(self).items() if not torch.equal(value, before[key])}
            self.moved[name] = sorted(moved | set(self.moved.get(name, [])))

    def configure_optimizers(self):
        optimizers = torch.optim.SGD, torch.optim.Adam
        return [cls(p.parameters(), lr=0.02) for cls, p in zip(optimizers, (self.net, self.critic), strict=True)]


class Overrides(Net):
    """Builds itself late, and does by its own hand what Lightning would do."""

    def __init__(self) -> None:
        super().__init__(optimizer="adam")
        self.calls: dict[str, int] = {}
        self.net = None

    def count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def configure_model(self):
        if self.net is None:
            self.net = Net().net

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "epoch"}]

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.count("clip")
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.count("step")
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] / (1 + epoch)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.count("zero_grad")
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler, metric):
        self.count("schedule")
        scheduler.step()


class Silent(Net):
    """Logs nothing: what a module logs within its own compiled step, torch cannot trace."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class Sized(Net):
    """Too large a batch runs out of memory: on one rank, sooner than on the other."""

    def __init__(self) -> None:
        super().__init__(norm=False, optimizer="adam")
        self.sizes = []

    def train_dataloader(self):
        return loader(256, self.batch_size)

    def val_dataloader(self):
        return loader(16, 4)

    def training_step(self, batch, batch_idx):
        if not self.sizes or self.sizes[-1] != len(batch[0]):
            self.sizes.append(len(batch[0]))
        if len(batch[0]) > (16 if self.global_rank == 0 else 8):
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
