"""Options of forward and backward threads beside those of ranks and servers: what goes together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_g2.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_g2.strategy.options import G2AsyncOptions

_OF_THREADS = {
    "max_graphs": None, "weights": "current", "update": "layer", "clip_scope": "global", "correction": "none",
    "correction_steps": 1000,
}  # fmt: skip


def check_threads(options: G2AsyncOptions) -> None:
    """Check the options of threads.

    Raises:
        ConfigurationError: one is out of range, or contradicts another.
    """
    if not options.threaded:
        given = [name for name, default in _OF_THREADS.items() if getattr(options, name) != default]
        if given:
            raise ConfigurationError(
                f"{', '.join(f'{name}={getattr(options, name)!r}' for name in given)} without threads: give "
                "forward_threads or backward_threads, too"
            )
        return
    options.threads()
    unit = f"update={options.update!r}"
    contradictions = {
        "local_steps": (options.local_steps > 1, "a rank's own steps and threads both reorder updates"),
        "aggregate": (options.aggregate != 1, "each layer is applied as its gradient comes, not as one of several"),
        "rounds": (options.rounds is not None, "threads do not wait for other ranks"),
        "on_sigterm": (options.on_sigterm == "leave", "a rank that leaves would have several windows under way"),
        "record": (options.record is not None, "a trace holds whole gradients, one after the other"),
        "pull": (options.pull == "prefetch", "threads compute while others wait for the server"),
        "push": (options.push == "layerwise" and options.update == "block", f"{unit} pushes the whole at once"),
        "consistency": (
            options.consistency == "atomic" and options.update == "layer", f"{unit} has no moment at which all is whole"
        ),
        "correction": (
            options.correction == "pipemare" and options.update == "block" and options.servers != 0,
            f"one push has one rate a group, with {unit} layers have rates of their own",
        ),
    }  # fmt: skip
    for name, (contradicts, reason) in contradictions.items():
        if contradicts:
            raise ConfigurationError(
                f"{name}={getattr(options, name)!r} with forward and backward threads: {reason}; leave {name} out"
            )
    if options.servers == 0:
        for name in ("transport", "wire_dtype", "master_dtype"):
            if getattr(options, name) is not None:
                raise ConfigurationError(
                    f"{name}={getattr(options, name)!r} with servers=0: there is no server; leave one of them out"
                )
