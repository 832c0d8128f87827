"""From the command to its result: `python -m benchmarks --only start` runs `bertblocks embed` in new processes.

Next to it, in turns: `import torch` alone, of which the command runs a part, and sentence-transformers, from its import
to the same vector. CPU seconds are printed too, because they depend less on what else the machine does. The first round
warms the disk, and writes Python's bytecode.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.measure import Spread
from benchmarks.sentences import checkpoint_folder

GOAL = 1.5
TEXT = "How long does it take to start?"
THEIRS = """
import json, sys
from sentence_transformers import SentenceTransformer
print(json.dumps({"embedding": SentenceTransformer(sys.argv[1], device="cpu").encode(sys.argv[2]).tolist()}))
"""
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "sentence-transformers": ["-c", THEIRS, checkpoint_folder(), TEXT],
    "bertblocks embed": ["-m", "bertblocks", "embed", checkpoint_folder(), TEXT, "--json", "--dtype", "float32"],
}
#: Vectors of both sides agree if their cosine is above this.
COSINE = 0.99999


def run(arguments: list[str], environment: dict[str, str]) -> tuple[float, float, str]:
    """Seconds, CPU seconds and output of a new process."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment)
    seconds, after = time.perf_counter() - start, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, used, done.stdout


def measure(rounds: int) -> dict[str, Any]:
    """Seconds and CPU seconds of each command."""
    walls: dict[str, list[float]] = {name: [] for name in COMMANDS}
    used: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for number in range(rounds + 1):
            outputs = {}
            for name, arguments in COMMANDS.items():
                seconds, cpu, outputs[name] = run(arguments, environment)
                if number:
                    walls[name].append(seconds)
                    used[name].append(cpu)
    theirs, ours = (np.array(json.loads(outputs[name])["embedding"]) for name in list(COMMANDS)[1:])
    if ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) < COSINE:
        raise SystemExit("The vectors differ, so their times say nothing.")
    spreads = {name: [asdict(Spread.of(times[name])) for times in (walls, used)] for name in COMMANDS}
    return {"title": "From the command to its result", "commands": spreads, "goal": GOAL}
