"""Two lanes of waiting segments: short requests overtake long ones, and long ones never starve."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from bertblocks.inference.pipeline import Request
from bertblocks.inference.splitting import Segment
from bertblocks.serve.models import PipelineKey

#: A request of at most this many tokens is short.
SHORT_TOKENS = 64
#: While short requests keep coming, long ones get a batch after this many seconds. Short ones overtake within it.
AGEING = 0.01
#: A long request lets another, that arrives up to this many seconds per token of its own later, overtake it.
SECONDS_PER_TOKEN = 1e-4


@dataclass(eq=False)
class Job:
    """All inputs of one call, on their way through the model."""

    key: PipelineKey
    #: Jobs with equal keys may share batches.
    batch_key: Hashable
    requests: Sequence[Request]
    arrived: float
    #: Called once, from the thread that ran the last batch, with an error if there was one.
    on_done: Callable[[Exception | None], object]
    tokens: int = 0
    #: Segments that have not run.
    remaining: int = 0
    #: Tokens that wait in a lane.
    waiting: int = 0
    #: When its first batch started and its last one ended.
    started: float | None = None
    ended: float = 0.0
    #: Whether nobody wants the result any more, or it has failed.
    is_over: bool = False

    def __post_init__(self) -> None:
        for request in self.requests:
            self.remaining += len(request.segments)
            self.tokens += sum(len(segment.sequence.ids) for segment in request.segments)
        self.waiting = self.tokens

    @property
    def is_short(self) -> bool:
        return self.tokens <= SHORT_TOKENS


@dataclass(frozen=True)
class Entry:
    """One segment of a job."""

    job: Job
    request: Request
    number: int

    @property
    def segment(self) -> Segment:
        return self.request.segments[self.number]

    @property
    def tokens(self) -> int:
        return len(self.segment.sequence.ids)


@dataclass(frozen=True)
class Batch:
    """Segments that run together."""

    entries: list[Entry]
    is_short: bool

    @property
    def key(self) -> PipelineKey:
        """A pipeline that runs them; all of theirs would give the same."""
        return self.entries[0].job.key

    @property
    def segments(self) -> list[Segment]:
        return [entry.segment for entry in self.entries]

    @property
    def tokens(self) -> int:
        return sum(entry.tokens for entry in self.entries)

    @property
    def jobs(self) -> list[Job]:
        return list(dict.fromkeys(entry.job for entry in self.entries))


@dataclass
class Lane:
    """Waiting segments of all models and pipelines, those that rank first at the front."""

    groups: dict[Hashable, list[tuple[float, int, Entry]]] = field(default_factory=dict)

    def add(self, rank: float, order: int, entry: Entry) -> None:
        heapq.heappush(self.groups.setdefault(entry.job.batch_key, []), (rank, order, entry))

    def first(self) -> Entry | None:
        """The entry that is next; those that nobody wants are dropped on the way."""
        best: tuple[float, int, Entry] | None = None
        for key in list(self.groups):
            heap = self.groups[key]
            while heap and heap[0][2].job.is_over:
                heapq.heappop(heap)
            if not heap:
                del self.groups[key]
            elif best is None or heap[0][:2] < best[:2]:
                best = heap[0]
        return None if best is None else best[2]

    def take(self, budget: int) -> list[Entry]:
        """Entries that can share a batch, the next one first, within a number of tokens if they are more than one."""
        first = self.first()
        if first is None:
            return []
        heap = self.groups[first.job.batch_key]
        taken: list[Entry] = []
        tokens = 0
        while heap:
            entry = heap[0][2]
            if not entry.job.is_over:
                if taken and tokens + entry.tokens > budget:
                    break
                taken.append(entry)
                tokens += entry.tokens
            heapq.heappop(heap)
        if not heap:
            del self.groups[first.job.batch_key]
        return taken


class Lanes:
    """Decides which segments run next. It knows no threads and no clock: callers say what time it is."""

    def __init__(self, budget: int) -> None:
        #: Tokens of a batch.
        self.budget = budget
        self._short, self._long = Lane(), Lane()
        self._numbers = itertools.count()
        self._last_long = 0.0

    def add(self, job: Job) -> None:
        lane, rank = (self._short, job.arrived) if job.is_short else (self._long, self._rank(job))
        for entry in _entries(job):
            lane.add(rank, next(self._numbers), entry)

    @staticmethod
    def _rank(job: Job) -> float:
        return job.arrived + job.tokens * SECONDS_PER_TOKEN

    def take(self, now: float) -> Batch | None:
        """The next batch: short requests first, unless long ones have waited for `AGEING` seconds."""
        oldest = self._long.first()
        has_aged = oldest is not None and now - max(oldest.job.arrived, self._last_long) > AGEING
        if not has_aged and (batch := self.take_short()) is not None:
            return batch
        if oldest is not None:
            self._last_long = now
            return self._batch(self._long.take(self.budget), is_short=False)
        return self.take_short()

    def take_short(self) -> Batch | None:
        """The next batch of short requests, if there are any."""
        entries = self._short.take(self.budget)
        return self._batch(entries, is_short=True) if entries else None

    @property
    def has_short(self) -> bool:
        return bool(self._short.groups)

    @staticmethod
    def _batch(entries: list[Entry], is_short: bool) -> Batch:
        for entry in entries:
            entry.job.waiting -= entry.tokens
        return Batch(entries, is_short)


def _entries(job: Job) -> Iterator[Entry]:
    for request in job.requests:
        for number in range(len(request.segments)):
            yield Entry(job, request, number)
