"""Pretraining objectives, tested against their definitions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bertblocks import BertBlocksForMaskedDiffusion, BertBlocksForMaskedLM, BertBlocksModel
from bertblocks.data.stream import DocumentChunk
from bertblocks.models import TASK_MODELS
from bertblocks.objectives import (
    EnhancedMaskedLM,
    MaskedDiffusion,
    MaskedLanguageModeling,
    RateSchedule,
    RetroMAE,
    SentenceOrder,
)
from bertblocks.objectives.maskings import mask_spans, mask_tokens, mask_word_spans, mask_words
from bertblocks.text.tokenizer_training import train_tokenizer
from bertblocks.text.vocabulary import Vocabulary
from tests.helpers import tiny_config

SIZE, CLS, SEP, MASK, UNKNOWN, DOT = 60, 1, 2, 3, 4, 59
SPECIAL = np.arange(SIZE) < 5
#: Odd ids continue a word.
STARTS_WORD = np.arange(SIZE) % 2 == 0
VOCABULARY = Vocabulary(SIZE, CLS, SEP, MASK, SPECIAL, STARTS_WORD, np.arange(SIZE) == DOT)
OBJECTIVES = {
    "tokens": MaskedLanguageModeling(VOCABULARY),
    "words": MaskedLanguageModeling(VOCABULARY, 0.2, masking=mask_words),
    "spans": MaskedLanguageModeling(VOCABULARY, 0.4, masking=mask_spans),
    "spans of words": MaskedLanguageModeling(VOCABULARY, 0.15, 1.0, 0.0, mask_word_spans),
    "order": SentenceOrder(VOCABULARY),
    "order and tokens": SentenceOrder(VOCABULARY, MaskedLanguageModeling(VOCABULARY, 0.15)),
    "diffusion": MaskedDiffusion(VOCABULARY),
    "retromae": RetroMAE(MaskedLanguageModeling(VOCABULARY)),
    "enhanced": EnhancedMaskedLM(VOCABULARY),
}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=list(OBJECTIVES))
every_masking = pytest.mark.parametrize("name", ["tokens", "words", "spans", "spans of words"])


def make_rows(lengths: Any, seed: Any = 0, low: Any = 0) -> Any:
    """Rows with one chunk of random ids each, including special tokens unless `low` excludes them."""
    generator = np.random.default_rng(seed)
    return [
        [DocumentChunk(generator.integers(low, SIZE, length).astype(np.int32), 0, index, 1, index)]
        for index, length in enumerate(lengths)
    ]


def tensors(batch: Any) -> Any:
    return {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}


def without_ends(values: Any, lengths: Any, overhead: Any = 2) -> Any:
    """The flat values of the chunks, without special tokens around them."""
    parts = values.split([length + overhead for length in lengths])
    return torch.cat([part[1:-1] for part in parts])


# ---------------------------------------------------------------------- what holds for all


@every_objective
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.data())
@settings(max_examples=25, deadline=None)
def test_a_batch_does_not_depend_on_how_it_is_split(objective: Any, lengths: Any, data: Any) -> None:
    rows = make_rows(lengths)
    whole = objective.batch(rows, seed=5, progress=0.3)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows)), max_size=3)) | {0, len(rows)})
    parts = [objective.batch(rows[a:b], seed=5, progress=0.3) for a, b in itertools.pairwise(cuts)]
    for name, value in tensors(whole).items():
        if name in ("scored_tokens", "decoder_tokens"):
            labels = whole.labels if name == "scored_tokens" else whole.decoder_labels
            assert torch.equal(value, (labels != -100).nonzero().squeeze(1))
        elif name != "cu_seqlens":
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), value), name
    assert torch.equal(torch.cat([part.cu_seqlens.diff() for part in parts]), whole.cu_seqlens.diff())
    assert {key: sum(part.counts[key] for part in parts) for key in whole.counts} == whole.counts


@every_objective
def test_a_batch_is_a_function_of_seed_epoch_source_and_chunk(objective: Any) -> None:
    ids = np.arange(5, 45, dtype=np.int32)

    def noise(seed: Any = 0, epoch: Any = 0, source: Any = 0, index: Any = 0) -> Any:
        return tensors(objective.batch([[DocumentChunk(ids, source, index, epoch, 7)]] * 20, seed))

    def differs(other: Any) -> Any:
        return any(not torch.equal(first[name], other[name]) for name in first)

    first = noise()
    assert not differs(noise())
    # order alone draws little: of several others one must differ
    for key in ("seed", "epoch", "source", "index"):
        assert any(differs(noise(**{key: value})) for value in range(1, 6)), key


@every_objective
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_special_tokens_are_never_masked_and_labels_are_the_original_ids(
    objective: Any, lengths: Any, seed: Any
) -> None:
    rows = make_rows(lengths, seed)
    batch = objective.batch(rows, seed)
    if batch.labels is None:
        return
    original = SentenceOrder(VOCABULARY).batch(rows, seed) if objective.overhead == 3 else None
    texts = (
        original.input_ids
        if original is not None
        else torch.cat([torch.tensor([CLS, *row[0].ids, SEP]) for row in rows])
    )
    is_scored = batch.labels != -100
    assert torch.equal(batch.labels[is_scored], texts[is_scored])
    assert torch.equal(batch.input_ids[~is_scored], texts[~is_scored])
    special = torch.from_numpy(SPECIAL)
    assert not special[texts[is_scored]].any()
    # what replaces a token is [MASK] or stands for text
    replaced = batch.input_ids[is_scored]
    assert (~special[replaced] | (replaced == MASK)).all()
    assert batch.cu_seqlens.tolist() == [0, *np.cumsum(np.array(lengths) + objective.overhead)]


# ---------------------------------------------------------------------- masked language modelling


@every_masking
@pytest.mark.parametrize("rate", [0.15, 0.5, 0.9])
def test_every_token_is_masked_at_the_rate(name: Any, rate: Any) -> None:
    """Also at both ends of a chunk, where a span could be cut off."""
    shape: Any = OBJECTIVES[name]
    objective = MaskedLanguageModeling(VOCABULARY, rate, masking=shape.masking)
    count, length = 4000, 12
    batch = objective.batch(make_rows([length] * count, low=5), 1)
    chosen = (without_ends(batch.labels, [length] * count) != -100).view(count, length).double().mean(0)
    # chunks are independent: each place is a binomial over all of them
    deviation = (rate * (1 - rate) / count) ** 0.5
    assert (chosen - rate).abs().max() < 4.5 * deviation
    assert batch.counts["masked_lm"] == int((batch.labels != -100).sum())


def test_a_mask_rate_of_one_masks_everything() -> None:
    for masking in (mask_tokens, mask_spans):
        objective = MaskedLanguageModeling(VOCABULARY, 1.0, masking=masking)
        assert objective.batch(make_rows([30, 1, 7], low=5), 0).counts == {"masked_lm": 38}


@pytest.mark.parametrize(("mask_share", "random_share"), [(0.8, 0.1), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_shares_of_mask_tokens_random_tokens_and_kept_tokens(mask_share: Any, random_share: Any) -> None:
    objective = MaskedLanguageModeling(VOCABULARY, 0.3, mask_share, random_share)
    batch = objective.batch(make_rows([100] * 1000, low=5), 3)
    is_scored = batch.labels != -100
    seen, original = batch.input_ids[is_scored], batch.labels[is_scored]
    count = len(seen)
    ordinary = SIZE - 5
    expected = {
        "masked": ((seen == MASK), mask_share),
        # a random token is the original now and then
        "random": ((seen != MASK) & (seen != original), random_share * (1 - 1 / ordinary)),
        "kept": (seen == original, 1 - mask_share - random_share + random_share / ordinary),
    }
    for name, (found, share) in expected.items():
        deviation = (max(share * (1 - share), 0) / count) ** 0.5
        assert abs(found.double().mean() - share) <= 4.5 * deviation + 1e-9, name


def test_random_tokens_come_from_the_whole_vocabulary() -> None:
    batch = MaskedLanguageModeling(VOCABULARY, 1.0, 0.0, 1.0).batch(make_rows([500] * 40, low=5), 0)
    seen = batch.input_ids[batch.labels != -100]
    counts = torch.bincount(seen, minlength=SIZE).double()
    assert counts[:5].sum() == 0
    expected = len(seen) / (SIZE - 5)
    assert (counts[5:] - expected).abs().max() < 5 * expected**0.5


@pytest.mark.parametrize("masking", [mask_words, mask_word_spans])
def test_whole_words_are_masked(masking: Any) -> None:
    rows = make_rows([40] * 200, low=5)
    batch = MaskedLanguageModeling(VOCABULARY, 0.3, masking=masking).batch(rows, 0)
    chosen = (without_ends(batch.labels, [40] * 200) != -100).view(200, 40).numpy()
    ids = np.stack([row[0].ids for row in rows])
    continues = ~STARTS_WORD[ids]
    continues[:, 0] = False
    places = np.argwhere(continues)
    assert all(chosen[row, place] == chosen[row, place - 1] for row, place in places)


def test_masked_spans_have_spanberts_lengths() -> None:
    """At a rate so low that spans rarely touch, lengths of masked runs are geometric with 0.2, cut at 10."""
    count, length = 300, 2000
    batch = MaskedLanguageModeling(VOCABULARY, 0.01, masking=mask_spans).batch(make_rows([length] * count, low=5), 0)
    chosen = (without_ends(batch.labels, [length] * count) != -100).view(count, length).numpy()
    inside = np.pad(chosen, ((0, 0), (1, 1)))
    edges = np.diff(inside.astype(int), axis=1)
    runs = np.argwhere(edges == -1)[:, 1] - np.argwhere(edges == 1)[:, 1]
    shares = np.bincount(np.minimum(runs, 11), minlength=12)[1:] / len(runs)
    expected = np.array([0.2 * 0.8**k for k in range(9)] + [0.8**9, 0.0])
    assert len(runs) > 1000
    # 3 % of the spans meet another or the end of a chunk
    assert np.abs(shares - expected).max() < 0.03


def test_mask_rates_move_from_start_to_end() -> None:
    linear, cosine = RateSchedule(0.3, 0.1), RateSchedule(0.3, 0.1, "cosine")
    assert [round(linear.at(x), 6) for x in (0, 0.25, 1, 2)] == [0.3, 0.25, 0.1, 0.1]
    assert [round(cosine.at(x), 6) for x in (0, 0.5, 1)] == [0.3, 0.2, 0.1]
    assert cosine.at(0.25) == pytest.approx(0.2 + 0.1 * np.cos(np.pi / 4))
    objective = MaskedLanguageModeling(VOCABULARY, RateSchedule(0.6, 0.1))
    rows = make_rows([50] * 200, low=5)
    hidden = [objective.batch(rows, 0, progress).labels != -100 for progress in (0.0, 0.5, 1.0)]
    for progress, is_masked in zip((0.0, 0.5, 1.0), hidden, strict=True):
        rate = 0.6 - 0.5 * progress
        assert abs(int(is_masked.sum()) - rate * 10_000) < 5 * (rate * (1 - rate) * 10_000) ** 0.5
    # a lower rate hides fewer of the same tokens
    assert (hidden[0] | ~hidden[1]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0}, "masking rate is 0; it must be above 0 and at most 1"),
        ({"rate": RateSchedule(0.3, 1.5)}, "masking rate is 1.5"),
        ({"mask_share": 0.9, "random_share": 0.2}, "mask_share is 0.9 and random_share 0.2"),
    ],
)
def test_impossible_masking_options_raise(options: Any, message: Any) -> None:
    with pytest.raises(ValueError, match=message):
        MaskedLanguageModeling(VOCABULARY, **options)


def test_other_invalid_objective_options_raise() -> None:
    without_words = Vocabulary(SIZE, CLS, SEP, MASK, SPECIAL, None, np.zeros(SIZE, bool))
    with pytest.raises(ValueError, match="does not mark where words begin"):
        MaskedLanguageModeling(without_words, masking=mask_words).batch(make_rows([5]), 0)
    with pytest.raises(ValueError, match="kind of a rate schedule is 'steep'"):
        RateSchedule(0.1, 0.2, "steep")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_time is 0; it must be above 0"):
        MaskedDiffusion(VOCABULARY, min_time=0)
    with pytest.raises(ValueError, match="at least one chunk"):
        OBJECTIVES["tokens"].batch([], 0)


# ---------------------------------------------------------------------- sentence order


def segments(batch: Any, number: Any) -> Any:
    a, b = batch.cu_seqlens[number : number + 2].tolist()
    ids, types = batch.input_ids[a:b], batch.token_type_ids[a:b]
    assert ids[0] == CLS
    assert ids[-1] == SEP
    first, second = ids[types == 0], ids[types == 1]
    assert first[-1] == SEP
    assert torch.equal(torch.cat([first, second]), ids)
    return first[1:-1], second[:-1]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_segments_in_their_labelled_order_give_the_text(lengths: Any, seed: Any) -> None:
    rows = make_rows(lengths, seed, low=5)
    batch = SentenceOrder(VOCABULARY).batch(rows, seed)
    assert batch.counts == {"sentence_order": sum(length > 1 for length in lengths)}
    for number, row in enumerate(rows):
        first, second = segments(batch, number)
        label = int(batch.order_labels[number])
        parts = (second, first) if label == 1 else (first, second)
        assert torch.cat(parts).tolist() == row[0].ids.tolist()
        if len(row[0].ids) == 1:
            assert (label, len(second)) == (-100, 0)
        else:
            assert label in (0, 1)
            assert len(parts[0]) >= max(len(row[0].ids) // 4, 1)
            assert len(parts[1]) >= max(len(row[0].ids) // 4, 1)


def test_half_of_the_pairs_are_swapped() -> None:
    batch = SentenceOrder(VOCABULARY).batch(make_rows([20] * 4000, low=5), 0)
    assert abs(int(batch.order_labels.sum()) - 2000) < 5 * 32


def test_texts_are_split_after_a_sentence_or_else_before_a_word() -> None:
    ids = np.full(20, 7, dtype=np.int32)  # one long word
    ids[9] = 6

    def boundary(ids: Any) -> Any:
        batch = SentenceOrder(VOCABULARY).batch([[DocumentChunk(ids, 0, index, 0, index)] for index in range(300)], 0)
        found = set()
        for number in range(300):
            first, second = segments(batch, number)
            found.add(len(second) if batch.order_labels[number] == 1 else len(first))
        return found

    assert boundary(ids) == {9}
    ids[11] = DOT
    assert boundary(ids) == {12}
    assert boundary(np.full(20, 7, dtype=np.int32)) == set(range(5, 16))


# ---------------------------------------------------------------------- masked diffusion


def test_diffusion_times_are_stratified_over_consecutive_chunks() -> None:
    rows = make_rows([1] * 1000, low=5)
    times = MaskedDiffusion(VOCABULARY, 1e-3).batch(rows, 0).timesteps.numpy()
    assert times.min() >= 1e-3
    assert times.max() <= 1
    for start in (0, 17, 500):
        part = np.sort((times[start : start + 64] - 1e-3) / (1 - 1e-3))
        # of 64 random numbers the largest distance to an even spread is 0.1 or so
        assert np.abs(part - (np.arange(64) + 0.5) / 64).max() < 0.035
    starts = [MaskedDiffusion(VOCABULARY).batch(rows[:1], seed).timesteps.item() for seed in range(2000)]
    assert np.abs(np.histogram(starts, bins=5, range=(0, 1))[0] - 400).max() < 5 * 18


def test_diffusion_masks_tokens_with_the_probability_of_their_time() -> None:
    rows = make_rows([2000] * 40, low=5)
    batch = MaskedDiffusion(VOCABULARY).batch(rows, 0)
    hidden = (without_ends(batch.input_ids, [2000] * 40) == MASK).view(40, 2000).double().mean(1)
    times = batch.timesteps.double()
    assert ((hidden - times).abs() < 4.5 * (times * (1 - times) / 2000).sqrt() + 1e-6).all()
    assert batch.counts == {"masked_diffusion": 80_000}


def test_only_maskable_tokens_count() -> None:
    rows = make_rows([50] * 5)
    ordinary = sum(int((~SPECIAL[row[0].ids]).sum()) for row in rows)
    assert ordinary < 250
    assert MaskedDiffusion(VOCABULARY).batch(rows, 0).counts == {"masked_diffusion": ordinary}


# ---------------------------------------------------------------------- losses


def log_probabilities(model: Any, ids: Any) -> Any:
    """The losses of one sequence as a padded batch."""
    return F.log_softmax(model.logits(model.model(ids[None]).last_hidden_state[0]), dim=-1)


@pytest.mark.parametrize("name", ["tokens", "diffusion"])
def test_losses_equal_sums_over_single_sequences(name: Any) -> None:
    objective = OBJECTIVES[name]
    kind = BertBlocksForMaskedLM if name == "tokens" else BertBlocksForMaskedDiffusion
    model = kind(tiny_config(mask_token_id=MASK)).train()
    batch = objective.batch(make_rows([9, 1, 20, 5]), 0)
    ((key, total),) = objective.losses(model, batch).items()
    expected = torch.tensor(0.0)
    for number, (a, b) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
        ids, labels = batch.input_ids[a:b], batch.labels[a:b]
        weight = 1 / batch.timesteps[number] if batch.timesteps is not None else 1
        scores = log_probabilities(model, ids)
        rows = (labels != -100).nonzero().flatten()
        expected = expected - weight * scores[rows, labels[rows]].sum()
    assert key in batch.counts
    assert total.item() == pytest.approx(expected.item(), rel=1e-4)
    total.backward()
    assert model.model.embedding.token.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["order", "order and tokens"])
def test_sentence_order_losses_equal_sums_over_single_sequences(name: Any) -> None:
    objective = OBJECTIVES[name]
    model = TASK_MODELS["pretraining"](tiny_config(type_vocab_size=2)).train()
    batch = objective.batch(make_rows([9, 1, 20, 5]), 0)
    sums = objective.losses(model, batch)
    assert set(sums) == set(batch.counts)
    out = model(
        input_ids=batch.input_ids,
        cu_seqlens=batch.cu_seqlens,
        token_type_ids=batch.token_type_ids,
        return_logits=True,
    )
    order = F.cross_entropy(out.seq_relationship_logits, batch.order_labels, reduction="sum")
    assert sums["sentence_order"].item() == pytest.approx(order.item(), rel=1e-5)
    if batch.labels is not None:
        masked = F.cross_entropy(out.prediction_logits, batch.labels, reduction="sum")
        assert sums["masked_lm"].item() == pytest.approx(masked.item(), rel=1e-5)


def test_sentence_order_trains_models_without_token_types() -> None:
    batch = SentenceOrder(VOCABULARY, token_types=False).batch(make_rows([9, 4]), 0)
    assert batch.token_type_ids is None
    model = TASK_MODELS["pretraining"](tiny_config(type_vocab_size=0)).train()
    assert torch.isfinite(SentenceOrder(VOCABULARY).losses(model, batch)["sentence_order"])


def test_moving_a_batch_moves_all_its_tensors_but_the_lengths() -> None:
    batch = OBJECTIVES["order and tokens"].batch(make_rows([4]), 0).to("meta")
    devices = {name: value.device.type for name, value in tensors(batch).items()}
    assert devices.pop("cu_seqlens") == "cpu"
    assert set(devices.values()) == {"meta"}
    assert set(batch.counts) == {"masked_lm", "sentence_order"}


# ---------------------------------------------------------------------- vocabularies of real tokenizers


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_word_boundaries_of_each_kind_of_tokenizer(kind: Any) -> None:
    tokenizer = train_tokenizer(kind, 290, ["the tokenizer tokenizes untokenized tokens.", "Is it so? Yes."] * 4)
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    text = "the unseen tokenize it. so"
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, places = np.array(encoded.input_ids), encoded["offset_mapping"]
    is_dot = [text[a:b] == "." for a, b in places]
    # BPE's tokens hold the space before a word; WordPiece's do not, and punctuation is a word of its own
    begins = [
        text[a] == " " if kind == "bpe" else a == 0 or text[a - 1] == " " or dot
        for (a, _), dot in zip(places, is_dot, strict=True)
    ]
    assert vocabulary.starts_word is not None
    assert len(ids) > len(text.split()) + 1
    assert vocabulary.starts_word[ids].tolist() == begins
    assert vocabulary.ends_sentence[ids].tolist() == is_dot
    assert set(np.flatnonzero(vocabulary.is_special)) == set(tokenizer.all_special_ids)
    assert (vocabulary.cls, vocabulary.sep, vocabulary.mask) == (2, 3, 4)


def test_characters_that_look_like_another_tokenizers_markers_are_text() -> None:
    """Documentation may contain "▁" as a character and headings that begin with "##"."""
    texts = ["the tokenizer tokenizes tokens with ▁ and ▁▁", "## tokens", "### tokenizers"] * 4
    for kind, inside, begins in (("wordpiece", "##s", "tokens"), ("bpe", "s", "Ġtokens")):
        tokenizer = train_tokenizer(kind, 300, texts)
        starts = Vocabulary.from_tokenizer(tokenizer).starts_word
        assert starts[tokenizer.convert_tokens_to_ids([inside, begins])].tolist() == [False, True]


def test_a_tokenizer_without_a_mask_token_raises() -> None:
    tokenizer = train_tokenizer("wordpiece", 60, ["a b"])
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="has no mask_token; pretraining needs one"):
        Vocabulary.from_tokenizer(tokenizer)


def test_chunks_of_a_packed_row_do_not_see_each_other() -> None:
    """In a packed row, each chunk gets the result it would get alone."""
    model = BertBlocksModel(tiny_config()).eval()
    batch = OBJECTIVES["tokens"].batch(make_rows([9, 20, 5]), 0)
    packed = model(batch.input_ids, cu_seqlens=batch.cu_seqlens).last_hidden_state.view(-1, 32)
    for a, b in itertools.pairwise(batch.cu_seqlens.tolist()):
        alone = model(batch.input_ids[a:b][None]).last_hidden_state[0]
        assert torch.allclose(packed[a:b], alone, atol=1e-5)


@pytest.mark.parametrize("lengths", [[70, 1, 33], [5]])
def test_masks_of_whole_documents_do_not_depend_on_the_sequence_length(lengths: Any) -> None:
    """The same tokens of a document are masked, whatever the sequence length."""
    (documents,) = zip(*make_rows(lengths, low=5), strict=True)
    objective = MaskedLanguageModeling(VOCABULARY, 0.3, mask_share=1.0, random_share=0.0)
    found = []
    for length in (8, 16, 128):
        parts = []
        for batch in objective.batch_documents(list(documents), length, max_tokens=40, seed=3):
            sizes = batch.cu_seqlens.diff().tolist()
            assert max(sizes) <= length
            assert sum(sizes) <= 40 or len(sizes) == 1
            assert [int(batch.input_ids[start]) for start in batch.cu_seqlens[:-1]] == [CLS] * len(sizes)
            parts += [part[1:-1] for part in batch.labels.split(sizes)]
        found.append(torch.cat(parts).tolist())
    whole = objective.batch([[document] for document in documents], seed=3)
    assert found == [without_ends(whole.labels, lengths).tolist()] * 3
