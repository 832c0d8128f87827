"""Worker processes that end with their parent."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process

from bertblocks.text.records import DataError


@contextlib.contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes. A worker that is killed raises `DataError`, and no worker outlives this process."""
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker) as pool:
        try:
            yield pool
        except BrokenProcessPool as error:
            raise DataError(
                "A worker process was killed, most likely for lack of memory; run again with fewer workers. Finished "
                "shards are kept."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
