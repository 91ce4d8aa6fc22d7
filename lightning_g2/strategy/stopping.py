"""How a job that ends early says so: the log, the text of an error, and the stop that another rank was asked for."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_g2.errors import PeerStoppedError

# A child of Lightning's logger, under whichever name the user has Lightning, so that it appears where Lightning's do.
log = logging.getLogger(f"{Callback.__module__.removesuffix('.callbacks.callback')}.g2async")


@contextmanager
def stopping(trainer: Trainer) -> Iterator[None]:
    """Where another rank was told to stop, stop as Lightning does when the signal comes to this process.

    Args:
        trainer: of this rank.

    Raises:
        SIGTERMException: another rank was told to stop.
    """
    try:
        yield
    except PeerStoppedError as stop:
        log.info(str(stop))
        trainer._signal_connector.received_sigterm = True
        raise SIGTERMException from stop


def describe(exception: BaseException) -> str:
    """An error and its traceback, for the other ranks.

    Args:
        exception: of this rank.
    """
    text = "".join(traceback.format_exception(exception))
    return f"{type(exception).__name__}: {exception}\n{text}"
