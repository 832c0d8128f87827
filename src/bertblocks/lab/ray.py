"""Runs the jobs of a study on a Ray cluster. All nodes must see the study's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertblocks.core.requirements import require_packages
from bertblocks.lab.local import REPORT, Job, Listener, work


def run_on_ray(folder: Path, jobs: Sequence[Job], slots: int, listener: Listener) -> int | None:
    """Runs each job as a task with its number of CPUs and, where the cluster has them, one GPU.

    Ray decides how many run at a time, unless they measure time: then it is one. A task of a lost node runs again
    elsewhere and goes on from its checkpoint.
    """
    require_packages(["ray"], "--on ray")
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # the cluster of RAY_ADDRESS, else one on this machine
    num_gpus = 1 if ray.cluster_resources().get("GPU") else 0
    # a process for each task, so that its peak memory is its own
    task: Any = ray.remote(max_calls=1, max_retries=-1)(work)
    waiting, running = list(jobs), dict[Any, Job]()
    while waiting or running:
        while waiting and not (running and waiting[0].is_alone):
            job = waiting.pop(0)
            running[task.options(num_cpus=job.threads, num_gpus=num_gpus).remote(str(folder), job)] = job
            listener.started(job)
        ready, _ = ray.wait(list(running), num_returns=1, timeout=REPORT)
        for reference in ready:
            listener.ended(running.pop(reference), ray.get(reference))
        if not ready:
            listener.waiting()
    return None
