"""Handing weights out while other ranks push: tensor by tensor, each whole, without holding the server up."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lightning_g2.server import ServerState


def copy_by_tensor(
    state: ServerState, lock: AbstractContextManager[object], into: Tensor | None = None
) -> tuple[int, Tensor]:
    """Copy the weights, holding the server's lock for one tensor at a time.

    Other ranks' pushes may be applied in between: each tensor is of one version, the tensors of several.

    Args:
        state: the server.
        lock: what guards it; not held by the caller.
        into: takes what fits; None makes a buffer.

    Returns:
        The version at the beginning, which every tensor has reached, and the buffer.
    """
    with lock:
        version, spans = state.version, state.layout.spans()
        buffer = torch.empty(state.size_bytes, dtype=torch.uint8) if into is None else into
    for start, stop in spans:
        if stop > buffer.numel():  # parameters that this rank does not know yet
            break
        with lock:
            state.copy_span(buffer, start, stop)
    return version, buffer
