"""The weights of a server: one flat buffer as ranks see them, and float32 masters of half-precision ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_g2.errors import ProtocolError
from lightning_g2.server.layout import ParameterLayout, ParameterSpec

_HALF = (torch.float16, torch.bfloat16)


class MasterWeights:
    """Parameters that optimizers step, over one flat buffer.

    With ``master_dtype`` half-precision parameters are stepped in that dtype, and the buffer holds them rounded.

    Args:
        layout: the parameters.
        weights: their values, one flat buffer of the layout; copied.
        device: where they are kept and stepped.
        master_dtype: dtype in which half-precision parameters are kept; None keeps them as they are.
        masters: masters by index, of an earlier training; one that does not round to its weight is outdated and
            not used.

    Attributes:
        layout: the parameters; grows when some are adopted.
        buffer: the weights as ranks see them.
        parameters: what the optimizers step; grows in place.
    """

    def __init__(
        self,
        layout: ParameterLayout,
        weights: Tensor,
        *,
        device: torch.device | None = None,
        master_dtype: torch.dtype | None = None,
        masters: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.layout = layout
        self.buffer = weights.to(device or weights.device, copy=True)
        self.parameters: list[torch.nn.Parameter] = []
        self._master_dtype = master_dtype
        self._masters: dict[int, torch.nn.Parameter] = {}
        views = layout.views(weights)
        self._append({i: m for i, m in (masters or {}).items() if torch.equal(m.to(views[i].dtype), views[i])})

    def adopt(self, layout: ParameterLayout, values: Tensor) -> ParameterLayout:
        """Take more parameters over; those that are here already keep their values.

        Args:
            layout: the parameters.
            values: their values, one flat buffer of that layout.

        Returns:
            All parameters that are here.

        Raises:
            ProtocolError: a parameter is here with another shape or dtype.
        """
        here = {spec.name: spec for spec in self.layout.specs}
        fresh: list[tuple[ParameterSpec, Tensor]] = []
        for spec, value in zip(layout.specs, layout.views(values), strict=True):
            if (known := here.get(spec.name)) is None:
                fresh.append((spec, value))
            elif not known.agrees_with(spec):
                raise ProtocolError(
                    f"parameter {spec.name!r}: shape {spec.shape} {spec.dtype} pushed, the server has {known.shape} "
                    f"{known.dtype}; ranks disagree on the model"
                )
        if fresh:
            size = self.buffer.numel()
            self.layout = self.layout.with_more(spec for spec, _ in fresh)
            buffer = self.layout.allocate().to(self.buffer.device)
            buffer[:size] = self.buffer
            self.buffer = buffer
            views = self.layout.views(buffer)
            for index, parameter in enumerate(self.parameters):
                if index not in self._masters:
                    parameter.data = views[index]
            for view, (_, value) in zip(views[len(self.parameters) :], fresh, strict=True):
                view.copy_(value)
            self._append({})
        return self.layout

    def publish(self, indices: Iterable[int] | None = None) -> None:
        """Round masters (all by default) into the buffer."""
        moved = [i for i in (self._masters if indices is None else indices) if i in self._masters]
        if moved:
            views = self.layout.views(self.buffer)
            torch._foreach_copy_([views[i] for i in moved], [self._masters[i].detach() for i in moved])

    def masters(self) -> dict[int, Tensor]:
        """Copies of the masters by index."""
        return {index: master.detach().clone() for index, master in self._masters.items()}

    def _append(self, masters: Mapping[int, Tensor]) -> None:
        for index, view in enumerate(self.layout.views(self.buffer)):
            if index < len(self.parameters):
                continue
            value = view
            if self._master_dtype is not None and view.dtype in _HALF:
                value = view.to(self._master_dtype)
                if (earlier := masters.get(index)) is not None:
                    value = earlier.to(view.device, self._master_dtype, copy=True)
            trains = value.is_floating_point() or value.is_complex()
            parameter = torch.nn.Parameter(value, requires_grad=trains)
            if value is not view:
                self._masters[index] = parameter
            self.parameters.append(parameter)
