"""The cache of compiled C libraries, with real compilers and processes: only our own intact files are loaded."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bertblocks.core.c_library import (
    DIGEST_BYTES,
    CompileError,
    _version,
    compile_source,
    compiled_library,
    find_compilers,
    library_name,
)

pytestmark = pytest.mark.skipif(not find_compilers(), reason="no C compiler")
OPTIONS = ["-shared", "-fPIC"]
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")

#: Loads the library of a source and prints its path and its answer.
LOAD = """
import ctypes, sys
from pathlib import Path
from bertblocks.core.c_library import compiled_library
with compiled_library(Path(sys.argv[1]), ["-shared", "-fPIC"]) as path:
    print(path, ctypes.CDLL(str(path)).answer())
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder; temporary files go into this test's folder too."""
    (tmp_path / "temporary").mkdir(mode=0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "cache" / "bertblocks"


def load(source: Path, **options: Any) -> Path:
    """The path of the library that a new process loads."""
    done = subprocess.run([sys.executable, "-c", LOAD, str(source)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    path, answer = done.stdout.split()
    assert answer == "42"
    return Path(path)


def refuse_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def checked(command: list[str], **options: Any) -> Any:
        assert "--version" in command
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", checked)


def test_several_processes_compile_once(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the compiler notes each of its runs
    script = source.with_name("noting-cc")
    script.write_text(f'#!/bin/sh\necho "$@" >> {source.parent}/runs\nexec cc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    command = [sys.executable, "-c", LOAD, str(source)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {process.communicate()[0] for process in processes}
    assert len(outputs) == 1
    assert [str(path) for path in cache.iterdir()] == [outputs.pop().split()[0]]
    assert (source.parent / "runs").read_text().count("--version") == 3
    assert (source.parent / "runs").read_text().count("library.so") == 1
    assert cache.stat().st_mode & 0o077 == 0
    assert list((source.parent / "temporary").iterdir()) == []
    refuse_to_compile(monkeypatch)
    with compiled_library(source, OPTIONS) as path:
        assert ctypes.CDLL(str(path)).answer() == 42


@pytest.mark.parametrize("damage", ["truncated", "emptied", "flipped", "swapped", "linked"])
def test_a_damaged_library_is_compiled_again(source: Path, cache: Path, damage: str) -> None:
    path = load(source)
    intact = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(intact[: len(intact) // 2])
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "flipped":
        path.write_bytes(intact.replace(b"answer", b"answEr"))
    elif damage == "swapped":  # a library that does not carry a checksum
        path.write_bytes(intact[:-DIGEST_BYTES])
    else:
        path.rename(cache / "elsewhere.so")
        path.symlink_to(cache / "elsewhere.so")
    assert load(source) == path
    assert path.read_bytes() == intact
    assert not path.is_symlink()


@pytest.mark.parametrize("mode", [0o666, 0o664])
def test_a_library_that_others_can_write_is_compiled_again(source: Path, cache: Path, mode: int) -> None:
    path = load(source)
    path.chmod(mode)
    inode = path.stat().st_ino
    assert load(source) == path
    assert path.stat().st_ino != inode
    assert path.stat().st_mode & 0o022 == 0


@needs_root
def test_a_library_of_another_user_is_compiled_again(source: Path, cache: Path) -> None:
    path = load(source)
    os.chown(path, NOBODY, NOBODY)
    assert load(source) == path
    assert path.stat().st_uid == os.geteuid()


def world_writable(folder: Path) -> None:
    folder.chmod(0o777)


def in_a_world_writable_folder(folder: Path) -> None:
    folder.parent.chmod(0o777)


def linked(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


def owned_by_another(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)


def is_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


UNSAFE = [
    world_writable,
    in_a_world_writable_folder,
    linked,
    is_a_file,
    pytest.param(owned_by_another, marks=needs_root),
]


@pytest.mark.parametrize("change", UNSAFE)
def test_an_unsafe_folder_is_not_used(source: Path, cache: Path, change: Any) -> None:
    first = load(source)
    # whoever can write to the folder can write a checksum too
    first.write_bytes(first.read_bytes().replace(b"answer", b"answEr"))
    change(cache)
    second = load(source)
    assert second.parent == source.parent / "temporary" / f"bertblocks-{os.geteuid()}"
    assert second.parent.stat().st_mode & 0o077 == 0
    assert load(source) == second
    assert list(second.parent.iterdir()) == [second]


@pytest.mark.parametrize("home", ["/dev/null", "relative", "~"])
def test_without_a_home_one_folder_serves_all_processes(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", home)
    monkeypatch.chdir(source.parent)
    paths = {load(source) for _ in range(2)}
    assert [path.parent for path in paths] == [source.parent / "temporary" / f"bertblocks-{os.geteuid()}"]
    assert {path.name for path in source.parent.iterdir()} == {"answer.c", "temporary"}


def test_without_any_safe_folder_nothing_is_left_behind(source: Path, cache: Path) -> None:
    for folder in (cache, source.parent / "temporary" / f"bertblocks-{os.geteuid()}"):
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    path = load(source)
    assert path.parent.parent == source.parent / "temporary"
    assert not path.parent.exists()


def test_files_of_a_killed_compilation_are_removed(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = source.with_name("slow-cc")
    script.write_text('#!/bin/sh\n[ "$1" = --version ] || { touch "$TMPDIR/part.s"; sleep 60; }\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    process = subprocess.Popen([sys.executable, "-c", LOAD, str(source)], start_new_session=True)
    while not list(cache.glob(".*/part.s")):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    monkeypatch.delenv("CC")
    path = load(source)
    assert list(cache.iterdir()) == [path]
    assert list((source.parent / "temporary").iterdir()) == []


def test_a_failing_compiler_raises_an_error_that_names_it(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = source.with_name("broken-cc")
    script.write_text("#!/bin/sh\necho 'unknown option' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr("bertblocks.core.c_library.find_compilers", lambda: [[str(script)]])
    with pytest.raises(CompileError, match="broken-cc failed: unknown option"), compiled_library(source, OPTIONS):
        pass
    assert list(cache.iterdir()) == []


def test_without_a_compiler(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(CompileError, match="no C compiler"), compiled_library(source, OPTIONS):
        pass


def test_a_cached_library_asks_only_the_compiler_that_made_it(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, run = find_compilers()[0], subprocess.run
    load(source)
    commands: list[list[str]] = []
    monkeypatch.setattr("bertblocks.core.c_library.find_compilers", lambda: [compiler, ["another-compiler"]])

    def record(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", record)
    _version.cache_clear()
    with compiled_library(source, OPTIONS):
        pass
    assert commands == [[*compiler, "--version"]]


def test_a_prebuilt_library_needs_no_compiler_until_its_source_changes(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, _ = compile_source(source, OPTIONS, source.parent)
    prebuilt = source.with_name(library_name(source, OPTIONS))
    prebuilt.write_bytes(content)
    monkeypatch.setattr("bertblocks.core.c_library.find_compilers", list)
    with compiled_library(source, OPTIONS) as path:
        assert path == prebuilt
        assert ctypes.CDLL(str(path)).answer() == 42
    assert not cache.exists()
    with pytest.raises(CompileError), compiled_library(source, [*OPTIONS, "-O1"]):
        pass
    source.write_text("int answer(void) { return 43; }\n")
    with pytest.raises(CompileError, match="no C compiler"), compiled_library(source, OPTIONS):
        pass


def test_a_changed_header_gives_another_library(source: Path, cache: Path) -> None:
    header = source.with_name("number.h")
    source.write_text('#include "number.h"\nint answer(void) { return NUMBER; }\n')
    for number in (7, 8):
        header.write_text(f"#define NUMBER {number}\n")
        with compiled_library(source, OPTIONS) as path:
            assert ctypes.CDLL(str(path)).answer() == number
