"""The stream of packed rows: permutations, packing, positions in the stream."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertblocks.data.hashing import combine, draw, permute, uniform
from bertblocks.data.packing import best_fit
from bertblocks.data.stream import (
    DocumentChunk,
    PackedStream,
    Position,
    StreamSource,
    cut_chunks,
    sample_documents,
)


class Texts:
    """Documents whose tokens encode their origin: a million times the document, plus the position."""

    def __init__(self, lengths: Any) -> None:
        self.lengths = np.array(lengths)

    def __getitem__(self, index: Any) -> Any:
        return (index * 1_000_000 + np.arange(self.lengths[index])).astype(np.int64)


lengths_of_texts = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)


# ---------------------------------------------------------------------- hashing


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_permutations_are_bijective(size: Any, key: Any) -> None:
    assert sorted(permute(np.arange(size), size, combine(key)).tolist()) == list(range(size))


@given(st.integers(1, 10**15), st.integers(0, 2**63), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_permuting_one_index_equals_permuting_many(size: Any, key: Any, index: Any) -> None:
    indices = (index + np.arange(5)) % size
    together = permute(indices, size, combine(key))
    alone = [int(permute(indices[number : number + 1], size, combine(key))[0]) for number in range(5)]
    assert together.tolist() == alone
    assert all(0 <= place < size for place in alone)


def test_all_permutations_of_three_are_equally_likely() -> None:
    keys = combine("test", np.repeat(np.arange(12_000), 3))
    found = permute(np.tile(np.arange(3), 12_000), 3, keys).reshape(-1, 3)
    counts = Counter(map(tuple, found.tolist()))
    assert len(counts) == 6
    # 2,000 expected of each, with a standard deviation of 41
    assert all(abs(count - 2000) < 5 * 41 for count in counts.values())


def test_uniform_numbers_are_uniform_along_counters_and_along_keys() -> None:
    for bits in (draw(combine(1), np.arange(100_000)), draw(combine(2, np.arange(100_000)), np.zeros(1))):
        numbers = uniform(bits)
        assert numbers.min() >= 0
        assert numbers.max() < 1
        # the standard deviation of each tenth's count is 95; neighbours must not be related
        assert np.abs(np.histogram(numbers, bins=10, range=(0, 1))[0] - 10_000).max() < 5 * 95
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / np.sqrt(100_000)


# ---------------------------------------------------------------------- packing


def naive_best_fit(lengths: Any, capacity: Any) -> Any:
    """How full each row gets if all rows are searched for every chunk."""
    rooms: list[int] = []
    for size in sorted(lengths, reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda number: rooms[number])] -= size
        else:
            rooms.append(capacity - size)
    return sorted(capacity - room for room in rooms)


@given(st.lists(st.integers(1, 50), max_size=120), st.integers(50, 90))
@settings(deadline=None)
def test_packing_is_best_fit_decreasing(lengths: Any, capacity: Any) -> None:
    rows = best_fit(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert sorted(sum(lengths[index] for index in row) for row in rows) == naive_best_fit(lengths, capacity)


@pytest.mark.parametrize("wrong", [0, 9])
def test_packing_a_length_beyond_the_row_raises(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"A length is {wrong}; rows of 8 slots take lengths of 1 to 8"):
        best_fit([3, wrong], 8)


# ---------------------------------------------------------------------- the stream


def names(rows: Any) -> Any:
    return [
        [(chunk.source, chunk.epoch, chunk.index, chunk.stream_index, chunk.ids.tolist()) for chunk in row]
        for row in rows
    ]


@given(lengths_of_texts, st.integers(4, 24), st.integers(0, 3), st.integers(0, 99), st.lists(st.integers(0, 9)))
@settings(max_examples=50, deadline=None)
def test_one_large_take_equals_several_small_ones(
    lengths: Any, length: Any, overhead: Any, seed: Any, counts: Any
) -> None:
    def make() -> Any:
        return PackedStream([StreamSource(Texts(lengths))], length, overhead, seed, pool_rows=3)

    whole, end = make().take(Position(), sum(counts))
    position, parts = Position(), []
    for count in counts:
        # a stream that was just made, as after a restart, knows as much as one in use
        rows, position = make().take(position, count)
        parts.extend(rows)
    assert names(parts) == names(whole)
    assert position == end


def take_epochs(stream: Any, epochs: Any) -> Any:
    """All chunks of these epochs of a stream with one source."""
    chunks: list[DocumentChunk] = []
    position = Position()
    wanted = epochs * stream.sources[0].count
    while sum(chunk.epoch < epochs for chunk in chunks) < wanted:
        rows, position = stream.take(position, 5)
        assert all(sum(len(chunk.ids) + stream.overhead for chunk in row) <= stream.length for row in rows)
        chunks.extend(chunk for row in rows for chunk in row)
    return [chunk for chunk in chunks if chunk.epoch < epochs]


@given(lengths_of_texts, st.integers(4, 24), st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_each_epoch_contains_every_token_once_in_chunks_of_one_document(
    lengths: Any, length: Any, overhead: Any, seed: Any
) -> None:
    stream = PackedStream([StreamSource(Texts(lengths))], length, overhead, seed, pool_rows=3)
    chunks = take_epochs(stream, 2)
    expected = [token for index in range(len(lengths)) for token in Texts(lengths)[index].tolist()]
    for epoch in range(2):
        own = sorted((chunk.index, chunk.ids.tolist()) for chunk in chunks if chunk.epoch == epoch)
        # chunks are numbered along the documents: laid end to end they are the documents again
        assert [token for _, ids in own for token in ids] == expected
    for chunk in chunks:
        assert len(set(chunk.ids // 1_000_000)) == 1
        assert np.array_equal(np.diff(chunk.ids), np.ones(len(chunk.ids) - 1))


def test_chunks_are_numbered_along_the_stream_without_gaps() -> None:
    stream = PackedStream([StreamSource(Texts([5, 30, 2])), StreamSource(Texts([7] * 4), 2.0)], 16, 2, 0, pool_rows=3)
    rows, _ = stream.take(Position(), 40)
    assert [chunk.stream_index for row in rows for chunk in row] == list(range(sum(map(len, rows))))


def test_epochs_phases_and_seeds_have_different_orders() -> None:
    def order(seed: Any, phase: Any, epoch: Any = 0) -> Any:
        stream = PackedStream([StreamSource(Texts([9] * 50))], 12, 2, seed, phase, pool_rows=4)
        return [chunk.index for chunk in take_epochs(stream, epoch + 1) if chunk.epoch == epoch]

    orders = [order(0, 0), order(1, 0), order(0, 1), order(0, 0, epoch=1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert order(0, 0) == orders[0]


@given(st.lists(st.tuples(st.floats(0.05, 5), st.integers(1, 60)), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_sources_get_tokens_in_proportion_to_their_weights(mixture: Any) -> None:
    sources = [StreamSource(Texts([length] * 7), weight) for weight, length in mixture]
    stream = PackedStream(sources, 32, 2, 0, pool_rows=8)
    rows, position = stream.take(Position(), 1)
    while position.pool < 30:
        more, position = stream.take(position, 50)
        rows += more
    tokens = np.zeros(len(sources))
    for row in rows:
        for chunk in row:
            tokens[chunk.source] += len(chunk.ids)
    wanted = np.array([weight for weight, _ in mixture]) / sum(weight for weight, _ in mixture)
    # a chunk more or less of each source, and the rows of a pool that are not taken
    assert np.abs(tokens / tokens.sum() - wanted).max() < 0.03


def test_only_documents_with_min_tokens_are_drawn() -> None:
    stream = PackedStream([StreamSource(Texts([3, 20, 8, 40]), min_tokens=10)], 12, 2, 0, pool_rows=4)
    rows, _ = stream.take(Position(), 30)
    assert {int(chunk.ids[0]) // 1_000_000 for row in rows for chunk in row} == {1, 3}


def test_rows_of_every_batch_mix_short_and_long_chunks() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, size=4000)
    rows, _ = PackedStream([StreamSource(Texts(lengths))], 64, 2, 0, pool_rows=512).take(Position(), 480)
    parts = [rows[start : start + 60] for start in range(0, 480, 60)]
    means = [np.mean([len(chunk.ids) for row in part for chunk in row]) for part in parts]
    assert max(means) < 1.3 * min(means)


@pytest.mark.parametrize(
    ("options", "length", "message"),
    [
        ({}, 2, "length is 2; with 2 special tokens it must be at least 3"),
        ({"min_tokens": 9}, 8, "Source 0 has no document of at least 9"),
        ({"weight": 0}, 8, "Source 0 has the weight 0; it must be above 0"),
    ],
)
def test_impossible_stream_settings_raise(options: Any, length: Any, message: Any) -> None:
    with pytest.raises(ValueError, match=message):
        PackedStream([StreamSource(Texts([3]), **options)], length, 2, 0)


def test_reaching_a_late_step_reads_one_pool() -> None:
    """Taking rows far into the stream reads one pool, not all pools before it."""

    def take() -> Any:
        return PackedStream([StreamSource(Texts([5, 9, 14] * 40))], 16, 2, 3, pool_rows=8).take(Position(10**9, 3), 4)

    far, after = take()
    assert names(far) == names(take()[0])
    assert after == Position(10**9, 7)
    assert all(a.stream_index + 1 == b.stream_index for row in far for a, b in pairwise(row))


def test_a_sample_of_documents_depends_only_on_the_seed_and_loses_no_token() -> None:
    sources = [Texts([5, 9, 0, 14] * 10), Texts([40] * 5)]
    sample = sample_documents(sources, 120, seed=1)
    for source, documents in enumerate(sources):
        own = [chunk for chunk in sample if chunk.source == source]
        assert sum(len(chunk.ids) for chunk in own) == 60
        for chunk in own:
            size = len(chunk.ids) if chunk is own[-1] else documents.lengths[chunk.index]
            assert chunk.ids.tolist() == documents[chunk.index][:size].tolist()
    assert len({(chunk.source, chunk.index) for chunk in sample}) == len(sample)
    assert [chunk.index for chunk in sample] != [chunk.index for chunk in sample_documents(sources, 120, seed=2)]
    for capacity in (3, 64):
        chunks = cut_chunks(sample, capacity)
        assert max(len(chunk.ids) for chunk in chunks) <= capacity
        assert np.array_equal(np.concatenate([c.ids for c in chunks]), np.concatenate([c.ids for c in sample]))


# ---------------------------------------------------------------------- random lengths


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_random_lengths_cut_every_document_completely_at_a_length_of_its_own(lengths: Any, seed: Any) -> None:
    stream = PackedStream([StreamSource(Texts(lengths))], 34, 2, seed, pool_rows=4, min_length=10)
    (source,) = stream.sources
    documents, starts, sizes = source.spans(np.arange(source.count))
    for document, length in enumerate(lengths):
        own = documents == document
        parts = sizes[own].tolist()
        assert starts[own].tolist() == np.cumsum([0, *parts[:-1]]).tolist()
        assert sum(parts) == length
        assert len(set(parts[:-1])) <= 1
        assert all(8 <= part <= 32 for part in parts[:-1])
        assert parts[-1] <= max(parts)


def test_random_lengths_are_uniform_and_depend_on_seed_phase_and_document_only() -> None:
    def cut(seed: int, phase: int) -> Any:
        stream = PackedStream([StreamSource(Texts([500] * 4000))], 12, 2, seed, phase, min_length=5)
        return stream.sources[0].sizes.draw(np.arange(4000))

    drawn = cut(0, 0)
    assert set(drawn.tolist()) == set(range(3, 11))
    assert drawn.mean() == pytest.approx(6.5, abs=4 * np.sqrt(63 / 12 / 4000))
    assert np.array_equal(drawn, cut(0, 0))
    for other in (cut(1, 0), cut(0, 1)):
        assert np.mean(drawn == other) == pytest.approx(1 / 8, abs=0.03)


def test_a_stream_with_random_lengths_resumes_anywhere() -> None:
    stream = PackedStream([StreamSource(Texts([70, 5, 33, 200]))], 34, 2, seed=3, pool_rows=4, min_length=10)
    rows, _ = stream.take(Position(), 12)
    _, position = stream.take(Position(), 5)
    again = PackedStream([StreamSource(Texts([70, 5, 33, 200]))], 34, 2, seed=3, pool_rows=4, min_length=10)
    later, _ = again.take(position, 7)
    assert [[chunk.ids.tolist() for chunk in row] for row in later] == [
        [chunk.ids.tolist() for chunk in row] for row in rows[5:]
    ]
    assert all(sum(len(chunk.ids) + 2 for chunk in row) <= 34 for row in rows)


def test_a_minimum_length_outside_the_row_raises() -> None:
    with pytest.raises(ValueError, match="min_length is 40; it must be from 3 to length, 34"):
        PackedStream([StreamSource(Texts([5]))], 34, 2, seed=0, min_length=40)


# ---------------------------------------------------------------------- curriculum


def graded(lengths: Any, grades: int, rows: int, seed: int = 0) -> PackedStream:
    return PackedStream([StreamSource(Texts(lengths))], 16, 2, seed, grades=grades, total_rows=rows)


@pytest.mark.parametrize("epochs", [0.5, 1, 3])
def test_a_curriculum_goes_once_from_short_to_long_and_draws_all_lengths_alike(epochs: float) -> None:
    lengths = np.random.default_rng(0).permutation(np.repeat(np.arange(1, 41), 30))
    rows = int(epochs * (sum(lengths) + 2 * sum(-(-lengths // 14))) / 16)
    taken, _ = graded(lengths, 5, rows).take(Position(), rows)
    documents = [int(chunk.ids[0]) // 1_000_000 for row in taken for chunk in row]
    sizes = lengths[documents]
    # documents of one grade, of equal numbers of chunks, come together
    chunks = np.repeat(np.sort(lengths), -(-np.sort(lengths) // 14))
    bounds = chunks[[len(chunks) * grade // 5 for grade in range(1, 5)]]
    fifths = np.array_split(sizes, 5)
    for number, fifth in enumerate(fifths):
        low, high = bounds[number - 1] if number else 0, bounds[number] if number < 4 else 99
        assert np.mean((fifth >= low) & (fifth <= high)) > 0.85
        assert len(set(fifth.tolist())) > 2, "a grade is shuffled"
    # as without a curriculum, every chunk is drawn equally often
    visits = Counter((int(chunk.ids[0]), chunk.epoch) for row in taken for chunk in row)
    assert max(visits.values()) == 1
    # packing leaves some slots of the short rows empty
    assert len(documents) == pytest.approx(epochs * len(chunks), rel=0.05)


def test_a_curriculum_is_resumed_exactly_and_ends_in_the_last_grade() -> None:
    lengths = list(range(1, 60)) * 4
    whole, end = graded(lengths, 4, 300).take(Position(), 400)
    first, middle = graded(lengths, 4, 300).take(Position(), 123)
    rest, again = graded(lengths, 4, 300).take(middle, 277)
    assert again == end
    assert [[chunk.ids.tolist() for chunk in row] for row in first + rest] == [
        [chunk.ids.tolist() for chunk in row] for row in whole
    ]
    late = [int(chunk.ids[0]) // 1_000_000 for row in whole[330:] for chunk in row]
    assert min(lengths[document] for document in late) > 40
    other, _ = graded(lengths, 4, 300, seed=1).take(Position(), 123)
    assert [len(row) for row in other] != [len(row) for row in first]


def test_more_grades_than_chunks_sort_the_chunks() -> None:
    rows, _ = graded([9, 3, 14, 6, 12], 100, 5).take(Position(), 3)
    assert sorted(len(chunk.ids) for row in rows for chunk in row)[0] == 3
