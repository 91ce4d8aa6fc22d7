"""How long a rank takes for one gradient, from the read of the weights to the arrival of the push."""

from __future__ import annotations

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from lightning_g2.errors import ConfigurationError
from lightning_g2.routing.option import require, require_within


def rank_stream(seed: int, rank: int) -> Random:
    """A rank's own stream of random numbers."""
    return Random(f"{seed}/{rank}")


@dataclass(frozen=True, kw_only=True)
class Delays(ABC):
    """Durations of gradients, in units of one gradient of an ordinary rank.

    A rank draws from a stream of its own, so that when its gradients arrive depends on the seed alone, and not on the
    gate, the optimizer or what other ranks do: runs of one seed can be compared push by push. (Only ranks that a gate
    makes wait begin later.)

    Attributes:
        reads: when blocks are read, see :func:`layered`.
        overhead: units added to each gradient, see :func:`charged`.
    """

    reads: Mapping[str, float] = field(default_factory=dict)
    overhead: float = 0.0

    @abstractmethod
    def sample(self, rank: int, ranks: int, random: Random) -> float:
        """Duration of a rank's next gradient.

        Args:
            rank: the rank.
            ranks: number of ranks.
            random: the rank's own stream.
        """

    def duration(self, rank: int, ranks: int, random: Random) -> float:
        """Duration of a rank's next gradient, what is charged for included; see :meth:`sample`."""
        return self.sample(rank, ranks, random) + self.overhead

    def arrivals(self, *, ranks: int, seed: int, time_limit: float) -> int:
        """Pushes that arrive up to a time, where no rank ever waits.

        Args:
            ranks: number of ranks.
            seed: of the durations.
            time_limit: the time, inclusive.
        """
        count = 0
        for rank in range(ranks):
            random, time = rank_stream(seed, rank), 0.0
            while (time := time + self.duration(rank, ranks, random)) <= time_limit:
                count += 1
        return count


@dataclass(frozen=True, kw_only=True)
class _Uniform(Delays):
    jitter: float

    def sample(self, rank: int, ranks: int, random: Random) -> float:
        return 1.0 + self.jitter * (2.0 * random.random() - 1.0) if self.jitter else 1.0


@dataclass(frozen=True, kw_only=True)
class _Straggler(_Uniform):
    fraction: float
    factor: float

    def sample(self, rank: int, ranks: int, random: Random) -> float:
        slow = rank >= ranks - round(self.fraction * ranks)
        return super().sample(rank, ranks, random) * (self.factor if slow else 1.0)


@dataclass(frozen=True, kw_only=True)
class _Pareto(Delays):
    a: float

    def sample(self, rank: int, ranks: int, random: Random) -> float:
        return random.paretovariate(self.a)


@dataclass(frozen=True, kw_only=True)
class _Speeds(_Uniform):
    durations: tuple[float, ...]

    def sample(self, rank: int, ranks: int, random: Random) -> float:
        place = rank * (len(self.durations) - 1) / max(1, ranks - 1)
        low = min(int(place), len(self.durations) - 1)
        high = min(low + 1, len(self.durations) - 1)
        mean = self.durations[low] + (place - low) * (self.durations[high] - self.durations[low])
        return mean * super().sample(rank, ranks, random)


def uniform(jitter: float = 0.0) -> Delays:
    """All ranks alike: each gradient takes 1 ± ``jitter``, evenly distributed.

    Without jitter N ranks push in turn, and after the first round every push has τ = N - 1 exactly.

    Args:
        jitter: in [0, 1).

    Raises:
        ConfigurationError: out of range.
    """
    _require_jitter(jitter)
    return _Uniform(jitter=jitter)


def straggler(fraction: float = 0.25, factor: float = 10.0, jitter: float = 0.1) -> Delays:
    """The last ``fraction`` of the ranks takes ``factor`` times as long as the others.

    Args:
        fraction: of the ranks, rounded to whole ranks, in [0, 1].
        factor: > 0.
        jitter: see :func:`uniform`.

    Raises:
        ConfigurationError: out of range.
    """
    require_within("fraction", fraction, 0.0, 1.0, "0.25 makes a quarter of the ranks slow")
    require(factor > 0.0 and math.isfinite(factor), "factor", factor, "be > 0", "10 makes them ten times slower")
    _require_jitter(jitter)
    return _Straggler(jitter=jitter, fraction=fraction, factor=factor)


def pareto(a: float) -> Delays:
    """Each gradient of any rank takes a time from a Pareto law: P(d > x) = x^-a for x ≥ 1; mean a/(a-1) for a > 1.

    Args:
        a: > 0; 1.3 has a mean of 4.3 and no variance.

    Raises:
        ConfigurationError: out of range.
    """
    require(a > 0.0 and math.isfinite(a), "a", a, "be > 0", "1.3 is a heavy tail")
    return _Pareto(a=a)


def speeds(durations: Sequence[float], jitter: float = 0.1) -> Delays:
    """Each rank has a speed of its own.

    Args:
        durations: of a gradient of each rank. Where there are not as many as ranks, rank 0 has the first, the last rank
            the last, and those between lie evenly on the line through all of them: ``speeds((1, 4))`` spreads 1 to 4.
        jitter: relative, see :func:`uniform`.

    Raises:
        ConfigurationError: there are none, or one is not > 0.
    """
    values = tuple(float(duration) for duration in durations)
    sound = bool(values) and all(value > 0.0 and math.isfinite(value) for value in values)
    require(sound, "durations", durations, "be numbers > 0", "(1, 4) spreads the ranks between 1 and 4")
    _require_jitter(jitter)
    return _Speeds(jitter=jitter, durations=values)


def layered(delays: Delays, reads: Mapping[str, float]) -> Delays:
    """Blocks have delays of their own, as where tensors are pulled one by one, or passes run in threads.

    A delay of a layer is the time between the read of its weights and the arrival of its gradient. So a block with
    fraction f is read when f of the gradient's duration has passed, and is (1-f) of it old at the arrival; all blocks
    arrive together in one push, whose base version, and so whose staleness, is that of the block read first: at f = 0.

    Args:
        delays: of the whole gradient.
        reads: fraction in [0, 1) by the beginning of the parameter's name; the longest that fits counts; 0 where none.

    Raises:
        ConfigurationError: a fraction is out of range.
    """
    for prefix, fraction in reads.items():
        require(0.0 <= fraction < 1.0, f"reads[{prefix!r}]", fraction, "lie in [0, 1)", "0 reads it at the start")
    return replace(delays, reads=dict(reads))


def charged(delays: Delays, overhead: float) -> Delays:
    """Adds to each gradient what a gate or a transport costs.

    Args:
        delays: of gradients alone.
        overhead: units a gradient, ≥ 0.

    Raises:
        ConfigurationError: out of range.
    """
    require_within("overhead", overhead, 0.0, math.inf, "0 charges nothing")
    return replace(delays, overhead=overhead)


def parse_delays(text: str) -> Delays:
    """Delays as on a command line: ``"uniform"``, ``"straggler(0.25, 10)"``, ``"pareto(1.3)"``, ``"speeds((1, 4))"``.

    Args:
        text: name and arguments of one of this module's functions.

    Raises:
        ConfigurationError: it is none of these.
    """
    known: dict[str, Callable[..., Delays]] = {
        "uniform": uniform,
        "straggler": straggler,
        "pareto": pareto,
        "speeds": speeds,
    }
    name, _, rest = text.strip().partition("(")
    try:
        call = ast.parse(f"{name}({rest}" if rest else f"{name}()", mode="eval").body
        assert isinstance(call, ast.Call)
        given = [ast.literal_eval(argument) for argument in call.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return known[name.strip()](*given, **named)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"delays={text!r}: must be one of {', '.join(known)} with its arguments; write e.g. straggler(0.25, 10)"
        ) from error


def _require_jitter(jitter: float) -> None:
    require(0.0 <= jitter < 1.0, "jitter", jitter, "lie in [0, 1)", "0 makes durations exact")
