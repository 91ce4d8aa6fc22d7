"""Where the time of a rank's step goes, beside the model's own work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Stopwatch:
    """Seconds since the start of the fit.

    Attributes:
        wait_s: waiting for the server, its own work included.
        gate_s: deciding on pushes.
        copy_s: copying gradients out of, and weights into, the module, and comparing these with what was loaded.
    """

    wait_s: float = 0.0
    gate_s: float = 0.0
    copy_s: float = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The server is asked something."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.wait_s += time.perf_counter() - start

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """The gate is at work."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.gate_s += time.perf_counter() - start

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Gradients or weights are copied, or compared."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.copy_s += time.perf_counter() - start
