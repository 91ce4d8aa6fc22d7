"""Rows on disk, one JSON line each, so that a study that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class KeptRows:
    """Rows by the settings that they were made under.

    Args:
        path: the file; made when there is something to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, Row] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            entry = json.loads(line)
            self._rows[entry["key"]] = entry["record"]

    def known(self, settings: Mapping[str, Any]) -> Row | None:
        """The row that was made under these settings; None for new ones."""
        return self._rows.get(_key(settings))

    def add(self, settings: Mapping[str, Any], row: Row) -> None:
        """Write a row down."""
        key = _key(settings)
        self._rows[key] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "record": row}) + "\n")

    def get(self, settings: Mapping[str, Any], make: Callable[[], Row]) -> Row:
        """The row of these settings, made if it is not known.

        Args:
            settings: all that the row depends on.
            make: makes it.
        """
        row = self.known(settings)
        if row is None:
            row = make()
            self.add(settings, row)
        return row


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)
