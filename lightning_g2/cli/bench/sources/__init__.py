"""The sources' experiments, each with what it must be compared with: ``g2-bench sources EXPERIMENT``."""

from __future__ import annotations

import argparse
import sys

import torch

from lightning_g2.cli.bench.sources import age, compression, gpt, projection, rescue, thaw, workers
from lightning_g2.errors import ConfigurationError

SUMMARY = "the sources' experiments with their controls: what friction tells, and what it is worth"

_EXPERIMENTS = {
    "workers": (workers, ("A",)),
    "gpt": (gpt, ("B",)),
    "projection": (projection, ()),
    "thaw": (thaw, ()),
    "rescue": (rescue, ()),
    "compression": (compression, ()),
    "age": (age, ("topology",)),
}
"""Each module offers SUMMARY, ``add_arguments(parser)`` and ``run(args) -> None``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the experiments.

    Args:
        parser: of the subcommand.
    """
    experiments = parser.add_subparsers(dest="experiment", required=True)
    for name, (module, aliases) in _EXPERIMENTS.items():
        command = experiments.add_parser(name, aliases=aliases, help=module.SUMMARY, description=module.SUMMARY)
        module.add_arguments(command)
        command.set_defaults(experiment_run=module.run)


def run(args: argparse.Namespace) -> int:
    """Run one experiment, or go on with it.

    Args:
        args: what :func:`add_arguments` declares.

    Returns:
        Exit code: 0, or 2 for options that make no sense.
    """
    torch.set_num_threads(1)
    try:
        args.experiment_run(args)
    except ConfigurationError as error:
        print(f"g2-bench sources {args.experiment}: {error}", file=sys.stderr)
        return 2
    return 0
