"""Lightning comes under two names, ``lightning.pytorch`` and ``pytorch_lightning``, with classes of their own each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_LIGHTNING = "lightning.pytorch"
_OTHER = "pytorch_lightning"
_STANDS_FOR = {_OTHER: _LIGHTNING, "lightning_fabric": "lightning.fabric"}


@contextmanager
def users_namespace() -> Iterator[None]:
    """Let what is imported within get Lightning's classes from the name that the user has imported Lightning by.

    Where that is ``pytorch_lightning`` alone, its modules answer to ``lightning`` for the moment; nothing of that is
    left afterwards, and ``lightning`` itself can still be imported. In all other cases nothing is changed.
    """
    if _OTHER not in sys.modules or _LIGHTNING in sys.modules:
        yield
        return
    package = ModuleType("lightning")
    aliases: dict[str, ModuleType] = {}
    for name, module in list(sys.modules.items()):
        root, dot, rest = name.partition(".")
        if root in _STANDS_FOR:
            aliases[_STANDS_FOR[root] + dot + rest] = module
            if not dot:
                setattr(package, _STANDS_FOR[root].rpartition(".")[2], module)
    aliases["lightning"] = package
    before = {name: sys.modules[name] for name in aliases if name in sys.modules}
    sys.modules.update(aliases)
    try:
        yield
    finally:
        for name in aliases:
            del sys.modules[name]
        sys.modules.update(before)


def left_out() -> ModuleType | None:
    """``pytorch_lightning``, where it was imported beside ``lightning.pytorch`` and so is not what is trained with."""
    return sys.modules.get(_OTHER) if _LIGHTNING in sys.modules else None
