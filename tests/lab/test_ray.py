"""A study on a real Ray cluster on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bertblocks.lab.local import Job
from bertblocks.lab.ray import run_on_ray
from bertblocks.lab.results import StudyResults
from bertblocks.lab.run import run_study
from tests.lab.helpers import Write, plan_of, run
from tests.lab.test_run import exact

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="ray is not installed; it is too large for a development dependency")
    ray.init(num_cpus=4, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_a_study_on_ray_gives_the_same_results(ray_cluster: Any, write_study: Write, tmp_path: Path) -> None:
    path = write_study(search={"runs": 3, "share": 0.5}, seeds=1)
    outcome = run_study(plan_of(path), tmp_path / "there", run_on_ray, threads=1)
    assert (outcome.signal, outcome.failed) == (None, {})
    _, here, _ = run(path, tmp_path / "here")
    assert exact(StudyResults.load(tmp_path / "there")) == exact(here)
    assert run(path, tmp_path / "there")[2] == []


class Noting:
    """Remembers how many jobs ran at a time at most."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.codes: list[int] = []

    def started(self, job: Job) -> None:
        self.running += 1
        self.most = max(self.most, self.running)

    def ended(self, job: Job, code: int) -> None:
        self.running -= 1
        self.codes.append(code)

    def waiting(self) -> None:
        pass


def test_jobs_that_measure_time_run_one_after_the_other(ray_cluster: Any, tmp_path: Path) -> None:
    for is_alone, most in ((True, 1), (False, 3)):
        # each fails at once, because there is no such trial
        jobs = [Job(str(n), {"trial": str(n)}, tmp_path / f"{n}.txt", 1, is_alone) for n in range(3)]
        noting = Noting()
        run_on_ray(tmp_path, jobs, 1, noting)
        assert (noting.most, noting.codes) == (most, [1, 1, 1])
    assert "spec.json" in (tmp_path / "0.txt").read_text()
