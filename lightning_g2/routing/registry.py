"""Gates by name."""

from __future__ import annotations

import inspect

from lightning_g2.errors import ConfigurationError
from lightning_g2.routing.gate import Gate
from lightning_g2.routing.rules.g2 import G2Gate
from lightning_g2.routing.rules.none import NoneGate

_GATES: dict[str, type[Gate]] = {"none": NoneGate, "g2": G2Gate}


def available_gates() -> tuple[str, ...]:
    """Names that :func:`build_gate` knows, sorted."""
    return tuple(sorted(_GATES))


def register_gate(name: str, gate: type[Gate]) -> None:
    """Make a gate known by name, also one from outside this package.

    Args:
        name: not taken yet.
        gate: its class; every option a keyword of its constructor.

    Raises:
        ConfigurationError: the name is taken.
    """
    if name in _GATES:
        raise ConfigurationError(f"name={name!r}: must not be registered yet; choose another name")
    _GATES[name] = gate


def build_gate(name: str, **options: object) -> Gate:
    """Build a gate from its name and options.

    Args:
        name: one of :func:`available_gates`.
        **options: keywords of the gate's constructor.

    Returns:
        A new gate, for one rank.

    Raises:
        ConfigurationError: the name or an option is unknown, or a value is out of range.
    """
    if name not in _GATES:
        raise ConfigurationError(f"gate={name!r}: must be one of {', '.join(available_gates())}; choose one of them")
    gate = _GATES[name]
    known = () if gate.__init__ is object.__init__ else tuple(inspect.signature(gate).parameters)
    for option in options:
        if option not in known:
            rule = f"be one of {', '.join(known)}" if known else "be left out, as the gate has no options"
            raise ConfigurationError(f"{option}={options[option]!r}: an option of gate {name!r} must {rule}; remove it")
    try:
        return gate(**options)
    except TypeError as error:
        raise ConfigurationError(f"options={options!r}: must have the documented types; {error}") from error
