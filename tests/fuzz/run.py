"""Runs cases, each in a fork of a process that has imported everything, with limits on time and memory."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.cases import Case, make_case

#: Seconds of CPU time, which unlike seconds on the clock do not depend on what else the machine does.
MAX_SECONDS = 20
#: Seconds on the clock after which a process that does nothing is ended.
MAX_WAIT = 300
MAX_BYTES = 4 * 2**30
#: The most characters of a message.
MAX_CHARACTERS = 500
#: The exit code of a case that raises an error that no command reports.
UNREPORTED = 99
#: Modules that cannot be imported without Triton.
NEED_TRITON = ("bertblocks.nn.ops.fused", "bertblocks.nn.ops.short_attention")


@dataclass(frozen=True)
class Outcome:
    """What a case did, and what is wrong with it."""

    case: Case
    code: int
    errors: str
    #: CPU time.
    seconds: float
    problems: list[str]

    def __str__(self) -> str:
        shown = [f"case {self.case.number} ({self.case.kind}; {self.case.note}): {'; '.join(self.problems)}"]
        shown += [f"  bertblocks {' '.join(map(_shorten, self.case.arguments))}", f"  exit code {self.code}"]
        return "\n".join([*shown, *(f"  {line[:600]}" for line in self.errors.splitlines()[-8:])])


def _shorten(argument: str) -> str:
    return ascii(argument) if len(argument) < 100 else f"{argument[:100]!a}..."


def run_cases(numbers: Sequence[int], seeds: Path) -> Iterator[Outcome]:
    """Run cases one after another."""
    _import_everything()
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="bertblocks-fuzz-") as name:
            yield run_case(number, seeds, Path(name))


def _import_everything() -> None:
    """Import what commands import inside their functions, so that no fork has to."""
    import importlib
    import pkgutil

    import bertblocks

    for module in pkgutil.walk_packages(bertblocks.__path__, "bertblocks."):
        if not module.name.startswith(("bertblocks.flax", "bertblocks.__main__", *NEED_TRITON)):
            importlib.import_module(module.name)
    for name in ("datasets", "openpyxl", "sklearn.metrics", "seqeval.metrics", "scipy.stats", "pyarrow.dataset"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise a fork's collector touches, and so copies, all of this memory


def run_case(number: int, seeds: Path, folder: Path) -> Outcome:
    """Run one case in a folder of its own."""
    work, scratch = folder / "work", folder / "tmp"
    work.mkdir()
    scratch.mkdir()
    case = make_case(number, seeds, work)
    (folder / "stdin").write_bytes(case.stdin)
    before = _list(work)
    child = os.fork()
    if child == 0:
        _run_in_child(case, folder)
    code, usage = _wait(child)
    errors = (folder / "stderr").read_bytes().decode("utf-8", "replace")
    problems = list(_check(case, code, errors, usage, before, work, scratch, child))
    return Outcome(case, code, errors, usage.ru_utime + usage.ru_stime, problems)


def _run_in_child(case: Case, folder: Path) -> None:
    """Become the command: this function does not return."""
    code = UNREPORTED
    try:
        os.setsid()
        for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
            opened = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(opened, descriptor)
            os.close(opened)
            mode, errors = ("r" if name == "stdin" else "w"), ("backslashreplace" if name == "stderr" else None)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", errors=errors, closefd=False))  # noqa: SIM115
        os.chdir(folder / "work")
        os.environ.update(TMPDIR=str(folder / "tmp"), HOME=str(folder / "tmp"), TERM="dumb", COLUMNS="100")
        tempfile.tempdir = None
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MAX_BYTES,) * 2)
        from bertblocks.cli.main import main

        sys.argv = ["bertblocks", *case.arguments]
        try:
            main()
            code = 0
        except SystemExit as ending:
            if isinstance(ending.code, str):
                print(ending.code, file=sys.stderr)
            code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _wait(child: int) -> tuple[int, resource.struct_rusage]:
    """The exit code, negative for a signal, and what the process used."""
    deadline = time.monotonic() + MAX_WAIT
    pause = 0.001
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), usage
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _check(
    case: Case,
    code: int,
    errors: str,
    usage: resource.struct_rusage,
    before: dict[str, str],
    work: Path,
    scratch: Path,
    session: int,
) -> Iterator[str]:
    """What is wrong with how a case ended."""
    if code < 0:
        yield f"ended by signal {-code}" + (f": more than {MAX_SECONDS} s" if -code == signal.SIGXCPU else "")
    elif code not in (0, 1, 2):
        yield f"ended with exit code {code}"
    if "Traceback" in errors:
        yield "shows a traceback"
    is_help = code == 2 and not case.arguments
    if code in (1, 2) and not is_help:
        yield from _check_message(code, errors)
    if usage.ru_maxrss * 1024 > MAX_BYTES:
        yield f"took {usage.ru_maxrss / 2**20:.1f} GB"
    after = _list(work)
    if changed := [name for name, content in before.items() if after.get(name) != content]:
        yield f"changed {', '.join(changed[:3])}"
    left = [name for name in after if name not in before]
    if code != 0:
        left = [name for name in left if name.partition("/")[0] not in case.may_leave]
    else:
        left = [name for name in left if name.endswith(".partial")]
    if left:
        yield f"left {', '.join(left[:3])}"
    if rest := list(_list(scratch)):
        yield f"left {', '.join(rest[:3])} in the folder for temporary files"
    if processes := _processes(session):
        yield f"left {len(processes)} processes"
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _check_message(code: int, errors: str) -> Iterator[str]:
    lines = [line for line in errors.splitlines() if line.strip()]
    if not lines:
        yield "gives no message"
        return
    if code == 1 and not all(line.startswith("bertblocks: ") for line in lines):
        yield "prints something else than its messages"
    longest = max(lines, key=len) if code == 1 else _usage_error(errors)
    if len(longest) > MAX_CHARACTERS + len("bertblocks: "):
        yield f"gives a message of {len(longest)} characters"
    if re.search(r"<class '|\bobject at 0x", lines[-1]):
        yield "gives a message with Python's names for objects"


def _usage_error(errors: str) -> str:
    """The text inside typer's box."""
    return " ".join(line.strip("│ ") for line in errors.splitlines() if line.startswith("│"))


def _list(folder: Path) -> dict[str, str]:
    """The entries of a folder and their contents."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder"
    return found


def _processes(session: int) -> list[int]:
    """The processes that a case has left."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(entry))
    return found


@contextlib.contextmanager
def seeds_folder() -> Iterator[Path]:
    from tests.fuzz.seeds import make_seeds

    folder = Path(tempfile.mkdtemp(prefix="bertblocks-seeds-"))
    try:
        make_seeds(folder)
        yield folder
    finally:
        shutil.rmtree(folder)
