"""Which segments run next, with a clock of the test's own and no threads, and how the queue counts them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertblocks.inference.pipeline import Request
from bertblocks.inference.splitting import Segment
from bertblocks.serve.batch_queue import BatchQueue
from bertblocks.serve.lanes import AGEING, SHORT_TOKENS, Batch, Job, Lanes
from bertblocks.serve.models import PipelineKey
from bertblocks.serve.observer import Observer
from bertblocks.text.encoding import EncodedSequence
from bertblocks.text.windows import Window


def make_job(lengths: Sequence[int], arrived: float = 0.0, method: str = "encode") -> Job:
    segments = [Segment(EncodedSequence([1] * length, [0] * length, 1), Window(0, 1, 0, 1)) for length in lengths]
    key = PipelineKey(0, method, None, ())
    return Job(key, method, [Request([segment]) for segment in segments], arrived, lambda error: None)


def test_segments_of_several_jobs_share_a_batch_within_the_budget() -> None:
    lanes = Lanes(budget=30)
    jobs = [make_job([10], arrived=number) for number in range(4)]
    for job in jobs:
        lanes.add(job)
    first, second = lanes.take(5.0), lanes.take(5.0)
    assert (first.jobs, first.tokens, second.jobs) == (jobs[:3], 30, jobs[3:])
    assert lanes.take(5.0) is None


def test_a_segment_beyond_the_budget_runs_alone() -> None:
    lanes = Lanes(budget=100)
    lanes.add(make_job([500, 20]))
    sizes = [lanes.take(0.0).tokens, lanes.take(0.0).tokens]
    assert sizes == [500, 20]


def test_jobs_that_cannot_share_a_forward_pass_do_not_share_a_batch() -> None:
    lanes = Lanes(budget=100)
    jobs = [make_job([5], 0.0, "encode"), make_job([5], 1.0, "classify"), make_job([5], 2.0, "encode")]
    for job in jobs:
        lanes.add(job)
    assert lanes.take(3.0).jobs == [jobs[0], jobs[2]]
    assert lanes.take(3.0).jobs == [jobs[1]]


def test_short_jobs_overtake_long_ones_until_these_have_aged() -> None:
    lanes = Lanes(budget=1000)
    long = make_job([SHORT_TOKENS + 1], arrived=0.0)
    early, late = make_job([5], arrived=AGEING / 2), make_job([5], arrived=2 * AGEING)
    lanes.add(long)
    lanes.add(early)
    assert lanes.take(AGEING / 2).jobs == [early]
    lanes.add(late)
    batch = lanes.take(2 * AGEING)
    assert (batch.jobs, batch.is_short) == ([long], False)
    assert lanes.take_short().jobs == [late]


def test_many_small_texts_in_one_request_are_a_long_job() -> None:
    assert not make_job([10] * 50).is_short
    assert make_job([10, 10]).is_short


def test_a_small_long_job_overtakes_a_huge_one_that_came_just_before() -> None:
    lanes = Lanes(budget=100)
    huge, small = make_job([100] * 1000, arrived=0.0), make_job([SHORT_TOKENS + 1], arrived=1.0)
    lanes.add(huge)
    lanes.add(small)
    assert lanes.take(1.0).jobs == [small]
    lanes.add(make_job([SHORT_TOKENS + 1], arrived=11.0))  # the huge one has waited longer than its own size
    assert lanes.take(11.0).jobs == [huge]


def test_dropped_jobs_cost_nothing() -> None:
    lanes = Lanes(budget=100)
    dropped, wanted = make_job([10]), make_job([10])
    lanes.add(dropped)
    lanes.add(wanted)
    dropped.is_over = True
    assert lanes.take(0.0).jobs == [wanted]
    assert lanes.take(0.0) is None
    assert not lanes.has_short


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=5), min_size=1, max_size=12),
    budget=st.integers(1, 300),
    drops=st.sets(st.integers(0, 11)),
)
def test_every_segment_of_wanted_jobs_runs_exactly_once(jobs: list[list[int]], budget: int, drops: set[int]) -> None:
    lanes = Lanes(budget)
    made = [make_job(lengths, arrived=number) for number, lengths in enumerate(jobs)]
    for job in made:
        lanes.add(job)
    for number in drops & set(range(len(made))):
        made[number].is_over = True
    runs: list[int] = []
    now = 100.0
    while (batch := lanes.take(now)) is not None:
        assert len(batch.entries) == 1 or batch.tokens <= budget
        runs += [id(entry.request) for entry in batch.entries]
        now += 0.1
    wanted = [id(request) for number, job in enumerate(made) if number not in drops for request in job.requests]
    assert sorted(runs) == sorted(wanted)
    assert all(job.waiting == 0 for number, job in enumerate(made) if number not in drops)


@pytest.mark.parametrize("busy", [True, False])
def test_long_jobs_are_never_starved(busy: bool) -> None:
    """While short jobs never end, a long job still gets a batch within the time that ageing allows."""
    lanes = Lanes(budget=100)
    lanes.add(make_job([SHORT_TOKENS + 1], arrived=0.0))
    now = 0.0
    while True:
        if busy:
            lanes.add(make_job([5], arrived=now))
        batch = lanes.take(now)
        if not batch.is_short:
            break
        now += 0.001
    assert now <= AGEING + 0.0011


# ---------------------------------------------------------------------- the queue


def take_batches(lengths: Sequence[int], budget: int) -> tuple[BatchQueue, list[Job], list[Batch]]:
    queue, jobs = BatchQueue(budget, Observer()), [make_job([length]) for length in lengths]
    for job in jobs:
        queue.add(job)
    return queue, jobs, [batch for _ in jobs if (batch := queue.take())]


def test_the_speed_is_that_of_all_batches_that_run_together() -> None:
    queue, _, batches = take_batches([100, 100], budget=100)
    queue.end(batches[0], (["a"], 0.5), "model")
    assert queue.speed == pytest.approx(2 * 100 / 0.5)
    queue.end(batches[1], (["b"], 0.25), "model")  # alone at its end
    assert queue.speed == pytest.approx(400)
    assert queue.tokens == 0


@pytest.mark.parametrize("result", [(["a"], 0.5), ValueError("broken")])
def test_a_batch_that_ends_gives_its_tokens_back_once(result: tuple[list[str], float] | Exception) -> None:
    queue, (first, second), (batch, _) = take_batches([70, 100], budget=100)
    assert queue.tokens == 170
    queue.end(batch, result, "model")
    assert queue.tokens == 100
    assert (first.is_over, second.is_over) == (True, False)
    assert not queue.drop(first)
    assert queue.tokens == 100
