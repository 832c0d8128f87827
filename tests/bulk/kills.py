"""`KILLS`: kills that many processes of bulk jobs at random moments, and compares the output with undisturbed jobs.

Jobs run with one worker and with two, in turn. Processes are forked, so that torch is imported once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet  # noqa: F401

import bertblocks.tasks.predictor  # noqa: F401
from bertblocks.core.storage import PARTIAL
from tests.bulk.helpers import make_model, make_rows, read_files, run, write_jsonl

ROWS, ROWS_PER_SHARD = 4000, 100


def start(model: str, inputs: list[str], output: Path, shard: tuple[int, int]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run("embed", model, inputs, output, shard=shard, rows_per_shard=ROWS_PER_SHARD, window=64)
            code = 0
        finally:
            os._exit(code)
    return child


def finish(child: int) -> bool:
    """Whether a process finished and was not killed."""
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a process failed by itself"
    return not os.WIFSIGNALED(status)


def kill_jobs(root: Path, kills: int, rows: int = ROWS) -> dict[str, int]:
    """Counts of kills, of jobs that were completed in spite of them, and of kills that left a file unfinished."""
    data = make_rows(rows)
    data[7]["text"] = data[rows // 2]["text"] = None
    model, inputs = make_model(root / "model"), [write_jsonl(root / "in.jsonl", data)]
    started = time.perf_counter()
    assert finish(start(model, inputs, root / "straight", (0, 1)))
    seconds = time.perf_counter() - started
    expected = read_files(root / "straight")
    assert len(expected) == rows // ROWS_PER_SHARD + 3, "shards, a manifest and the bad rows of two shards"
    chance = random.Random(0)
    counts = {"kills": 0, "jobs": 0, "unfinished files": 0, "shards": 0}
    while counts["kills"] < kills:
        output, workers = root / f"killed-{counts['jobs']}", counts["jobs"] % 2 + 1
        left = [(number, workers) for number in range(workers)]
        while left:
            running = {shard: start(model, inputs, output, shard) for shard in left}
            if counts["kills"] < kills:
                time.sleep(chance.uniform(0, seconds / 2))
                for child in running.values():
                    os.kill(child, signal.SIGKILL)
            left = [shard for shard, child in running.items() if not finish(child)]
            counts["kills"] += len(left)
            counts["unfinished files"] += len(list(output.glob(f".*{PARTIAL}")))
        assert finish(start(model, inputs, output, (0, 1)))  # has nothing to do but to clear up
        found = read_files(output)
        assert found == expected, sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        counts["jobs"] += 1
        counts["shards"] += rows // ROWS_PER_SHARD
    return counts | {"milliseconds of an undisturbed job": round(seconds * 1000)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(kill_jobs(Path(folder), int(sys.argv[1]))))
