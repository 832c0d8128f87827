"""Bulk work on a Ray cluster: a task for Ray Data, and the shards of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from bertblocks.bulk.apply import Apply
from bertblocks.bulk.worker import Row, ShardResult, Worker
from bertblocks.core.ray_cluster import connect_ray, limit_threads, take_ready
from bertblocks.core.requirements import require_packages

#: Shards that wait for each actor, so that none waits for the reader.
WAITING = 1


def map_dataset(
    dataset: Any, task: str, model: str, *, workers: int = 1, threads: int = 1, rows: int = 4096, **options: Any
) -> Any:
    """Adds the result columns of a task to a Ray dataset, with `workers` actors of `threads` CPUs each.

    `rows` are the rows of a batch; `options` are those of `Apply`.
    """
    require_packages(["ray"], "map_dataset")
    import ray.data

    options["predictor"] = {**options.get("predictor", {}), "threads": threads}
    return dataset.map_batches(
        Apply,
        fn_constructor_args=(task, model),
        fn_constructor_kwargs=options,
        batch_format="pyarrow",
        batch_size=rows,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=threads,
        runtime_env=limit_threads(threads),
    )


def run_on_ray(
    worker: Worker, shards: Iterator[tuple[int, Iterable[Row]]], on_rows: Callable[[int], None]
) -> Iterator[ShardResult]:
    """Computes the shards of a job in as many actors as the cluster has room for; this process reads the rows.

    All nodes must see the output folder and the model. A lost actor is replaced, and its shard computed again.
    """
    ray = connect_ray("--on ray")
    threads = worker.plan.settings.threads or 1
    plan = replace(worker.plan, settings=replace(worker.plan.settings, threads=threads))
    actor: Any = ray.remote(Worker).options(
        num_cpus=threads, max_restarts=-1, max_task_retries=-1, runtime_env=limit_threads(threads)
    )
    workers = [actor.remote(plan) for _ in range(max(1, int(ray.cluster_resources().get("CPU", 1)) // threads))]
    most = len(workers) * (1 + WAITING)
    busy: dict[Any, Any] = {}
    for number, rows in shards:
        if len(busy) == most:
            yield _collect(busy, on_rows)
        waiting = list(busy.values())
        chosen = min(workers, key=waiting.count)
        busy[chosen.run.remote(number, list(rows))] = chosen
    while busy:
        yield _collect(busy, on_rows)
    for remote in workers:
        ray.kill(remote)


def _collect(busy: dict[Any, Any], on_rows: Callable[[int], None]) -> ShardResult:
    """The result of a shard that is ready."""
    waiting = list(busy)
    result: ShardResult = take_ready(waiting)
    for done in busy.keys() - set(waiting):
        del busy[done]
    on_rows(result.rows)
    return result
