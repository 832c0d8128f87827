"""Runs the jobs of a study in processes of this machine, which share its cores and end with the study."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from rich.console import Console

#: Seconds between looks at the processes, and between lines of progress.
LOOK, REPORT = 0.1, 30.0


@dataclass(frozen=True)
class Job:
    """A piece of work in a study's folder, as `run_job` takes it, and the file for what it prints."""

    name: str
    work: dict[str, Any]
    log: Path
    threads: int
    #: Whether it measures time, so that no other job may share its machine.
    is_alone: bool = False


class Listener(Protocol):
    """Hears how jobs go."""

    def started(self, job: Job) -> None: ...

    def ended(self, job: Job, code: int) -> None: ...

    def waiting(self) -> None:
        """Called from time to time while jobs run."""


#: Runs jobs in a study's folder, at most so many at a time. Returns the signal that stopped them, if any.
Runner = Callable[[Path, Sequence[Job], int, Listener], int | None]


def run_here(folder: Path, jobs: Sequence[Job], slots: int, listener: Listener) -> int | None:
    """Runs one job after the other in this process."""
    from bertblocks.lab.trial import run_job

    for job in jobs:
        listener.started(job)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("a", encoding="utf-8") as log:
            code = run_job(folder, job.work, Console(file=log, width=120))
        listener.ended(job, code)
        if code >= 128:
            return code - 128
    return None


def run_in_processes(folder: Path, jobs: Sequence[Job], slots: int, listener: Listener) -> int | None:
    """Runs each job in a process of its own, `slots` at a time. SIGTERM and Ctrl-C let all of them save and stop."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["bertblocks.lab.trial"])
    waiting, running = list(jobs), dict[Any, Job]()
    stopped: list[int] = []
    with _noting_signals(stopped):
        free = list(range(slots))
        places: dict[Any, int] = {}
        reported = time.monotonic()
        while running or (waiting and not stopped):
            while waiting and free and not stopped:
                job, place = waiting.pop(0), free.pop(0)
                process = context.Process(target=_work, args=(str(folder), job, place), name=job.name)
                process.start()
                running[process], places[process] = job, place
                listener.started(job)
            connection.wait([process.sentinel for process in running], LOOK)
            for process in [process for process in running if not process.is_alive()]:
                code = process.exitcode
                free.append(places.pop(process))
                listener.ended(running.pop(process), 1 if code is None else code)
            if stopped and stopped[-1]:
                for process in running:
                    process.terminate()
                stopped.append(0)
            if time.monotonic() - reported > REPORT:
                listener.waiting()
                reported = time.monotonic()
    return stopped[0] if stopped else None


class _noting_signals:
    """SIGTERM and Ctrl-C are noted. Handlers are possible in the main thread only."""

    def __init__(self, noted: list[int]) -> None:
        self.noted, self.before = noted, dict[int, Any]()

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self.before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted.append(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def _work(folder: str, job: Job, place: int) -> None:
    """The process of a job. It stops, and saves, when the study's process ends."""
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    sys.exit(work(folder, job, place))


def work(folder: str, job: Job, place: int | None = None) -> int:
    """Runs a job in this process, with what it prints in its log."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("a", encoding="utf-8") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        try:
            return _limited(folder, job, place)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except (OSError, ValueError) as error:
            print(f"Error: {' '.join(str(error).split())}", file=log)
        except Exception:
            traceback.print_exc(file=log)
    return 1


def _limited(folder: str, job: Job, place: int | None) -> int:
    import torch
    import transformers

    from bertblocks.lab.trial import run_job

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(job.threads)
    if place is not None:
        _use_gpu(place)
    return run_job(folder, job.work, Console(width=120))


def _use_gpu(place: int) -> None:
    """Shows the process one of the GPUs, before it looks for any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[place] if visible else str(place)


def _stop_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
