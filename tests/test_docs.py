"""What the documents point at exists."""

import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"\b((?:docs|tests|examples|conf)/[\w./-]*\w\.\w+)", text))
    named |= set(re.findall(r"\]\((?!https?:)([^)#]+)\)", text))
    missing = [name for name in named if not (ROOT / name).exists() and not (document.parent / name).exists()]
    assert missing == []


def test_each_test_that_the_feature_table_names_exists() -> None:
    text = (ROOT / "docs" / "lightning-features.md").read_text(encoding="utf-8").replace("`T/", "`tests/strategy/")
    path = ""
    for file, test in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", text):
        path = file or path
        if path:
            source = (ROOT / path).read_text(encoding="utf-8")
            assert not test or f"def {test}(" in source, f"{path}::{test}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_figure_is_left_open(document: Path) -> None:
    assert "@@" not in document.read_text(encoding="utf-8")


def test_the_commands_that_the_readme_names_are_installed_by_the_package() -> None:
    scripts = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.scripts]")[1].split("[")[0]
    named = set(re.findall(r"\b(g2-[a-z]+)\b", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named <= set(re.findall(r"^(g2-[a-z]+)", scripts, flags=re.MULTILINE))


def test_the_stability_table_is_what_its_formula_gives() -> None:
    text = (ROOT / "docs" / "from-ddp.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d\.\d+) \| (\d\.\d+) \|$", text, flags=re.MULTILINE)
    assert len(rows) == 5
    for ranks, age, largest, times_ranks in rows:
        limit = 2 * math.sin(math.pi / (4 * int(age) + 2))
        assert int(age) == int(ranks) - 1
        assert (largest, times_ranks) == (f"{limit:.3f}", f"{limit * int(ranks):.3f}")
