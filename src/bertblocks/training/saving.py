"""Writes checkpoints in a thread while the model trains on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bertblocks.core.tensor_files import PARTS
from bertblocks.training.checkpoints import CheckpointFolder
from bertblocks.training.distributed import World
from bertblocks.training.sharded import write_parts
from bertblocks.training.state import Snapshot, TrainState


class CheckpointWriter:
    """Writes one checkpoint at a time. Of a sharded model every process writes its parts, else the main one all.

    A checkpoint counts once the main process has marked it as complete, so a process that dies while one is written
    leaves the one before. `close` waits without asking other processes.
    """

    def __init__(self, folder: CheckpointFolder, world: World, is_sharded: bool) -> None:
        self.folder, self.world, self.is_sharded = folder, world, is_sharded
        # the thread talks to those of the other processes while training does so in its own groups
        self._group = dist.new_group(backend="gloo") if is_sharded else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(
        self, snapshot: Snapshot | None, state: TrainState, write_extras: Callable[[Path], None], protected: int | None
    ) -> None:
        """Starts to write a snapshot, after the last one. Only processes that write need one."""
        if snapshot is not None:
            work = self._write if self.world.is_main else self._write_along
            self._writing = self._pool.submit(work, snapshot, asdict(state), write_extras, protected)

    def wait(self) -> None:
        """Waits until the checkpoint is complete. If writing failed in one process, all raise an error."""
        writing, self._writing = self._writing, None
        self.world.run_on_all(writing.result if writing is not None else lambda: None)

    def close(self) -> None:
        self._pool.shutdown()

    def _write(
        self, snapshot: Snapshot, state: dict[str, Any], write_extras: Callable[[Path], None], protected: int | None
    ) -> None:
        shared: list[str | None] = [None]

        def write_files(folder: Path) -> dict[str, str]:
            checksums: dict[str, str] = {}
            if self._group is not None:
                (folder / PARTS).mkdir()
                shared[0] = str(folder / PARTS)
                dist.broadcast_object_list(shared, group_src=0, group=self._group)
                checksums = write_parts(snapshot.parts, folder / PARTS, self._group)
            snapshot.write(folder, state)
            write_extras(folder)
            return {f"{PARTS}/{name}": value for name, value in checksums.items()}

        try:
            self.folder.write(state["step"], write_files, protected)
        finally:
            if self._group is not None and shared[0] is None:  # the others wait for a folder
                dist.broadcast_object_list(shared, group_src=0, group=self._group)

    def _write_along(self, snapshot: Snapshot, *_: Any) -> None:
        """Writes the parts of a process that is not the main one."""
        assert self._group is not None
        shared: list[str | None] = [None]
        dist.broadcast_object_list(shared, group_src=0, group=self._group)
        if shared[0] is not None:
            write_parts(snapshot.parts, Path(shared[0]), self._group)
