"""An English corpus on every machine with Python: the docstrings of its standard library and installed packages.

Source files are parsed, never imported. Whole packages are held out, so that a model is evaluated on texts by authors
that it has not seen.
"""

from __future__ import annotations

import ast
import gc
import inspect
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from bertblocks.core.cpu import allowed_cpus
from bertblocks.core.storage import atomic_file
from bertblocks.data.corpus import FileCorpus
from bertblocks.data.workers import worker_pool

#: Folders with other packages, or with files that have no documentation.
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "testing", "_testing"}
#: Texts with fewer words are left out.
MIN_WORDS = 5
FILES_PER_TASK = 200
#: Small, so that several processes can share the tokenizing.
SHARD_BYTES = 8 * 2**20

WITH_BODY = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.If, ast.Try, ast.With)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class SourceFile:
    """A source file and its top-level package."""

    package: str
    path: str


def python_roots() -> list[Path]:
    """The folders of the standard library and of the installed packages."""
    return list(dict.fromkeys(Path(sysconfig.get_path(key)) for key in ("stdlib", "purelib", "platlib")))


def gather_docstrings(
    target: Path, held_out: float = 0.02, roots: Sequence[Path] | None = None, workers: int | None = None
) -> dict[str, int]:
    """Writes every distinct text once, as a JSON object per line with its package and whether that is held out.

    Packages are held out in the order of a hash of their names until they make up the share `held_out` of all
    characters; a package larger than the share never is. Returns counts. Files that cannot be parsed are skipped and
    counted as `broken`.
    """
    files = list(find_files(python_roots() if roots is None else roots))
    workers = min(workers or allowed_cpus(), -(-len(files) // FILES_PER_TASK) or 1)
    tasks = [files[start : start + FILES_PER_TASK] for start in range(0, len(files), FILES_PER_TASK)]
    texts: dict[bytes, tuple[str, str]] = {}
    broken = 0
    with worker_pool(workers) as pool:
        for found, failed in pool.map(read_files, tasks):
            broken += failed
            for package, text in found:
                texts.setdefault(blake2b(text.encode(), digest_size=16).digest(), (package, text))
    sizes: dict[str, int] = {}
    for package, text in texts.values():
        sizes[package] = sizes.get(package, 0) + len(text)
    kept_back = choose_held_out(sizes, held_out)
    with atomic_file(target) as file:
        for package, text in texts.values():
            record = {"text": text, "package": package, "held_out": package in kept_back}
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    return {
        "files": len(files),
        "broken": broken,
        "documents": len(texts),
        "characters": sum(sizes.values()),
        "packages": len(sizes),
        "held_out_packages": len(kept_back),
    }


def find_files(roots: Sequence[Path]) -> Iterator[SourceFile]:
    """Source files in an order that does not depend on the location of the roots."""
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.endswith("-info"))
            for name in sorted(name for name in names if name.endswith(".py")):
                path = Path(folder, name)
                yield SourceFile(path.relative_to(root).parts[0].removesuffix(".py"), str(path))


def read_files(files: Sequence[SourceFile]) -> tuple[list[tuple[str, str]], int]:
    """The package and text of each docstring, and the number of files that cannot be parsed."""
    found: list[tuple[str, str]] = []
    broken = 0
    gc.disable()  # syntax trees have no reference cycles, and searching for them takes longer than parsing
    for file in files:
        try:
            found.extend((file.package, text) for text in read_docstrings(Path(file.path).read_bytes()))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            broken += 1
    gc.enable()
    return found, broken


def read_docstrings(source: bytes) -> list[str]:
    """The cleaned docstrings of a source file: those of the module, its classes and its functions, in order.

    Example:
        >>> read_docstrings(b'def f():\\n    \\"\\"\\"Adds one and one and one.\\"\\"\\"')
        ['Adds one and one and one.']
    """
    if b'"""' not in source and b"'''" not in source:
        return []  # parsing files without docstrings, which are mostly data, would take long
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in a file do not matter here
        tree = ast.parse(source)
    texts = []
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, DOCUMENTED):
            text = clean(ast.get_docstring(node, clean=False) or "")
            if text:
                texts.append(text)
        nodes.extend(child for child in reversed(getattr(node, "body", [])) if isinstance(child, WITH_BODY))
    return texts


def clean(text: str) -> str:
    """A docstring without indentation; empty if it has too few words outside examples or is not valid Unicode."""
    text = inspect.cleandoc(text).strip()
    prose = [line for line in text.splitlines() if not line.lstrip().startswith((">>>", "..."))]
    words = list(islice((word for line in prose for word in line.split()), MIN_WORDS))
    if len(words) < MIN_WORDS or any("\ud800" <= character <= "\udfff" for character in text):
        return ""
    return text


def choose_held_out(sizes: dict[str, int], share: float) -> set[str]:
    """Chooses names in the order of their hashes until their sizes reach the share; at least the smallest one.

    Example:
        >>> sorted(choose_held_out({"large": 98, "small": 1, "tiny": 1}, 0.02))
        ['small', 'tiny']
    """
    room = share * sum(sizes.values())
    chosen: set[str] = set()
    for name in sorted(sizes, key=lambda name: blake2b(name.encode()).digest()):
        if sizes[name] <= room:
            chosen.add(name)
            room -= sizes[name]
    return chosen or ({min(sizes, key=lambda name: sizes[name])} if share > 0 and sizes else set())


def docstring_corpus(cache: Path, held_out: float = 0.02, workers: int | None = None) -> FileCorpus:
    """The corpus in the file `cache`, which is written if it does not exist."""
    if not cache.is_file():
        gather_docstrings(cache, held_out, workers=workers)
    return FileCorpus((str(cache),), held_out_column="held_out", shard_bytes=SHARD_BYTES)
