"""Gates by name."""

from __future__ import annotations

import inspect

from lightning_g2.errors import ConfigurationError
from lightning_g2.routing.gate import Gate
from lightning_g2.routing.rules.concurrency import ConcurrencyGate
from lightning_g2.routing.rules.cosine import CosineGate
from lightning_g2.routing.rules.dana import DanaGate
from lightning_g2.routing.rules.dc import DelayCompensationGate
from lightning_g2.routing.rules.drop import DropGate
from lightning_g2.routing.rules.g2 import G2Gate
from lightning_g2.routing.rules.g2_energy_only import EnergyOnlyGate
from lightning_g2.routing.rules.g2_random_subspace import RandomSubspaceGate
from lightning_g2.routing.rules.g2_shuffled import ShuffledGate
from lightning_g2.routing.rules.g2_spectral import SpectralGate
from lightning_g2.routing.rules.inverse import InverseGate
from lightning_g2.routing.rules.none import NoneGate
from lightning_g2.routing.rules.polynomial import PolynomialGate
from lightning_g2.routing.rules.predict import PredictGate
from lightning_g2.routing.rules.ssp import StaleSynchronousGate
from lightning_g2.routing.rules.zeno import ZenoGate

_GATES: dict[str, type[Gate]] = {
    "none": NoneGate,
    "g2": G2Gate,
    "g2_energy_only": EnergyOnlyGate,
    "g2_random_subspace": RandomSubspaceGate,
    "g2_shuffled": ShuffledGate,
    "g2_spectral": SpectralGate,
    "concurrency": ConcurrencyGate,
    "cosine": CosineGate,
    "dana": DanaGate,
    "dc": DelayCompensationGate,
    "drop": DropGate,
    "inverse": InverseGate,
    "polynomial": PolynomialGate,
    "predict": PredictGate,
    "ssp": StaleSynchronousGate,
    "zeno": ZenoGate,
}


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
    known = _options(gate)
    for option in options:
        if option not in known:
            rule = f"be one of {', '.join(known)}" if known else "be left out, as the gate has no options"
            raise ConfigurationError(f"{option}={options[option]!r}: an option of gate {name!r} must {rule}; remove it")
    try:
        return gate(**options)
    except TypeError as error:
        raise ConfigurationError(f"options={options!r}: must have the documented types; {error}") from error


def build_training_gate(name: str, **options: object) -> Gate:
    """Build a gate for a real run.

    Args:
        name: one of :func:`available_gates`.
        **options: keywords of the gate's constructor.

    Returns:
        A new gate, for one rank.

    Raises:
        ConfigurationError: as :func:`build_gate`, and for a rule that only a simulation can run.
    """
    gate = build_gate(name, **options)
    reason = gate.simulated_only or ("it needs an evaluation" if "evaluate" in gate.needs else "")
    if reason:
        raise ConfigurationError(
            f"gate={name!r}: must be a rule that a real run can follow ({reason}); run it in "
            "lightning_g2.simulate.simulate, or choose another gate"
        )
    return gate


def _options(gate: type[Gate]) -> tuple[str, ...]:
    """Keywords of a gate's constructor; those of its base where it hands them on."""
    for kind in gate.__mro__:
        if "__init__" not in vars(kind):
            continue
        if kind is object:
            return ()
        parameters = inspect.signature(kind).parameters.values()
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            return tuple(p.name for p in parameters)
    return ()
