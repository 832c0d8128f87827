"""Project files agree with the package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

import bertblocks

ROOT = Path(__file__).parents[1]


def test_the_version_is_in_one_file() -> None:
    assert importlib.metadata.version("bertblocks") == bertblocks.__version__
    pattern = re.compile(rf'version_*\W+"?{re.escape(bertblocks.__version__)}"?\s*$', re.IGNORECASE | re.MULTILINE)
    files = [ROOT / "pyproject.toml", ROOT / "CITATION.cff", *(ROOT / "src").rglob("*.py")]
    assert [file.name for file in files if pattern.search(file.read_text(encoding="utf-8"))] == ["__init__.py"]


def test_py_typed_is_part_of_the_package() -> None:
    assert (ROOT / "src" / "bertblocks" / "py.typed").is_file()


def test_modules_that_the_upgrade_notes_point_to_exist() -> None:
    table = (ROOT / "UPGRADING.md").read_text(encoding="utf-8").partition("### Modules")[2].partition("###")[0]
    rows = re.findall(
        r"^\| `(bertblocks[\w.]*)(\.\*)?`(?:: ([\w, ]+))? \| `(bertblocks[\w.]*?)(?:\.\*)?` \|$", table, re.M
    )
    assert len(rows) > 50
    for old, _, names, new in rows:
        for target in [f"{new}.{name}" for name in names.split(", ")] if names else [new]:
            assert importlib.util.find_spec(target), f"{old} is said to be {target} now"


def test_every_promise_of_security_md_names_existing_tests() -> None:
    lines = (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines()
    promises = [line for line in lines if line.startswith("| ") and not line.startswith(("| Promise", "| ---"))]
    assert len(promises) >= 10
    for promise in promises:
        files = re.findall(r"`(tests/[\w/]+\.py)`", promise)
        assert files, promise
        sources = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
        for test in re.findall(r"`(test_\w+)`", promise):
            assert f"def {test}(" in sources, promise


@pytest.mark.parametrize("file", [".pre-commit-config.yaml", "CITATION.cff", ".github/workflows/test.yml"])
def test_project_files_are_valid_yaml(file: str) -> None:
    assert isinstance(yaml.safe_load((ROOT / file).read_text(encoding="utf-8")), dict)
