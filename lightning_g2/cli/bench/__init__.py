"""Benchmarks: ``g2-bench <name>``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_g2.cli.bench import gate, memory, pd, routing, scaling, sources, step, stragglers, transport

_BENCHES = {
    "gate": gate,
    "transport": transport,
    "step": step,
    "stragglers": stragglers,
    "scaling": scaling,
    "memory": memory,
    "routing": routing,
    "sources": sources,
    "pd": pd,
}
"""Each module offers SUMMARY, ``add_arguments(parser)`` and ``run(args) -> int``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``g2-bench``.

    Args:
        argv: arguments, without the program's name; the process's own by default.

    Returns:
        Exit code.
    """
    parser = argparse.ArgumentParser(prog="g2-bench", description="Benchmarks of lightning_g2.")
    commands = parser.add_subparsers(dest="bench", required=True)
    for name, module in _BENCHES.items():
        command = commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code
