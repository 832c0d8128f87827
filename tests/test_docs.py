"""Documents: their code runs and prints what they show; the commands, links and files they name exist."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from typer.main import get_command
from typer.testing import CliRunner

import bertblocks
from bertblocks.cli.main import app
from bertblocks.models.base import BertBlocksPreTrainedModel
from bertblocks.nn.activation import ACTIVATIONS
from bertblocks.nn.backends import BACKENDS
from bertblocks.nn.mlp import MLPS
from bertblocks.nn.norm import NORMS
from bertblocks.nn.position import BLOCK_POSITIONS, EMBEDDING_POSITIONS
from bertblocks.objectives.maskings import MASKINGS
from bertblocks.training.objective_sections import OBJECTIVES
from bertblocks.training.optimizer_sections import OPTIMIZERS
from bertblocks.training.schedules import SCHEDULES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "bertblocks"
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
ROOM_PAGES = [path.relative_to(ROOT).as_posix() for path in sorted(PACKAGE.glob("*/README.md"))]
DOCUMENTS = [*PAGES, *ROOM_PAGES]
#: Files that the documents name but the repository does not hold, because they belong to a checkpoint or a run.
OUTPUTS = {"config.json", "manifest.json", "model.safetensors", "model/", "result.json", "results.json", "run.json"}


@dataclass(frozen=True)
class Fence:
    """A fenced block: its language, its text, and the line it starts on."""

    language: str
    text: str
    line: int


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def fences(document: str) -> list[Fence]:
    text = read(document)
    return [
        Fence(match["language"], match["text"], text.count("\n", 0, match.start("text")) + 1)
        for match in re.finditer(r"^ *```(?P<language>\w+)\n(?P<text>.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    ]


def prose(document: str) -> str:
    """The text without its fenced blocks and HTML comments."""
    return re.sub(r"^ *```\w*\n.*?^ *```$|<!--.*?-->", "", read(document), flags=re.MULTILINE | re.DOTALL)


# ---------------------------------------------------------------------- code and commands


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes what the examples register."""
    blocks = (ACTIVATIONS, BACKENDS, BLOCK_POSITIONS, EMBEDDING_POSITIONS, MLPS, NORMS)
    for registry in (*blocks, MASKINGS, OBJECTIVES, OPTIMIZERS, SCHEDULES):
        monkeypatch.setattr(registry, "_blocks", dict(registry._blocks))


@pytest.mark.parametrize("document", PAGES)
@pytest.mark.usefixtures("registries")
def test_code_and_commands_do_what_the_document_shows(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs from top to bottom in one folder, so that a command can use what an earlier example saved."""
    if document == "docs/jax.md":
        pytest.importorskip("flax")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for fence in fences(document):
        if fence.language == "python":
            run_python(document, fence)
        elif fence.language == "console":
            run_console(document, fence)
        elif fence.language == "sh":
            for line in fence.text.splitlines():
                run_shell_line(document, line)


def run_python(document: str, fence: Fence) -> None:
    """Runs a block in its own namespace, as a reader would paste it. `print(...)  # text` must print text."""
    # so that tracebacks show the line in the document
    code = compile("\n" * (fence.line - 1) + fence.text, str(ROOT / document), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), record_models() as models:
        exec(code, {"__name__": "__main__"})
    if document == "CONTRIBUTING.md":
        assert models, f"the block at line {fence.line} runs no forward pass"
    expected = re.findall(r"^ *print\(.*\)  # (.+)$", fence.text, re.MULTILINE)
    assert printed.getvalue().splitlines() == expected, f"{document}, block at line {fence.line}"


@contextlib.contextmanager
def record_models() -> Iterator[set[str]]:
    """Collects the names of the model classes that run a forward pass."""
    names: set[str] = set()

    def record(module: nn.Module, *_: object) -> None:
        if isinstance(module, BertBlocksPreTrainedModel):
            names.add(type(module).__name__)

    handle = register_module_forward_hook(record)
    try:
        yield names
    finally:
        handle.remove()


def run_console(document: str, fence: Fence) -> None:
    """Checks `$ command` followed by lines of its output in order; `...` marks omitted lines."""
    for session in re.split(r"^\$ ", fence.text, flags=re.MULTILINE)[1:]:
        command, _, shown = session.partition("\n")
        actual = run_shell_line(document, command).splitlines()
        lines = iter(squeeze(line) for line in actual)
        for line in shown.splitlines():
            if line.strip() not in ("", "..."):
                assert squeeze(line) in lines, f"{document}: `{command}` does not print this line here: {line}"


def squeeze(line: str) -> str:
    """Removes column widths, which depend on lines that may be omitted."""
    return re.sub(r"─+", "─", " ".join(line.split()))


def run_shell_line(document: str, line: str) -> str:
    """Runs `bertblocks` in this process and returns its output. For other commands, checks the names."""
    words = shlex.split(line, comments=True)
    if not words:
        return ""
    program, arguments = words[0], words[1:]
    if program == "bertblocks":
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{document}: `{line}` exits with {result.exit_code}: {result.output}"
        return result.output
    if program == "make":
        assert set(arguments) <= make_targets(), f"{document}: `{line}`"
    elif program == "pip":
        extras = {extra for word in arguments for part in re.findall(r"\[(.+)\]", word) for extra in part.split(",")}
        assert extras <= declared_extras(), f"{document}: `{line}`"
    elif program.endswith(("python", "pytest", "ruff", "mypy")):
        files = [word.partition("::")[0] for word in arguments if re.search(r"/|\.py$", word)]
        assert all((ROOT / file).exists() for file in files), f"{document}: `{line}`"
    else:
        pytest.fail(f"{document}: this test cannot check `{line}`")
    return ""


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))


def declared_extras() -> set[str]:
    table = read("pyproject.toml").partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return set(re.findall(r"^([\w-]+) = \[", table, re.MULTILINE))


def test_the_readme_lists_every_extra() -> None:
    rows = re.findall(r"^\| (`[\w-]+`(?:, `[\w-]+`)*) \|", prose("README.md"), re.MULTILINE)
    assert set(re.findall(r"[\w-]+", " ".join(rows))) == declared_extras()


def test_the_installed_command_is_the_documented_one() -> None:
    """Runs in a new process, as a shell would."""
    script = re.search(r'^bertblocks = "(.+):(.+)"$', read("pyproject.toml"), re.MULTILINE)
    assert script
    code = f"import sys; sys.argv[0] = 'bertblocks'; from {script[1]} import {script[2]}; {script[2]}()"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("describe", "compare", "presets", "convert", "families"):
        assert command in done.stdout


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_have_targets(document: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(document)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), f"{document} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{document} links to {target}"


def anchors(file: Path) -> set[str]:
    """The anchors of all headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document: str) -> None:
    """Paths are relative to the repository, to the package, or to the document's folder."""
    bases = (ROOT, PACKAGE, (ROOT / document).parent)
    for name in re.findall(r"`([\w./-]+(?:\.(?:py|md|toml|txt|json|safetensors)|/))`", prose(document)):
        if name not in OUTPUTS:
            assert any((base / name).exists() for base in bases), f"{document} names {name}"


def test_every_promise_about_security_names_its_tests() -> None:
    rows = re.findall(r"^\| (?!Promise|---)(.+) \| (.+) \|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    for promise, named in rows:
        files = [part.partition(": ") for part in named.split("; ")]
        for file, _, functions in files:
            code = (ROOT / file.strip("`")).read_text()
            for function in functions.split(", ") if functions else []:
                assert f"\ndef {function.strip('`')}(" in code, f"{promise}: {file} does not have {function}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_make_targets_exist(document: str) -> None:
    named = set(re.findall(r"`make ([\w-]+)`", prose(document)))
    assert named <= make_targets()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_public_names_exist(document: str) -> None:
    pattern = r"`(?:bertblocks\.(\w+)|(BertBlocks\w+|register_\w+|(?:from|to|save)_huggingface))`"
    for name in ("".join(groups) for groups in re.findall(pattern, prose(document))):
        exists = importlib.util.find_spec("bertblocks.flax") if name == "flax" else hasattr(bertblocks, name)
        assert exists, f"{document} names {name}"


@pytest.mark.parametrize("document", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_names_are_in_the_files_that_the_document_gives(document: str) -> None:
    """Checks the form `name` in `file`."""
    places = re.findall(r"`(\w+)`\s+(?:in|of)\s+`([\w./-]+\.py)`", prose(document))
    assert places
    for name, file in places:
        path = next(base / file for base in (ROOT, PACKAGE) if (base / file).exists())
        assert re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")), f"{document} places {name} in {file}"


def test_the_api_page_lists_every_public_name() -> None:
    """It lists exactly the public names of the package, of its JAX part, and the commands."""
    sections = re.split(r"^## ", read("docs/api.md"), flags=re.MULTILINE)
    listed = {
        section.partition("\n")[0]: set(re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\|(.+?)\|", section, re.M))))
        for section in sections
    }
    assert listed["`bertblocks`"] == set(bertblocks.__all__)
    if importlib.util.find_spec("flax"):
        assert listed["`bertblocks.flax`"] == set(importlib.import_module("bertblocks.flax").__all__)
    commands = set()
    main: Any = get_command(app)
    for name, command in main.commands.items():
        commands |= {f"{name} {inner}" for inner in command.commands} if hasattr(command, "commands") else {name}
    assert listed["Command line"] == commands


# ---------------------------------------------------------------------- imports


def load_generator(page: str) -> Any:
    """The script docs/generate_<page>.py as a module."""
    name = f"generate_{page}"
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec
    assert spec.loader
    generator = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = generator  # dataclasses look up their module
    spec.loader.exec_module(generator)
    return generator


IMPORTS = load_generator("imports")


def test_files_import_without_cycles() -> None:
    """Imports for typing only do not count."""
    files = IMPORTS.module_files()
    graph = {name: IMPORTS.imported_names(path) & set(files) for name, path in files.items()}
    assert "bertblocks.config" in graph["bertblocks.models.base"]
    for name in ("bertblocks", "bertblocks._auto"):  # they resolve names on first use
        del graph[name]
    TopologicalSorter(graph).prepare()


def test_rooms_import_only_rooms_above_them() -> None:
    """Imports inside functions count too, so none can hide a cycle."""
    rooms = IMPORTS.ROOMS
    assert sorted(rooms) == sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file())
    for name, path in IMPORTS.module_files().items():
        room = IMPORTS.room_of(name)
        for imported in IMPORTS.imported_names(path) if room else ():
            other = IMPORTS.room_of(imported)
            assert other is None or rooms.index(other) <= rooms.index(room), f"{path} imports {imported}"


def test_the_graph_of_imports_leaves_out_only_implied_edges() -> None:
    graph = {"a": set(), "b": {"a"}, "c": {"a", "b"}, "d": {"a", "c"}, "e": {"a"}}
    reduced = {"a": set(), "b": {"a"}, "c": {"b"}, "d": {"c"}, "e": {"a"}}
    assert IMPORTS.without_implied_edges(graph) == reduced


def test_every_room_has_a_readme_and_a_place_in_the_architecture() -> None:
    assert [f"src/bertblocks/{room}/README.md" for room in sorted(IMPORTS.ROOMS)] == ROOM_PAGES
    listed = re.findall(r"^\| `(\w+)/` \|", prose("docs/architecture.md"), re.MULTILINE)
    assert listed == IMPORTS.ROOMS


# ---------------------------------------------------------------------- generated


@pytest.mark.parametrize(
    ("page", "script"),
    [("config", "config"), ("families", "families"), ("performance", "performance"), ("architecture", "imports")],
)
def test_generated_pages_are_up_to_date(page: str, script: str) -> None:
    assert load_generator(script).render() == read(f"docs/{page}.md"), f"run `python docs/generate_{script}.py`"


def test_the_page_of_families_has_every_family() -> None:
    from bertblocks.checkpoints.families import FAMILIES

    listed = re.findall(r"^\| `([\w-]+)` \| in, out ", read("docs/families.md"), re.MULTILINE)
    assert listed == list(FAMILIES)
    numbers = re.findall(r"(\d+) (?:checkpoint )?families", prose("README.md"))
    assert numbers
    assert {int(number) for number in numbers} == {len(FAMILIES)}


def test_the_page_of_config_keys_has_every_key() -> None:
    from bertblocks.config import BertBlocksConfig
    from bertblocks.config.blocks import block_keys
    from bertblocks.config.validation import own_keys

    listed = re.findall(r"^\| `(\w+)` \| `[^`]+` \| (?:`[^`]+`|\*implied\*) \|", read("docs/config.md"), re.MULTILINE)
    assert [key for key in listed if key not in block_keys()] == list(own_keys(BertBlocksConfig))
    assert {key for key in listed if key in block_keys()} == set(block_keys())
