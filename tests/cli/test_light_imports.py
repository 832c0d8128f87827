"""The modules that a prediction command leaves out, and that it prints the same without them."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from bertblocks import BertBlocksConfig, BertBlocksModel
from bertblocks.checkpoints.families import FAMILIES
from bertblocks.cli import light_imports
from bertblocks.cli.light_imports import DEFERRED, _are_known, _Distributions, _find_home, _Finder, _get_module
from tests.cli.test_predict import run
from tests.small_tokenizers import wrap
from tests.tasks.test_predictor import TAGS, labelled, make_bert

# ---------------------------------------------------------------------- deferred modules

PACKAGE = {
    "__init__.py": "import deferred_package.log as log\nlog.ran.append(__name__)\nvalue = 1\n",
    "log.py": "ran = []\n",
    "own.py": (
        "import sys, types\nimport deferred_package.log as log\nlog.ran.append(__name__)\n"
        "sys.modules[__name__] = types.SimpleNamespace(value=2)\n"
    ),
}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package whose modules note that they run; two of them are deferred."""
    folder = tmp_path / "deferred_package"
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(light_imports, "DEFERRED", ("deferred_package", "deferred_package.own"))
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    yield importlib.import_module("deferred_package.log")
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.startswith("deferred_package")]:
        del sys.modules[name]


def test_a_deferred_package_runs_when_a_name_is_used_and_not_for_its_submodules(log: Any) -> None:
    package = importlib.import_module("deferred_package")
    assert package.log is log
    assert log.ran == []
    assert package.value == 1
    assert package.value == 1
    assert log.ran == ["deferred_package"]
    assert package.__file__.endswith("__init__.py")
    assert type(package.__spec__.loader).__name__ == "SourceFileLoader"


def test_a_deferred_module_that_replaces_itself_has_the_names_of_its_replacement(log: Any) -> None:
    own = importlib.import_module("deferred_package.own")
    assert log.ran == []
    assert own.value == 2
    assert own.value == 2
    assert log.ran == ["deferred_package.own"]
    assert sys.modules["deferred_package.own"].value == 2


def test_a_deferred_module_does_not_have_names_that_the_module_lacks(log: Any) -> None:
    package = importlib.import_module("deferred_package")
    for _ in range(2):
        with pytest.raises(AttributeError, match="'deferred_package' has no attribute 'missing'"):
            _ = package.missing


# ---------------------------------------------------------------------- faster answers are the same answers


@pytest.mark.parametrize("name", ["torch", "transformers", "yaml", "numpy", "no_such_package"])
def test_distributions_are_those_of_importlib(name: str) -> None:
    assert _Distributions().get(name, []) == importlib.metadata.packages_distributions().get(name, [])


def test_the_module_of_a_frame_or_class_is_what_inspect_finds() -> None:
    frame = inspect.currentframe()
    assert _get_module(frame) is inspect.getmodule(frame) is sys.modules[__name__]
    assert _get_module(Path) is inspect.getmodule(Path)


def test_names_of_transformers_are_found_where_they_are() -> None:
    """Configs of all families, tokenizers in both spellings, and the names that models import."""
    names = [family.config_class for family in FAMILIES.values() if isinstance(family.config_class, str)]
    names += ["BertTokenizer", "BertTokenizerFast", "XLMRobertaTokenizer", "RobertaTokenizerFast", "DebertaV2Tokenizer"]
    names += ["AutoConfig", "AutoTokenizer", "AutoModelForMaskedLM", "PreTrainedModel", "PreTrainedConfig"]
    for name in names:
        home = _find_home(name)
        assert home is not None, name
        found = getattr(importlib.import_module(f"transformers.{home}"), name)
        assert found is getattr(transformers, name)
    assert _find_home("Trainer") is None
    assert _find_home("NoSuchTokenizer") is None


def test_nothing_changes_with_other_versions_or_in_a_process_of_someone_else(monkeypatch: pytest.MonkeyPatch) -> None:
    before, finders = importlib.metadata.packages_distributions, list(sys.meta_path)
    for name in ("torch", "transformers"):  # as if they were not imported yet
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(light_imports, "KNOWN", {"torch": "0.", "transformers": "0."})
    for is_own_process in (True, False):
        monkeypatch.setattr(light_imports, "is_own_process", is_own_process)
        with light_imports.without_unused():
            assert sys.meta_path == finders
            assert importlib.metadata.packages_distributions is before


# ---------------------------------------------------------------------- commands

#: Runs a command, and prints which of these modules it ran, and what torch.compile makes of a function afterwards.
RUN = """
import sys
from bertblocks.cli import light_imports
from bertblocks.cli.main import main
if sys.argv[1] == "all":
    light_imports.KNOWN = {"torch": "0.", "transformers": "0."}
del sys.argv[1]
try:
    main()
except SystemExit as ending:
    assert not ending.code
unused = {"torch.distributed.tensor", "sympy", "scipy", "accelerate", "sklearn", "datasets", "pandas", "pyarrow"}
unused |= {f"bertblocks.{room}" for room in ("training", "serve", "evaluation", "reports.page", "tasks.settings")}
unused |= {*light_imports.DEFERRED}
print(sorted(name for name in unused & sys.modules.keys() if getattr(sys.modules[name], "has_run", True)))
import torch
print(torch.compile(torch.sin, backend="eager")(torch.zeros(1)).item())
"""
KINDS = {
    "embed": ("BertModel", {}),
    "classify": ("BertForSequenceClassification", labelled("calm", "glad", "sad")),
    "tag": ("BertForTokenClassification", labelled(*TAGS)),
    "rerank": ("BertForSequenceClassification", {"num_labels": 1}),
    "fill-mask": ("BertForMaskedLM", {}),
}
ARGUMENTS = {"rerank": ["the cat", "the dog", "a cat"], "search": ["the cat"]}


def run_alone(imports: str, *arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", RUN, imports, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    for command, (kind, options) in KINDS.items():
        make_bert(kind, **options).save_pretrained(root / command)
        wrap("wordpiece").save_pretrained(root / command)
    config = BertBlocksConfig.from_preset("mini", vocab_size=len(wrap("wordpiece")))
    BertBlocksModel(config).save_pretrained(root / "own")
    wrap("wordpiece").save_pretrained(root / "own")
    (root / "texts.txt").write_text("the dog\na cat\n")
    run("index", root / "texts.txt", "--model", root / "embed", "--output", root / "search")
    return {name: str(root / name) for name in (*KINDS, "own", "search")}


@pytest.mark.slow
@pytest.mark.skipif(not _are_known(), reason="imports of other versions are not known")
@pytest.mark.parametrize("command", [*KINDS, "own", "search"])
def test_a_command_runs_only_the_modules_that_it_uses_and_prints_the_same(folders: Any, command: str) -> None:
    name = "embed" if command == "own" else command
    arguments = [name, folders[command], *ARGUMENTS.get(command, ["the cat [MASK]"]), "--json"]
    *found, ran, compiled = run_alone("few", *arguments)
    assert (ran, compiled) == ("[]", "0.0")
    *all_found, all_ran, _ = run_alone("all", *arguments)
    assert found == all_found
    assert found
    assert all(name in all_ran for name in DEFERRED)
