"""`FOLDER PARALLEL PROCESSES`: trains a sharded model in peace, and again while processes are killed in their saves."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from bertblocks.training.distributed import join
from tests.training import helpers

OPTIONS = ["phases.0.duration=16", "run.checkpoints.every=4", "run.ema=0.9"]
#: In each attempt: the process that dies, and the file that it is about to flush then.
KILLS = [
    (-1, r"\.step-00000008-.*/shard-[^/]*\.safetensors$"),  # its part
    (0, r"\.step-00000008-.*/shard-[^/]*\.safetensors$"),
    (-1, r"\.step-00000012-.*/shards$"),  # its part is on the disk, but the main process does not know it yet
    (0, r"/step-00000012/.*complete"),  # all files are there but the marker
]
#: Seconds that processes train on before one dies.
LATER = 1.0


def work(folder: Path, parallel: str, kills: list[tuple[int, str]]) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    world, attempt = join("cpu"), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    trainer = helpers.make_trainer(folder, *OPTIONS, *parallel.split(), dropout=0.1, world=world)
    if world.is_main:
        latest = trainer.checkpoints.find_latest()
        parts = list(folder.glob("checkpoints/.step-*/shards/*.safetensors"))
        found = {"latest": latest.path and latest.path.name, "problems": latest.problems, "parts": len(parts)}
        with (folder.with_suffix(".jsonl")).open("a") as file:
            file.write(json.dumps(found) + "\n")
    if attempt < len(kills) and world.rank == kills[attempt][0] % world.size:
        helpers.die_when_flushing(kills[attempt][1], LATER)
    trainer.train()


def main() -> None:
    folder, parallel, processes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    for name, kills in (("straight", []), ("killed", KILLS)):
        helpers.launch_forked(work, folder / name, parallel, kills, processes=processes, restarts=len(kills))


if __name__ == "__main__":
    main()
