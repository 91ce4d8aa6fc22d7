"""Settings of torch that each thread has for itself, taken along from the thread that submits a batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ambient:
    """Gradient mode, autocast, default device and current accelerator of a thread.

    Anomaly detection, the default dtype and the random generators belong to the process: there is nothing to take
    along. With one forward thread they are drawn from in the order of plain training; with more, in the order in which
    the threads come.

    Attributes:
        grad: gradient mode.
        autocast: of each device type: enabled, dtype.
        autocast_cache: whether autocast keeps casts of weights.
        default_device: where new tensors are made.
        accelerator: index of the current accelerator; None without one.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device
    accelerator: int | None

    @classmethod
    def here(cls) -> Ambient:
        """That of the calling thread."""
        kinds = ["cpu"]
        accelerator = None
        if torch.accelerator.is_available():
            kinds.append(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]
            accelerator = torch.accelerator.current_device_index()
        autocast = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
        cache, device = torch.is_autocast_cache_enabled(), torch.get_default_device()
        return cls(torch.is_grad_enabled(), autocast, cache, device, accelerator)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have these settings in the calling thread for a while."""
        with ExitStack() as stack:
            if self.accelerator is not None:
                torch.accelerator.set_device_index(self.accelerator)
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            for kind, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache)
                    )
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield


def free_threaded() -> bool:
    """Whether this Python runs threads without a global lock; others share it between torch's operations."""
    return not getattr(sys, "_is_gil_enabled", lambda: True)()
