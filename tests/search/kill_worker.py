"""`FOLDER`: makes one index in peace, and others in processes that are killed at every flush, one after the other.

Processes are forked, so that torch is imported once. A third index is changed by processes that are killed after a
random time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertblocks.search import adding, models, writer
from bertblocks.search.index import SearchIndex
from tests.search.helpers import FakePredictor, contents, make_model, random_vectors, write

DOCUMENTS = [{"id": n, "text": write(row), "n": n} for n, row in enumerate(random_vectors(60, 4))]
UPDATES = [{"id": n, "text": write(row), "n": -n} for n, row in enumerate(random_vectors(30, 4, seed=1))]


def change(folder: Path, model: Path) -> None:
    """Adds, replaces and removes documents. Each call is repeated until it was completed once."""
    index = SearchIndex.create(folder, model=model, sparse=model, settings={"approximate_from": 20})
    if not (folder.with_suffix(".added")).exists():
        index.add(DOCUMENTS)
        folder.with_suffix(".added").touch()
    index.add(UPDATES)
    known = contents(index)
    if "59" in known:
        index.remove(["58", "59"])


def run_in_child(work: Callable[[], None], kill: Callable[[int], None] = lambda child: None) -> bool:
    """Whether a process finished and was not killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    kill(child)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a process failed by itself"
    return not os.WIFSIGNALED(status)


def dying_at(flush: int, work: Callable[[], None]) -> Callable[[], None]:
    """The work of a process that kills itself at a flush, before or after it, in turn."""

    def run() -> None:
        count, fsync = 0, os.fsync

        def dying(descriptor: int) -> None:
            nonlocal count
            count += 1
            if count == flush and flush % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            fsync(descriptor)
            if count == flush:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = dying  # type: ignore[assignment]
        work()

    return run


def state(folder: Path) -> dict[str, Any]:
    """All contents, the result of searches, and the names of all files."""
    index = SearchIndex.open(folder)
    queries = [write(row) for row in random_vectors(5, 4, seed=2)]
    found = [
        [(hit.id, hit.score) for hit in hits]
        for mode in ("dense", "sparse", "hybrid")
        for hits in index.search(queries, mode=mode, top_k=8)
    ]
    named = {"index.json", *(file.path for file in index.manifest.files)}
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {"contents": contents(index), "found": found, "extra": sorted(files - named)}


def main() -> None:
    models.Predictor = FakePredictor  # type: ignore[misc, assignment]
    adding.SEGMENT_DOCUMENTS, writer.SMALL_SEGMENTS, writer.MERGED_DOCUMENTS = 7, 4, 32
    root = Path(sys.argv[1])
    model = make_model(root / "model")
    straight, killed, timed = root / "straight", root / "killed", root / "timed"
    assert run_in_child(lambda: change(straight, model))
    flush = kills = 0
    while not run_in_child(dying_at(flush := flush + 1, lambda: change(killed, model))):
        kills += 1
        if (killed / "index.json").exists():
            SearchIndex.open(killed)  # whatever happened, there is a complete index
    chance = random.Random(0)

    def kill_soon(child: int) -> None:
        time.sleep(chance.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)

    timely = sum(not run_in_child(lambda: change(timed, model), kill_soon) for _ in range(20))
    assert run_in_child(lambda: change(timed, model))
    expected = state(straight)
    same = [state(folder) == expected for folder in (killed, timed)]
    print(json.dumps({"kills": kills, "timely": timely, "same": same, "extra": expected["extra"]}))


if __name__ == "__main__":
    main()
