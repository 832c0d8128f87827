"""The documents say what is so: their code runs and prints what they show, their commands, links and files exist."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from typer.testing import CliRunner

import bertblocks
from bertblocks.cli.main import app
from bertblocks.nn.activation import ACTIVATIONS
from bertblocks.nn.backends import BACKENDS
from bertblocks.nn.mlp import MLPS
from bertblocks.nn.norm import NORMS
from bertblocks.nn.position import BLOCK_POSITIONS, EMBEDDING_POSITIONS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "bertblocks"
WITH_CODE = [
    "README.md",
    "docs/architecture.md",
    "docs/data.md",
    "docs/families.md",
    "docs/finetuning.md",
    "docs/inference.md",
    "docs/jax.md",
    "docs/pretraining.md",
    "docs/quantization.md",
    "CONTRIBUTING.md",
]
DOCUMENTS = [*WITH_CODE, "docs/config.md", "docs/performance.md"]
#: Files that the documents name and the repository does not hold, because they are parts of any checkpoint.
OF_CHECKPOINTS = {"config.json", "model.safetensors"}


@dataclass(frozen=True)
class Fence:
    """A fenced block: its language, its text, and the number of its first line."""

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
def registries(monkeypatch):
    """What examples register is forgotten afterwards."""
    for registry in (ACTIVATIONS, BACKENDS, BLOCK_POSITIONS, EMBEDDING_POSITIONS, MLPS, NORMS):
        monkeypatch.setattr(registry, "_blocks", dict(registry._blocks))


@pytest.mark.parametrize("document", WITH_CODE)
@pytest.mark.usefixtures("registries")
def test_code_and_commands_do_what_the_document_shows(document, tmp_path, monkeypatch):
    """From top to bottom in one folder, so that a command may look at what an example has saved."""
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
    """Every block has a namespace of its own: readers copy them one by one. `print(...)  # text` must print text."""
    # line numbers in tracebacks are those of the document
    code = compile("\n" * (fence.line - 1) + fence.text, str(ROOT / document), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    expected = re.findall(r"^ *print\(.*\)  # (.+)$", fence.text, re.MULTILINE)
    assert printed.getvalue().splitlines() == expected, f"{document}, block at line {fence.line}"


def run_console(document: str, fence: Fence) -> None:
    """`$ command`, then lines of its output in order; `...` stands for lines left out."""
    for session in re.split(r"^\$ ", fence.text, flags=re.MULTILINE)[1:]:
        command, _, shown = session.partition("\n")
        actual = run_shell_line(document, command).splitlines()
        lines = iter(squeeze(line) for line in actual)
        for line in shown.splitlines():
            if line.strip() not in ("", "..."):
                assert squeeze(line) in lines, f"{document}: `{command}` does not print, at its place: {line}"


def squeeze(line: str) -> str:
    """Without the width of columns, which depends on lines that may be left out."""
    return re.sub(r"─+", "─", " ".join(line.split()))


def run_shell_line(document: str, line: str) -> str:
    """Runs `bertblocks` here and returns its output; checks that what other commands name is there."""
    words = shlex.split(line, comments=True)
    if not words:
        return ""
    program, arguments = words[0], words[1:]
    if program == "bertblocks":
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{document}: `{line}` ends with {result.exit_code}: {result.output}"
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


def test_the_readme_lists_every_extra():
    rows = re.findall(r"^\| (`[\w-]+`(?:, `[\w-]+`)*) \|", prose("README.md"), re.MULTILINE)
    assert set(re.findall(r"[\w-]+", " ".join(rows))) == declared_extras()


def test_the_installed_command_is_the_one_that_is_documented():
    """In a process of its own, as a shell would."""
    script = re.search(r'^bertblocks = "(.+):(.+)"$', read("pyproject.toml"), re.MULTILINE)
    assert script
    code = f"import sys; sys.argv[0] = 'bertblocks'; from {script[1]} import {script[2]}; {script[2]}()"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("describe", "compare", "presets", "convert", "families"):
        assert command in done.stdout


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)]+)\)", prose(document)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), f"{document} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{document} links to {target}"


def anchors(file: Path) -> set[str]:
    """Of every heading, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document):
    """Paths count from the repository, from the package, or from the document's folder."""
    bases = (ROOT, PACKAGE, (ROOT / document).parent)
    for name in re.findall(r"`([\w./-]+(?:\.(?:py|md|toml|txt|json|safetensors)|/))`", prose(document)):
        if name not in OF_CHECKPOINTS:
            assert any((base / name).exists() for base in bases), f"{document} names {name}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_that_are_named_exist(document):
    named = set(re.findall(r"`make ([\w-]+)`", prose(document)))
    assert named <= make_targets()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_public_names_exist(document):
    pattern = r"`(?:bertblocks\.(\w+)|(BertBlocks\w+|register_\w+|(?:from|to|save)_huggingface))`"
    for name in ("".join(groups) for groups in re.findall(pattern, prose(document))):
        assert hasattr(bertblocks, name), f"{document} names {name}"


@pytest.mark.parametrize("document", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_names_are_in_the_files_where_the_document_places_them(document):
    """Of the form `name` in `file`."""
    places = re.findall(r"`(\w+)`\s+(?:in|of)\s+`([\w./-]+\.py)`", prose(document))
    assert places
    for name, file in places:
        path = next(base / file for base in (ROOT, PACKAGE) if (base / file).exists())
        assert re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")), f"{document} places {name} in {file}"


# ---------------------------------------------------------------------- imports


#: The rooms of docs/architecture.md, in order: each imports only those above it.
ROOMS = [
    "core",
    "nn",
    "config",
    "models",
    "analysis",
    "text",
    "checkpoints",
    "data",
    "objectives",
    "inference",
    "tasks",
    "reports",
    "training",
    "evaluation",
    "flax",
    "cli",
]


def test_files_import_one_way():
    """File by file there is no circle; imports for typing aside."""
    files = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    graph = {name: imported(ast.parse(path.read_text(encoding="utf-8"))) & set(files) for name, path in files.items()}
    assert "bertblocks.config" in graph["bertblocks.models.base"]
    for name in ("bertblocks", "bertblocks._auto"):  # which resolve names when they are first used
        del graph[name]
    TopologicalSorter(graph).prepare()


def test_rooms_import_only_rooms_above_them():
    """Imports inside functions count too: none hides a circle."""
    assert sorted(ROOMS) == sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file())
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        if room not in ROOMS:
            continue
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            other = name.split(".")[1] if "." in name else ""
            if other in ROOMS:
                assert ROOMS.index(other) <= ROOMS.index(room), f"{path} imports {name}"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(module: ast.Module) -> set[str]:
    """Modules of the package that a file imports, wherever the import stands, but not for typing alone."""
    typing = {
        id(inner)
        for node in ast.walk(module)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(module):
        if id(node) in typing:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "bertblocks":
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "bertblocks"}
    return found


# ---------------------------------------------------------------------- generated


@pytest.mark.parametrize("page", ["config", "families", "performance"])
def test_generated_pages_are_up_to_date(page):
    name = f"generate_{page}"
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec
    assert spec.loader
    generator = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = generator  # dataclasses look their module up
    spec.loader.exec_module(generator)
    assert generator.render() == read(f"docs/{page}.md"), f"run `python docs/{name}.py`"


def test_the_page_of_families_has_every_family():
    from bertblocks.checkpoints.families import FAMILIES

    listed = re.findall(r"^\| `([\w-]+)` \| in, out ", read("docs/families.md"), re.MULTILINE)
    assert listed == list(FAMILIES)
    numbers = re.findall(r"(\d+) (?:checkpoint )?families", prose("README.md"))
    assert numbers
    assert {int(number) for number in numbers} == {len(FAMILIES)}


def test_the_page_of_config_keys_has_every_key():
    from bertblocks.config import BertBlocksConfig
    from bertblocks.config.validation import own_keys

    listed = re.findall(r"^\| `(\w+)` \| `[^`]+` \| (?:`[^`]+`|\*implied\*) \|", read("docs/config.md"), re.MULTILINE)
    assert listed == list(own_keys(BertBlocksConfig))
