"""Ray clusters: joining one, and running many calls of a function on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from bertblocks.core.requirements import require_packages


def connect_ray(feature: str) -> Any:
    """The module `ray`, connected to the cluster of RAY_ADDRESS, or else to one on this machine."""
    require_packages(["ray"], feature)
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    return ray


def limit_threads(threads: int) -> dict[str, Any]:
    """Keeps libraries from starting a thread for every core of the node in every process."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    return {"env_vars": {name: str(threads) for name in names}}


def take_ready(busy: list[Any]) -> Any:
    """Waits for one of the calls in `busy`, removes it and returns its result; an error of the call is raised here."""
    import ray

    (ready,), _ = ray.wait(busy, num_returns=1)
    busy.remove(ready)
    try:
        return ray.get(ready)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None


def call_on_ray(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], feature: str) -> Iterator[Any]:
    """The results of calls of a function, as they are ready. A call whose node is lost runs again."""
    ray = connect_ray(feature)
    remote = ray.remote(function).options(num_cpus=1, max_retries=-1, runtime_env=limit_threads(1))
    room = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
    waiting = iter(calls)
    busy = [remote.remote(*call) for call in islice(waiting, room)]
    while busy:
        yield take_ready(busy)
        busy.extend(remote.remote(*call) for call in islice(waiting, 1))
