"""What the user's own code changes in a rank's weights between two loads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor


class LoadedWeights:
    """Remembers what a rank's parameters were loaded with, and finds those that have been changed since.

    Under the optimizer's hand nothing changes on a rank: it is the server that steps. What differs from the weights
    that came is the work of the user's code or of a callback (weights that are clipped, reset, averaged, re-drawn), and
    the next load would undo it.

    Args:
        keep: keep copies; otherwise the buffer that the weights arrived in stands for them until :meth:`forget`.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def remember(self, parameters: Sequence[Tensor | None], arrived: Sequence[Tensor]) -> None:
        """The parameters now hold what has arrived.

        Args:
            parameters: the rank's parameters; None where it does not have one of the server's.
            arrived: one CPU tensor for each, of its shape.
        """
        self._pairs = {}
        self.renew({i: p for i, p in enumerate(parameters) if p is not None}, arrived)

    def renew(self, parameters: Mapping[int, Tensor], arrived: Sequence[Tensor]) -> None:
        """Some parameters now hold what has arrived.

        Args:
            parameters: by index.
            arrived: of all parameters, as above.
        """
        for i, p in parameters.items():
            own = not self._keep and _alike(arrived[i], p)
            self._pairs[i] = (p, arrived[i] if own else p.detach().clone())

    def forget(self) -> None:
        """The buffer is about to be written anew: until the next load nothing can be said."""
        if not self._keep:
            self._pairs = {}

    def changed(self, among: Collection[int] | None = None) -> tuple[int, ...]:
        """Indices of the parameters that differ from what they were loaded with.

        Args:
            among: indices to look at; None: all.
        """
        pairs = self._pairs if among is None else {i: self._pairs[i] for i in among if i in self._pairs}
        if all(p.device.type == "cpu" for p, _ in pairs.values()):
            differs = [not _same(p, loaded) for p, loaded in pairs.values()]
        else:  # one wait for the device, not one for each parameter
            flags = [(p != loaded).any() for p, loaded in pairs.values()]
            differs = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
        return tuple(i for i, different in zip(pairs, differs, strict=True) if different)

    def now(self, indices: Sequence[int]) -> list[Tensor]:
        """What the given parameters hold."""
        return [self._pairs[i][0].detach() for i in indices]

    def before(self, indices: Sequence[int]) -> list[Tensor]:
        """What the given parameters were loaded with."""
        return [self._pairs[i][1] for i in indices]

    def accept(self, indices: Sequence[int]) -> None:
        """The server knows the given parameters' present values."""
        for i in indices:
            parameter = self._pairs[i][0]
            self._pairs[i] = (parameter, parameter.detach().clone())  # never into the buffer: it may be the server's


def _alike(arrived: Tensor, parameter: Tensor) -> bool:
    return arrived.device == parameter.device and arrived.dtype == parameter.dtype


def _same(parameter: Tensor, loaded: Tensor) -> bool:
    """Whether two tensors on the CPU are equal; their bits are compared first, in half the time of their values."""
    one, other = _words(parameter), _words(loaded)
    if one is not None and other is not None and torch.equal(one, other):
        return True
    return torch.equal(parameter, loaded)  # zeros of either sign are equal


def _words(tensor: Tensor) -> Tensor | None:
    """A contiguous tensor's memory in words of eight bytes, where it divides into them."""
    if not tensor.is_contiguous() or tensor.nbytes % 8:
        return None
    return tensor.detach().view(-1).view(torch.int64)
