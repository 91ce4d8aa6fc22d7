"""A room imports only from rooms below it; Lightning, Hydra and torch.distributed stay where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_g2"

LAYER = {
    "errors": 0, "namespace": 0, "values": 0, "algebra": 1, "routing": 2, "server": 3, "transport": 4, "simulate": 5,
    "decoupled": 5, "metrics": 6, "callbacks": 6, "strategy": 7, "tasks": 7, "cli": 8,
}  # fmt: skip
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in LAYER)


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _ids(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=_ids)
def test_a_room_imports_only_from_below(path: Path) -> None:
    room = _room(path)
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "lightning_g2" and len(parts) > 1 and parts[1] in LAYER and parts[1] != room:
            assert LAYER[parts[1]] < LAYER[room], f"{path.name} (layer {LAYER[room]}) imports {name}"


@pytest.mark.parametrize("path", FILES, ids=_ids)
def test_large_dependencies_stay_in_their_rooms(path: Path) -> None:
    room, names = _room(path), set(_imports(path))
    if LAYER[room] < 6:
        assert not any(n == "lightning" or n.startswith("lightning.") for n in names), "lightning only from layer 6 up"
    if room not in {"transport", "strategy"}:
        assert not any(n.startswith("torch.distributed") for n in names), "torch.distributed in transport and strategy"
    if room != "cli" and path != PACKAGE / "strategy" / "rerun.py":  # a user's own Hydra app needs its ranks started
        assert not any(n.split(".")[0] in {"hydra", "omegaconf"} for n in names), "hydra only in cli and conf"


def test_every_room_has_its_layer() -> None:
    assert {_room(p) for p in FILES} <= set(LAYER)


def test_the_wheel_brings_every_package() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    named = set(ast.literal_eval(text.split("\npackages = ", 1)[1].split("]", 1)[0] + "]"))
    here = {".".join(path.parent.relative_to(PACKAGE.parent).parts) for path in PACKAGE.rglob("__init__.py")}
    assert named == here | {"lightning_g2.conf"}
