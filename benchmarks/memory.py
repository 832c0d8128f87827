"""Peak memory of one contender in a new process: `python -m benchmarks.memory WORKLOAD CONTENDER`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import peak_bytes
from benchmarks.workload import Settings, Workload


def measure(workload: Workload, contender: str) -> int:
    """Bytes that the first run needs in addition to the model and its inputs."""
    function = next(other for other in workload.contenders if other.name == contender).prepare()
    return peak_bytes(function)


def in_fresh_process(key: str, contender: str, settings: Settings) -> int:
    command = [sys.executable, "-m", "benchmarks.memory", key, contender, "--threads", str(settings.threads)]
    if settings.layers is not None:
        command += ["--layers", str(settings.layers)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"Measuring the memory of {contender} on {key} failed:\n{done.stderr}")
    return int(done.stdout)


def main() -> None:
    import torch

    from benchmarks.catalogue import ROWS, STACKS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("contender")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        settings = Settings(1, 0.0, options.threads, options.layers, Path(scratch))
        print(measure({**ROWS, **STACKS}[options.workload](settings), options.contender))


if __name__ == "__main__":
    main()
