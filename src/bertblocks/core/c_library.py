"""C sources: prebuilt in wheels, or compiled at first use and cached in a folder that only this user can write to.

A prebuilt library is next to its source, and whoever can change it can change this module. Loading a library runs its
code, so a cached one must be ours and undamaged: the folder and the file belong to this user and nobody else can write
to them, and the file ends with the SHA-256 of everything before it. The system's loader ignores these last bytes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bertblocks.core.storage import PARTIAL, atomic_file, lock_folder, remove_partial

DIGEST_BYTES = hashlib.sha256().digest_size


class CompileError(RuntimeError):
    """Says why a source cannot be compiled here."""


@contextlib.contextmanager
def compiled_library(source: Path, options: Sequence[str]) -> Iterator[Path]:
    """The path of the library, valid inside the block; compiled unless it is prebuilt or an intact copy is cached."""
    prebuilt = source.with_name(library_name(source, options))
    if prebuilt.is_file():
        yield prebuilt
        return
    for folder in _cache_folders():
        try:
            path = _find_or_compile(source, options, folder)
        except OSError:  # a file system that is full, read-only, or does not lock
            continue
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="bertblocks-") as scratch:
        yield _compile(source, options, Path(scratch))


def find_compilers() -> list[list[str]]:
    """Return the compilers to try, beginning with the one that CC names."""
    named = shlex.split(os.environ.get("CC", ""))
    return [command for command in ([*named], ["cc"], ["gcc"], ["clang"]) if command and shutil.which(command[0])]


def library_name(source: Path, options: Sequence[str], compiler: list[str] | None = None) -> str:
    """The file name of the library, which has a hash of everything that the library depends on.

    Every header next to the source counts. Without `compiler` it is the name of a prebuilt library.
    """
    headers = (path.read_bytes() for path in sorted(source.parent.glob("*.h")))
    made_by = [] if compiler is None else [_version(tuple(compiler)), " ".join(compiler).encode()]
    content = b"\0".join([source.read_bytes(), *headers, " ".join(options).encode(), *made_by])
    return f"{source.stem}-{hashlib.sha256(content).hexdigest()[:20]}.so"


@functools.cache
def _version(compiler: tuple[str, ...]) -> bytes:
    return subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout


def _find_or_compile(source: Path, options: Sequence[str], folder: Path) -> Path:
    """Return the library from a cache folder. Of several processes one compiles, and the others wait."""
    lock = lock_folder(folder, wait=True)
    try:
        for compiler in find_compilers():  # the first often suffices, and asking for a version takes time
            path = folder / library_name(source, options, compiler)
            if is_intact(path):
                return path
        remove_partial(folder)
        return _compile(source, options, folder)
    finally:
        os.close(lock)


def _compile(source: Path, options: Sequence[str], folder: Path) -> Path:
    content, compiler = compile_source(source, options, folder)
    path = folder / library_name(source, options, compiler)
    with atomic_file(path) as file:
        file.write(content + hashlib.sha256(content).digest())
    return path


def compile_source(source: Path, options: Sequence[str], folder: Path) -> tuple[bytes, list[str]]:
    """Compile with the first compiler that succeeds, and return the library and that compiler."""
    reasons = []
    for compiler in find_compilers():
        # the compiler's own temporary files go here too, so that a killed process leaves nothing elsewhere
        with tempfile.TemporaryDirectory(prefix=".", suffix=PARTIAL, dir=folder) as scratch:
            library = Path(scratch, "library.so")
            done = subprocess.run(
                [*compiler, *options, str(source), "-o", str(library), "-lm"],
                capture_output=True,
                check=False,
                env={**os.environ, "TMPDIR": scratch},
            )
            if done.returncode == 0:
                return library.read_bytes(), compiler
        reasons.append(f"{compiler[0]} failed: {' '.join(done.stderr.decode(errors='replace').split())[:200]}")
    raise CompileError("; ".join(reasons) or "no C compiler (cc, gcc, clang) was found")


def is_intact(path: Path) -> bool:
    """True if this user wrote the file, nobody else can change it, and its checksum is right."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode) or not _is_private(path):
            return False
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _cache_folders() -> Iterator[Path]:
    """The safe ones among the user's cache folder and, if there is none, a folder of this user for temporary files."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for folder in (Path(root, "bertblocks"), Path(tempfile.gettempdir(), f"bertblocks-{os.geteuid()}")):
        if folder.is_absolute():
            with contextlib.suppress(OSError):
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.mkdir(mode=0o700, exist_ok=True)
                if is_safe_folder(folder):
                    yield folder


def is_safe_folder(folder: Path) -> bool:
    """True if only this user can change the folder's entries or put another folder in its place."""
    if folder.is_symlink() or not folder.is_dir() or not _is_private(folder):
        return False
    for parent in folder.resolve().parents:
        status = parent.stat()
        is_shared = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.geteuid()) or is_shared:
            return False
    return True


def _is_private(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
