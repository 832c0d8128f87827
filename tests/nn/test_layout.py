"""SequenceLayout: from masks and packed lengths to flat tokens, and back to a batch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bertblocks import SequenceLayout
from bertblocks.nn.head import POOLINGS, pool
from bertblocks.nn.layout import keep_mask

INF = float("inf")
KEEP = [[True, True, False], [True, False, False]]
#: The same two rows in every form of mask.
MASKS = {
    "bool": torch.tensor(KEEP),
    "int64": torch.tensor(KEEP).long(),
    "int32": torch.tensor(KEEP).int(),
    "uint8": torch.tensor(KEEP).to(torch.uint8),
    "float 0/1": torch.tensor(KEEP).float(),
    "bfloat16 0/1": torch.tensor(KEEP).bfloat16(),
    "additive -inf": torch.tensor([[0.0, 0.0, -INF], [0.0, -INF, -INF]]),
    "additive -10000": torch.tensor([[0.0, 0.0, -1e4], [0.0, -1e4, -1e4]]),
    **{
        f"additive {dtype} {value}": torch.zeros(2, 3, dtype=dtype).masked_fill(~torch.tensor(KEEP), number)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for value, number in {"lowest": torch.finfo(dtype).min, "-10000": -1e4}.items()
    },
}


# ---------------------------------------------------------------------- keep_mask


@pytest.mark.parametrize("extended", [False, True], ids=["[batch, length]", "[batch, 1, 1, length]"])
@pytest.mark.parametrize("form", MASKS)
def test_every_form_of_mask_gives_the_same_layout(form: Any, extended: Any) -> None:
    mask = MASKS[form][:, None, None] if extended else MASKS[form]
    keep = keep_mask(mask)
    assert keep.dtype == torch.bool
    assert keep.tolist() == KEEP


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (torch.ones(1, 2), [[True, True]]),
        (torch.zeros(1, 2), [[True, True]]),  # an additive mask that hides nothing
        (torch.zeros(1, 2, dtype=torch.long), [[False, False]]),  # padding only
        (torch.full((1, 2), -INF), [[False, False]]),
    ],
    ids=["float ones", "float zeros", "integer zeros", "all -inf"],
)
def test_masks_with_a_single_value_are_read_by_their_dtype(mask: Any, expected: Any) -> None:
    assert keep_mask(mask).tolist() == expected


@pytest.mark.parametrize(
    ("mask", "part"),
    [
        (torch.tensor([[0.0, -0.5]]), "-0.5"),
        (torch.tensor([[0.0, -9999.0, -INF]]), "-9999.0"),
        (torch.tensor([[1.0, 0.5]]), "0.5"),
        (torch.tensor([[1, 2]]), "holds 2"),
        (torch.tensor([[1, -1]]), "holds -1"),
        (torch.tensor([[1.0, -INF]]), "-inf"),
        (torch.tensor([[1.0, float("nan")]]), "nan"),
        (torch.ones(3), r"\[3\]"),
        (torch.ones(2, 3, 3), r"\[2, 3, 3\]"),
        (torch.ones(2, 1, 3, 3), r"\[2, 1, 3, 3\]"),
        (torch.ones(2, 4, 1, 3), r"\[2, 4, 1, 3\]"),
    ],
    ids=str,
)
def test_invalid_masks_raise_an_error_that_names_value_or_shape(mask: Any, part: Any) -> None:
    with pytest.raises(ValueError, match=f"attention_mask.*{part}"):
        keep_mask(mask)


# ---------------------------------------------------------------------- kinds of layouts


def describe(layout: SequenceLayout) -> str:
    if layout.rectangle is None:
        return "ragged"
    return "rectangle" if layout.key_mask is None else "masked rectangle"


@pytest.mark.parametrize(
    ("mask", "unpad", "kind"),
    [
        ([[1, 1], [1, 1]], True, "rectangle"),
        ([[1, 1], [1, 1]], False, "rectangle"),
        ([[1, 1], [1, 0]], True, "ragged"),
        ([[1, 1], [1, 0]], False, "masked rectangle"),
        ([[0, 1], [1, 1]], True, "ragged"),
        ([[0, 1], [1, 1]], False, "masked rectangle"),
        ([[0, 1, 1, 0], [1, 1, 1, 1]], True, "ragged"),
        ([[1, 0, 1], [1, 1, 1]], True, "masked rectangle"),  # a hole keeps its slot: distances count it
        ([[1, 0, 1], [1, 1, 1]], False, "masked rectangle"),
        ([[0, 0], [1, 0]], True, "ragged"),
        ([[0, 0], [1, 0]], False, "masked rectangle"),
        ([[0, 0], [0, 0]], True, "ragged"),
        ([[0, 0], [0, 0]], False, "masked rectangle"),
    ],
)
def test_padding_at_the_ends_of_rows_is_dropped(mask: Any, unpad: Any, kind: Any) -> None:
    layout = SequenceLayout.from_mask(torch.tensor(mask), unpad=unpad)
    assert describe(layout) == kind
    assert layout.shape == (len(mask), len(mask[0]))
    assert not layout.is_packed


def test_a_batch_without_a_mask_has_a_rectangular_layout() -> None:
    layout = SequenceLayout.from_shape(2, 3, torch.device("cpu"))
    assert describe(layout) == "rectangle"
    assert layout.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert layout.sequence_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert layout.length_tensor.tolist() == [3, 3]
    assert layout.cu_seqlens.tolist() == [0, 3, 6]


@pytest.mark.parametrize("unpad", [True, False])
def test_positions_of_left_padded_sequences_start_at_zero(unpad: Any) -> None:
    layout = SequenceLayout.from_mask(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]), unpad=unpad)
    tokens = layout.gather(torch.tensor([[90, 91, 2, 3], [92, 5, 6, 7]]))
    firsts = layout.first_tokens
    assert tokens[firsts].tolist() == [2, 5]
    assert layout.positions[firsts].tolist() == [0, 0]
    position_of = dict(zip(tokens.tolist(), layout.positions.tolist(), strict=True))
    assert {token: position_of[token] for token in (2, 3, 5, 6, 7)} == {2: 0, 3: 1, 5: 0, 6: 1, 7: 2}


def test_positions_count_tokens_masked_inside_a_sequence() -> None:
    layout = SequenceLayout.from_mask(torch.tensor([[0, 1, 0, 1]]))
    tokens = layout.gather(torch.tensor([[90, 5, 91, 6]])).tolist()
    assert [layout.positions[tokens.index(token)].item() for token in (5, 6)] == [0, 2]


# ---------------------------------------------------------------------- packed input


def test_cu_seqlens_split_flat_tokens_into_sequences() -> None:
    layout = SequenceLayout.from_cu_seqlens(torch.tensor([0, 3, 3, 5]), (5,))
    assert describe(layout) == "ragged"
    assert layout.is_packed
    assert layout.lengths == [3, 0, 2]
    assert layout.positions.tolist() == [0, 1, 2, 0, 1]
    assert layout.sequence_ids.tolist() == [0, 0, 0, 2, 2]
    assert layout.cu_seqlens.tolist() == [0, 3, 3, 5]
    assert layout.num_sequences == 3
    assert layout.max_length == 3
    assert layout.first_tokens[[0, 2]].tolist() == [0, 3]


@pytest.mark.parametrize("shape", [(5,), (1, 5)])
def test_scatter_restores_the_shape_of_flat_input(shape: Any) -> None:
    layout = SequenceLayout.from_cu_seqlens(torch.tensor([0, 2, 5]), shape)
    x = torch.randn(*shape, 4)
    assert layout.gather(x).shape == (5, 4)
    assert torch.equal(layout.scatter(layout.gather(x)), x)


@pytest.mark.parametrize("cu_seqlens", [[0], [0, 0], [0, 0, 0]])
def test_packed_input_may_be_empty(cu_seqlens: Any) -> None:
    layout = SequenceLayout.from_cu_seqlens(torch.tensor(cu_seqlens), (0,))
    assert layout.num_sequences == len(cu_seqlens) - 1
    assert layout.max_length == 0
    assert layout.positions.shape == layout.sequence_ids.shape == (0,)
    assert layout.scatter(torch.zeros(0, 4)).shape == (0, 4)


@pytest.mark.parametrize(
    "cu_seqlens",
    [[1, 5], [0, 4], [0, 6], [0, 3, 2, 5], [], [[0, 5]], [[0, 2], [2, 5]], 5],
    ids=["late start", "early end", "late end", "falling", "empty", "one row of two", "two rows", "a number"],
)
def test_invalid_cu_seqlens_raise(cu_seqlens: Any) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens is .*starts at 0.*tokens, 5"):
        SequenceLayout.from_cu_seqlens(torch.tensor(cu_seqlens), (5,))


def test_packed_rows_are_split_into_their_segments() -> None:
    layout = SequenceLayout.from_packed_rows(torch.tensor([[2, 1, 0], [0, 0, 0], [4, 0, 0]]), (3, 4))
    assert describe(layout) == "ragged"
    assert layout.is_packed
    assert layout.lengths == [2, 1, 4]
    assert layout.positions.tolist() == [0, 1, 0, 0, 1, 2, 3]
    assert layout.sequence_ids.tolist() == [0, 0, 1, 2, 2, 2, 2]
    x = torch.arange(1, 13).view(3, 4)
    assert layout.gather(x).tolist() == [1, 2, 3, 9, 10, 11, 12]
    assert layout.scatter(layout.gather(x), fill=-1).tolist() == [[1, 2, 3, -1], [-1] * 4, [9, 10, 11, 12]]


@pytest.mark.parametrize(
    ("packed_seqlens", "part"),
    [
        ([[2, 3], [1, 0]], r"row 0 is \[2, 3\].*at most 4"),
        ([[2, 1], [5, -1]], r"row 1 is \[5, -1\].*negative"),
        ([[2, 1]], r"\[1, 2\].*\[2, segments\]"),
        ([2, 1], r"\[2\].*\[2, segments\]"),
        ([[[2], [1]], [[1], [1]]], r"\[2, 2, 1\].*\[2, segments\]"),
        (2, r"\[\].*\[2, segments\]"),
    ],
    ids=["too long", "negative", "a row missing", "flat", "three dimensions", "a number"],
)
def test_invalid_packed_seqlens_raise(packed_seqlens: Any, part: Any) -> None:
    with pytest.raises(ValueError, match=f"packed_seqlens.*{part}"):
        SequenceLayout.from_packed_rows(torch.tensor(packed_seqlens), (2, 4))


# ---------------------------------------------------------------------- properties of every layout


@st.composite
def masks(draw: Any) -> Tensor:
    """Draws any mask: holes, left and right padding, rows with padding only."""
    rows, length = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    cells = st.lists(st.booleans(), min_size=length, max_size=length)
    contiguous = st.tuples(st.integers(0, length), st.integers(0, length)).map(
        lambda ends: [min(ends) <= column < max(ends) for column in range(length)]
    )
    kind = draw(st.sampled_from(["any", "contiguous"]))
    return torch.tensor([draw(cells if kind == "any" else contiguous) for _ in range(rows)])


@st.composite
def packed_rows(draw: Any) -> tuple[Tensor, tuple[int, int]]:
    rows, segments = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    lengths = draw(
        st.lists(st.lists(st.integers(0, 4), min_size=segments, max_size=segments), min_size=rows, max_size=rows)
    )
    width = max(1, max(sum(row) for row in lengths)) + draw(st.integers(0, 2))
    return torch.tensor(lengths), (rows, width)


def check_consistency(layout: SequenceLayout, sequences: list[list[int]]) -> None:
    """Checks a layout against the slots (flat indices into its shape) of each sequence's real tokens."""
    place = layout.gather(torch.arange(torch.Size(layout.shape).numel()).view(layout.shape)).tolist()
    real = [True] * len(place) if layout.key_mask is None else layout.key_mask.flatten().tolist()
    found: list[list[int]] = [[] for _ in sequences]
    bounds = layout.cu_seqlens.tolist()
    assert layout.num_sequences == len(sequences)
    assert len(bounds) == len(sequences) + 1
    assert bounds[-1] == len(place) == layout.positions.shape[0]
    for index, slot in enumerate(place):
        sequence = int(layout.sequence_ids[index])
        assert bounds[sequence] <= index < bounds[sequence + 1]
        if real[index]:
            found[sequence].append(slot)
            assert layout.positions[index] == slot - sequences[sequence][0]
    assert found == sequences
    assert layout.length_tensor.tolist() == [len(slots) for slots in sequences]
    assert layout.max_length >= max((len(slots) for slots in sequences), default=0)
    assert layout.cu_seqlens.dtype == torch.int32
    for sequence, slots in enumerate(sequences):
        if slots:
            assert place[layout.first_tokens[sequence]] == slots[0]


@settings(max_examples=60, deadline=None)
@given(mask=masks(), unpad=st.booleans())
def test_a_layout_from_a_mask_keeps_tokens_in_order(mask: Any, unpad: Any) -> None:
    """Positions restart with every sequence and count from its first real token."""
    rows, length = mask.shape
    sequences = [[row * length + int(column) for column in mask[row].nonzero()] for row in range(rows)]
    check_consistency(SequenceLayout.from_mask(mask, unpad=unpad), sequences)


@settings(max_examples=60, deadline=None)
@given(packed=packed_rows())
def test_a_layout_from_packed_rows_keeps_tokens_in_order(packed: Any) -> None:
    lengths, (rows, width) = packed
    sequences = []
    for row in range(rows):
        slot = row * width
        for length in lengths[row].tolist():
            sequences += [list(range(slot, slot + length))] if length else []
            slot += length
    check_consistency(SequenceLayout.from_packed_rows(lengths, (rows, width)), sequences)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), max_size=6))
def test_a_layout_from_cu_seqlens_keeps_tokens_in_order(lengths: Any) -> None:
    bounds = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    sequences = [list(range(start, start + length)) for start, length in zip(bounds, lengths, strict=False)]
    check_consistency(SequenceLayout.from_cu_seqlens(torch.tensor(bounds), (bounds[-1],)), sequences)


@settings(max_examples=60, deadline=None)
@given(
    mask=masks(), unpad=st.booleans(), trailing=st.sampled_from([(), (3,), (2, 2)]), fill=st.sampled_from([0.0, -7.0])
)
def test_scatter_undoes_gather_and_fills_padding(mask: Any, unpad: Any, trailing: Any, fill: Any) -> None:
    layout = SequenceLayout.from_mask(mask, unpad=unpad)
    x = torch.randn(*mask.shape, *trailing)
    back = layout.scatter(layout.gather(x), fill=fill)
    expected = torch.where(mask.view(*mask.shape, *(1,) * len(trailing)), x, torch.tensor(fill))
    assert torch.equal(back, expected)


@settings(max_examples=50, deadline=None)
@given(mask=masks(), unpad=st.booleans())
def test_labels_of_padding_are_ignored(mask: Any, unpad: Any) -> None:
    layout = SequenceLayout.from_mask(mask, unpad=unpad)
    labels = torch.arange(mask.numel()).view(mask.shape)
    read = layout.real_labels(labels, ignore=-100)
    assert sorted(read[read != -100].tolist()) == labels[mask].tolist()


@pytest.mark.parametrize("unpad", [True, False])
def test_gradients_flow_through_gather_and_scatter_to_real_slots_only(unpad: Any) -> None:
    mask = torch.tensor([[True, True, False], [False, True, True]])
    layout = SequenceLayout.from_mask(mask, unpad=unpad)
    x = torch.randn(2, 3, requires_grad=True)
    layout.scatter(layout.gather(x)).sum().backward()
    assert torch.equal(x.grad, mask.float())


def test_memo_computes_a_value_once() -> None:
    layout = SequenceLayout.from_shape(1, 1, torch.device("cpu"))
    calls = []
    for key in ("a", "a", "b", "a"):
        assert layout.memo(key, lambda key=key: calls.append(key) or f"value of {key}") == f"value of {key}"  # type: ignore[misc, func-returns-value]
    assert calls == ["a", "b"]


# ---------------------------------------------------------------------- pooling


def plain_pool(rows: list[Tensor], kind: str) -> Tensor:
    """Pools one sequence at a time; a sequence without tokens gives 0."""
    size = 3
    reduce = {
        "cls": lambda x: x[0],
        "last": lambda x: x[-1],
        "mean": lambda x: x.mean(0),
        "max": lambda x: x.max(0).values,
        "weighted_mean": lambda x: (x * torch.arange(1, len(x) + 1)[:, None]).sum(0) / (len(x) * (len(x) + 1) / 2),
        "mean_sqrt_len": lambda x: x.sum(0) / len(x) ** 0.5,
    }[kind]
    return torch.stack([reduce(x) if len(x) else torch.zeros(size) for x in rows]) if rows else torch.zeros(0, size)


@pytest.mark.parametrize("kind", ["cls", "last", "mean", "max", "mean_sqrt_len"])
@settings(max_examples=30, deadline=None)
@given(mask=masks(), unpad=st.booleans())
def test_pooling_a_padded_batch_uses_only_real_tokens(kind: Any, mask: Any, unpad: Any) -> None:
    layout = SequenceLayout.from_mask(mask, unpad=unpad)
    x = torch.randn(*mask.shape, 3) - 5.0  # below 0, so that a stray 0 of padding would win a maximum
    expected = plain_pool([row[keep] for row, keep in zip(x, mask, strict=True)], kind)
    torch.testing.assert_close(pool(layout.gather(x), layout, kind), expected)


@settings(max_examples=30, deadline=None)
@given(mask=masks(), unpad=st.booleans())
def test_a_weighted_mean_counts_places_from_the_first_real_token(mask: Any, unpad: Any) -> None:
    """Holes count, as in sentence-transformers."""
    layout = SequenceLayout.from_mask(mask, unpad=unpad)
    x = torch.randn(*mask.shape, 3)
    places = torch.arange(mask.shape[1]) + 1 - mask.int().argmax(1, keepdim=True)
    weights = (places * mask).to(x.dtype)[..., None]
    expected = (x * weights).sum(1) / weights.sum(1).clamp(min=1)
    torch.testing.assert_close(pool(layout.gather(x), layout, "weighted_mean"), expected)


@pytest.mark.parametrize("kind", POOLINGS)
@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 4), max_size=5))
def test_pooling_packed_tokens_gives_a_vector_per_sequence(kind: Any, lengths: Any) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.randn(sum(lengths), 3) - 5.0
    layout = SequenceLayout.from_cu_seqlens(cu_seqlens, (sum(lengths),))
    torch.testing.assert_close(pool(x, layout, kind), plain_pool(list(x.split(lengths)) if lengths else [], kind))


@pytest.mark.parametrize("kind", POOLINGS)
def test_pooling_packed_rows_gives_a_vector_per_segment(kind: Any) -> None:
    x = torch.randn(2, 5, 3) - 5.0
    layout = SequenceLayout.from_packed_rows(torch.tensor([[2, 1], [5, 0]]), (2, 5))
    expected = plain_pool([x[0, :2], x[0, 2:3], x[1]], kind)
    torch.testing.assert_close(pool(layout.gather(x), layout, kind), expected)


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("kind", POOLINGS)
def test_values_at_padding_never_reach_a_pooled_vector(kind: Any, unpad: Any) -> None:
    """Not even NaN or infinity."""
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    layout = SequenceLayout.from_mask(mask, unpad=unpad)
    x = torch.randn(3, 3, 3)
    x[~mask] = float("nan")
    assert pool(layout.gather(x), layout, kind).isfinite().all()


def test_an_unknown_pooling_raises() -> None:
    layout = SequenceLayout.from_shape(1, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"classifier_pooling is 'sum'.*cls, last, mean, max"):
        pool(torch.zeros(2, 3), layout, "sum")


def test_slices_and_lengths_of_every_kind_of_layout() -> None:
    ragged = SequenceLayout.from_cu_seqlens(torch.tensor([0, 2, 2, 5]), (5,))
    assert (ragged.slices(), ragged.read_lengths()) == ([slice(0, 2), slice(2, 5)], [2, 0, 3])
    rows = SequenceLayout.from_shape(2, 3, torch.device("cpu"))
    assert (rows.slices(), rows.read_lengths()) == ([slice(0, 3), slice(3, 6)], [3, 3])
    masked = SequenceLayout.from_mask(torch.tensor([[1, 0, 1], [1, 0, 0]]))  # a hole, so padding stays
    assert (masked.slices(), masked.read_lengths()) == ([slice(0, 3), slice(3, 6)], [2, 1])
    empty = SequenceLayout.from_shape(2, 0, torch.device("cpu"))
    assert (empty.slices(), empty.read_lengths()) == ([], [0, 0])
