"""Methods put on instances of Lightning's own objects for a while, and taken away again."""

from __future__ import annotations

from typing import Any


class Patches:
    """Attributes set on instances, which hide what their classes define until they are removed."""

    def __init__(self) -> None:
        self._set: list[tuple[Any, str]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Hide a method of the owner's class; an instance is patched once."""
        setattr(owner, name, value)
        self._set.append((owner, name))

    def remove(self) -> None:
        """Bring everything that was hidden back; any number of calls."""
        while self._set:
            owner, name = self._set.pop()
            vars(owner).pop(name, None)
