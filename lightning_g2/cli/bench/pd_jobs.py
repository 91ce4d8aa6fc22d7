"""What ``g2-bench pd`` trains."""

from __future__ import annotations

import argparse
import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from lightning_g2.cli.bench.pd_workers import Job
from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.digits import DigitsDataModule
from lightning_g2.tasks.gpt import ByteGPT

_INPUTS, _CLASSES, _HELD_OUT = 20, 5, 2000


def build_job(args: argparse.Namespace, seed: int) -> Job:
    """The module, its loss and its batches.

    Args:
        args: what ``g2-bench pd`` declares.
        seed: of weights and data.
    """
    torch.manual_seed(seed)
    if args.compute == "sleep":
        return _classification(args)
    if args.compute == "conv":
        images = [(torch.randn(args.batch, 1, 28, 28), torch.randint(10, (args.batch,))) for _ in range(8)]
        return Job(_conv(), _cross_entropy, _repeated(images, args.batches), args.rate)
    if args.compute == "gpt":
        tokens = [torch.randint(256, (args.batch, 65)) for _ in range(8)]
        model = ByteGPT(width=128, layers=4, heads=4, block_size=64)
        return Job(model, lambda module, batch: module.loss(batch), _repeated(tokens, args.batches), args.rate)
    if args.compute == "digits":
        return _digits(args)
    raise ConfigurationError(f"compute={args.compute!r}: must be 'sleep', 'conv', 'digits' or 'gpt'")


def _repeated(data: list[Any], count: int) -> list[Any]:
    return [data[number % len(data)] for number in range(count)]


def _cross_entropy(module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip


def _digits(args: argparse.Namespace) -> Job:
    """Handwritten digits and a conv net with batch normalisation: real compute and real accuracy."""
    data = DigitsDataModule(batch_size=args.batch)
    epochs = itertools.chain.from_iterable(iter(data.train_dataloader()) for _ in itertools.count())
    images, classes = next(iter(data.val_dataloader()))
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip

    def score(module: nn.Module) -> float:
        judged = copy.deepcopy(module).eval()  # the module itself goes on training
        with torch.no_grad():
            return float((judged(images).argmax(-1) == classes).float().mean())

    batches = list(itertools.islice(epochs, args.batches))
    return Job(net, _cross_entropy, batches, args.rate, score=score, interval=40)


def _classification(args: argparse.Namespace) -> Job:
    """Points labelled by a random teacher, each seen once; a small network whose compute is slept learns them."""
    teacher = nn.Sequential(nn.Linear(_INPUTS, 32), nn.Tanh(), nn.Linear(32, _CLASSES))
    widths = [_INPUTS, *[32] * (args.layers - 1), _CLASSES]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    with torch.no_grad():
        points = torch.randn(args.batches, args.batch, _INPUTS)
        labels = (3 * teacher(points)).argmax(-1)
        held_out = torch.randn(_HELD_OUT, _INPUTS)
        truth = (3 * teacher(held_out)).argmax(-1)

    def score(module: nn.Module) -> float:
        with torch.no_grad():
            return float((module(held_out).argmax(-1) == truth).float().mean())

    batches = list(zip(points, labels, strict=True))
    return Job(nn.Sequential(*layers[:-1]), _cross_entropy, batches, args.rate, score=score)
