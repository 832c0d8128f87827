"""Masked diffusion: the bound and generation."""

import itertools
import math
from typing import Any

import pytest
import torch

from bertblocks import BertBlocksForMaskedDiffusion, ConfigError
from bertblocks.analysis import analyze
from bertblocks.models.model import Encoded
from tests.helpers import pad_ids, ragged_ids, tiny_config

MASK, PAD, VOCAB = 3, 0, 60


def make(**options: Any) -> BertBlocksForMaskedDiffusion:
    return BertBlocksForMaskedDiffusion(tiny_config(mask_token_id=MASK, **options)).eval()


def make_uniform() -> BertBlocksForMaskedDiffusion:
    """Gives every token the same probability, so its true loss is log(vocabulary) per token."""
    model = make(tie_word_embeddings=False)
    torch.nn.init.zeros_(model.decoder.weight)
    torch.nn.init.zeros_(model.decoder.bias)
    return model


def test_loss_is_weighted_by_time_and_divided_by_real_tokens() -> None:
    model = make()
    sequences = [torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10, 11])]
    clean, mask = pad_ids(sequences)
    hidden = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0]]).bool()
    times = torch.tensor([0.5, 0.2])
    noised = clean.masked_fill(hidden, MASK)
    labels = clean.masked_fill(~hidden, -100)
    out = model(noised, attention_mask=mask, labels=labels, timesteps=times)
    log_probabilities = out.logits.log_softmax(-1)
    first = -(log_probabilities[0, 0, 5] + log_probabilities[0, 2, 7]) / 0.5
    second = -log_probabilities[1, 1, 10] / 0.2
    torch.testing.assert_close(out.loss, (first + second) / 7)
    packed = model(
        torch.cat([noised[0], noised[1, :3]]), cu_seqlens=torch.tensor([0, 4, 7]),
        labels=torch.cat([labels[0], labels[1, :3]]), timesteps=times,
    ).loss  # fmt: skip
    torch.testing.assert_close(packed, out.loss)


def test_the_bound_of_a_uniform_model_is_on_average_its_true_loss() -> None:
    model = make_uniform().train()
    ids, mask = pad_ids(ragged_ids([20, 13, 30, 7, 25, 18, 9, 11]))
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        losses = torch.stack([model(ids, attention_mask=mask, labels=labels).loss for _ in range(600)])
    # without the weight 1/t it would be half of this
    error = losses.std() / math.sqrt(len(losses))
    assert abs(losses.mean() - math.log(VOCAB)) < 5 * error
    assert error < 0.1


def test_noise_masks_only_labelled_tokens_and_is_stratified() -> None:
    model = make().train()
    seen = []
    model.model.embedding.token.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    ids = torch.randint(5, VOCAB, (8, 50))
    labels = ids.clone()
    labels[:, :10] = -100
    shares = []
    for _ in range(50):
        loss = model(ids, labels=labels).loss
        noised = seen.pop().view(8, 50)
        assert torch.equal(noised[:, :10], ids[:, :10])
        shares.append((noised[:, 10:] == MASK).float().mean())
        assert torch.isfinite(loss)
    # one draw per eighth of [0, 1]: the mean share of a batch hardly varies
    assert abs(torch.stack(shares).mean() - 0.5) < 0.03
    assert torch.stack(shares).std() < 0.08


@pytest.mark.parametrize("order", ["confidence", "ancestral"])
@pytest.mark.parametrize("steps", [1, 3, 100])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}])
@pytest.mark.parametrize("block_length", [None, 2])
def test_infill_fills_all_masks_and_nothing_else(order: Any, steps: Any, sampling: Any, block_length: Any) -> None:
    # a model that likes [MASK] and padding best of all must not write them
    model = make_uniform()
    with torch.no_grad():
        model.decoder.bias[[MASK, PAD]] = 9.0
    ids, mask = pad_ids(
        [torch.tensor([5, MASK, MASK, 8, MASK, MASK, MASK]), torch.tensor([MASK, 9]), torch.tensor([7])]
    )
    model.train()  # dropout is off all the same, and training goes on as before
    filled = model.infill(ids, mask, steps=steps, order=order, block_length=block_length, **sampling)
    assert model.training
    was_open = ids == MASK
    assert torch.equal(filled[~was_open], ids[~was_open])
    assert not torch.isin(filled[was_open], torch.tensor([MASK, PAD])).any()


def reveals(model: Any, ids: Any, **options: Any) -> list[list[int]]:
    """Returns the slots of the first row that each forward pass filled."""
    seen = []
    embedding = model.model.embedding.token
    handle = embedding.register_forward_hook(lambda module, args, output: seen.append(args[0].clone()))
    final = model.infill(ids, **options)[0]
    handle.remove()
    states = [*seen, final]
    return [((a == MASK) & (b != MASK)).nonzero().flatten().tolist() for a, b in itertools.pairwise(states)]


def test_steps_divide_the_masks_and_blocks_run_from_left_to_right() -> None:
    model = make()
    ids = torch.tensor([[5, MASK, MASK, MASK, MASK, 8, MASK, MASK]])
    by_step = reveals(model, ids, steps=3)
    assert [len(slots) for slots in by_step] == [2, 2, 2]
    blocks = reveals(model, ids, steps=3, block_length=2)
    assert [sorted(slots) for slots in blocks] == [[1, 2], [3, 4], [6, 7]]


def test_the_most_probable_token_comes_first() -> None:
    model = make()
    ids = torch.tensor([[5, MASK, 7, MASK, 9]])
    logits = model(ids).logits[0]
    logits[:, [MASK, PAD]] = float("-inf")
    sureness = logits.softmax(-1).max(-1).values
    first = 1 if sureness[1] > sureness[3] else 3
    assert reveals(model, ids, steps=2)[0] == [first]


def test_sampling_is_reproducible_and_respects_top_k_and_top_p() -> None:
    model = make_uniform()
    with torch.no_grad():
        model.decoder.bias[7], model.decoder.bias[8] = 4.0, 3.0
    ids = torch.full((20, 10), MASK)
    one, two = (
        model.infill(ids, temperature=1.0, generator=torch.Generator().manual_seed(5), order="ancestral")
        for _ in range(2)
    )
    assert torch.equal(one, two)
    assert set(one.unique().tolist()) > {7, 8}
    assert set(model.infill(ids, temperature=1.0, top_k=2).unique().tolist()) == {7, 8}
    # the likeliest token alone has a probability of about 0.41
    assert set(model.infill(ids, temperature=1.0, top_p=0.3).unique().tolist()) == {7}
    assert set(model.infill(ids).unique().tolist()) == {7}


def test_generate_continues_ragged_prompts() -> None:
    model = make()
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([8])]
    for side in ("right", "left"):
        ids, mask = pad_ids(prompts, side)
        written = model.generate(ids, mask, max_new_tokens=4, steps=4)
        assert written.shape == (2, 7)
        for row, prompt in enumerate(prompts):
            end = len(prompt) + 4
            assert torch.equal(written[row, : len(prompt)], prompt)
            assert not torch.isin(written[row, len(prompt) : end], torch.tensor([MASK, PAD])).any()
            assert (written[row, end:] == PAD).all()
            alone = model.generate(prompt[None], max_new_tokens=4, steps=4)
            assert torch.equal(written[row, :end], alone[0])
    assert model.generate(max_new_tokens=5).shape == (1, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"order": "random"}, "order is 'random'; it must be 'confidence' or 'ancestral'"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"block_length": 0}, "block_length is 0"),
    ],
)
def test_invalid_sampling_options_raise(options: Any, message: Any) -> None:
    with pytest.raises(ValueError, match=message):
        make().infill(torch.tensor([[MASK]]), **options)


def test_a_mask_token_is_required() -> None:
    with pytest.raises(ValueError, match="mask_token_id is None"):
        BertBlocksForMaskedDiffusion(tiny_config())


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([0.0, 0.5], r"each must be greater than 0 and at most 1"),
        ([0.5, 1.5], r"each must be greater than 0 and at most 1"),
        ([0.5], r"timesteps has shape \[1\]; it must be \[2\]"),
    ],
)
def test_invalid_timesteps_raise(times: Any, message: Any) -> None:
    ids = torch.tensor([[5, MASK], [MASK, 6]])
    with pytest.raises(ValueError, match=message):
        make()(ids, labels=ids, timesteps=torch.tensor(times))


def test_timesteps_without_labels_and_a_batch_of_padding() -> None:
    ids = torch.tensor([[5, MASK]])
    with pytest.raises(ValueError, match="timesteps are given without labels"):
        make()(ids, timesteps=torch.tensor([0.5]))
    nothing = torch.zeros_like(ids)
    assert make()(ids, attention_mask=nothing, labels=ids, timesteps=torch.tensor([0.5])).loss == 0


# ---------------------------------------------------------------------- a toy of known entropy

#: A Markov chain over three words: the first word, and the next word after each.
START = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
CHAIN = torch.tensor([[0.1, 0.7, 0.2], [0.6, 0.1, 0.3], [0.25, 0.25, 0.5]], dtype=torch.float64)
FIRST_WORD, WORDS, LENGTH = 4, 3, 4
TEXTS = torch.tensor(list(itertools.product(range(WORDS), repeat=LENGTH)))


def text_probabilities() -> torch.Tensor:
    """The probability of each of the 81 texts."""
    steps = CHAIN[TEXTS[:, :-1], TEXTS[:, 1:]].prod(dim=1)
    return START[TEXTS[:, 0]] * steps


def conditionals(ids: torch.Tensor) -> torch.Tensor:
    """The exact distribution of each word given the visible ones, as a sum over all texts: [texts, length, words]."""
    visible = ids != MASK
    agrees = ((TEXTS[None] + FIRST_WORD == ids[:, None]) | ~visible[:, None]).all(dim=2)
    weights = agrees * text_probabilities()
    chances = torch.stack([weights @ torch.eq(TEXTS, word).double() for word in range(WORDS)], dim=2)
    return chances / weights.sum(dim=1)[:, None, None]


def exact_model(monkeypatch: pytest.MonkeyPatch) -> BertBlocksForMaskedDiffusion:
    """A model whose logits are the exact conditional distributions, in place of an encoder."""
    model = make(vocab_size=FIRST_WORD + WORDS)

    def encode(input_ids: Any, *arguments: Any, token_indices: Any = None, **options: Any) -> Any:
        layout = model.model.layout(input_ids)
        chances = torch.zeros(*input_ids.shape, FIRST_WORD + WORDS, dtype=torch.float64)
        chances[..., FIRST_WORD:] = conditionals(input_ids)
        hidden = chances.log().flatten(0, 1)
        indices = None if token_indices is None else token_indices(layout)
        return Encoded(hidden if indices is None else hidden[indices], layout, indices, None, None, [])

    monkeypatch.setattr(model.model, "encode", encode)
    monkeypatch.setattr(model, "logits", lambda hidden: hidden)
    return model


def test_the_bound_of_an_exact_model_is_the_entropy_of_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The integral over t in closed form: a set of k masks has the weight of a beta function, B(k, length - k + 1)."""
    model = exact_model(monkeypatch)
    texts = TEXTS + FIRST_WORD
    time = torch.tensor(0.25, dtype=torch.float64)  # any time: its weight 1/t is taken out again
    bounds = torch.zeros(len(texts), dtype=torch.float64)
    for places in itertools.chain.from_iterable(itertools.combinations(range(LENGTH), k) for k in range(1, LENGTH + 1)):
        masked = torch.zeros(LENGTH, dtype=torch.bool)
        masked[list(places)] = True
        k = len(places)
        beta = math.gamma(k) * math.gamma(LENGTH - k + 1) / math.gamma(LENGTH + 1)
        for number, text in enumerate(texts):
            noised, labels = text.masked_fill(masked, MASK)[None], text.masked_fill(~masked, -100)[None]
            loss = model(noised, labels=labels, timesteps=time[None], num_items_in_batch=1).loss
            bounds[number] += beta * time * loss
    probabilities = text_probabilities()
    torch.testing.assert_close(bounds, -probabilities.log(), atol=1e-6, rtol=0.0)
    entropy = -(probabilities * probabilities.log()).sum()
    torch.testing.assert_close(probabilities @ bounds, entropy, atol=1e-6, rtol=0.0)


def block_law(size: int, joint_share: float) -> torch.Tensor:
    """The law of texts if the words of a block are drawn from their joint distribution, or each alone.

    Both see the blocks before; `joint_share` is the probability of the former.
    """
    law = torch.ones(len(TEXTS), dtype=torch.float64)
    everything = text_probabilities()
    for start in range(0, LENGTH, size):
        known, block = TEXTS[:, :start], TEXTS[:, start : start + size]
        before = (known[:, None] == known[None]).all(dim=2).double()
        alone = torch.ones_like(law)
        for place in range(block.shape[1]):
            same = (block[:, None, place] == block[None, :, place]).double()
            alone *= (before * same) @ everything / (before @ everything)
        joint = (before * (block[:, None] == block[None]).all(dim=2)) @ everything / (before @ everything)
        law *= joint_share * joint + (1 - joint_share) * alone
    return law


@pytest.mark.parametrize(
    ("block_length", "steps", "order", "law"),
    [
        (1, LENGTH, "confidence", (1, 1.0)),  # word by word, from left to right: the chain itself
        (1, 12, "ancestral", (1, 1.0)),
        (2, 2, "confidence", (2, 0.0)),  # one pass per block: its words are independent
        (2, 4, "ancestral", (2, 0.5)),  # the two words of a block come in different passes half of the time
        (None, 1, "ancestral", (LENGTH, 0.0)),  # all words at once
        (3, 1, "confidence", (3, 0.0)),  # a block has at least one pass; the last has one word
    ],
)
def test_samples_of_an_exact_model_follow_their_law(
    monkeypatch: pytest.MonkeyPatch, block_length: Any, steps: int, order: str, law: tuple[int, float]
) -> None:
    model, count = exact_model(monkeypatch), 4000
    samples = model.infill(
        torch.full((count, LENGTH), MASK),
        steps=steps,
        order=order,
        temperature=1.0,
        block_length=block_length,
        generator=torch.Generator().manual_seed(0),
    )
    numbers = (samples - FIRST_WORD) @ torch.tensor([27, 9, 3, 1])
    found = torch.bincount(numbers, minlength=len(TEXTS)).double()

    def distance(expected: torch.Tensor) -> float:
        """Pearson's statistic, in standard deviations above its mean."""
        statistic = ((found - count * expected) ** 2 / (count * expected)).sum()
        return float((statistic - (len(TEXTS) - 1)) / math.sqrt(2 * (len(TEXTS) - 1)))

    expected = block_law(*law)
    torch.testing.assert_close(expected.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert distance(expected) < 4
    others = [(1, 1.0), (2, 0.0), (2, 0.5), (LENGTH, 0.0), (3, 0.0)]
    assert all(distance(block_law(*other)) > 10 for other in others if other != law)
    # the entropy of the samples, without the bias of counting (Miller and Madow, 1955)
    share = found[found > 0] / count
    entropy = -(share * share.log()).sum() + (len(share) - 1) / (2 * count)
    assert entropy == pytest.approx(-(expected * expected.log()).sum().item(), abs=0.05)


# ---------------------------------------------------------------------- timesteps as input


def make_timed(**options: Any) -> BertBlocksForMaskedDiffusion:
    return make(timestep_embedding=True, num_hidden_layers=1, **options)


def test_the_noise_level_is_added_to_the_embeddings_of_its_text() -> None:
    """B silu(A s) with s = sin and cos of 1000 t w, w = 10000^(-2i/d), before the norm."""
    model = make_timed(embedding_norm=False)
    timestep, times = model.model.embedding.timestep, [0.25, 0.7]
    assert timestep is not None
    ids = torch.tensor([5, 6, 7, 8, 9])
    bounds = torch.tensor([0, 2, 5])
    states = model.model.encode(
        ids, cu_seqlens=bounds, timesteps=torch.tensor(times), output_hidden_states=True
    ).hidden_states
    assert states is not None
    model.model.embedding.timestep = None
    plain = model.model.encode(ids, cu_seqlens=bounds, output_hidden_states=True).hidden_states
    assert plain is not None
    for token, sequence in enumerate([0, 0, 1, 1, 1]):
        angles = [1000 * times[sequence] * 10_000 ** (-2 * i / 32) for i in range(16)]
        waves = torch.tensor([wave for angle in angles for wave in (math.sin(angle), math.cos(angle))])
        hidden = timestep.up.weight @ waves + timestep.up.bias
        added = timestep.down.weight @ (hidden * torch.sigmoid(hidden)) + timestep.down.bias
        torch.testing.assert_close(states[0][token], plain[0][token] + added, atol=1e-3, rtol=1e-3)


def test_without_a_given_level_it_is_the_share_of_masks() -> None:
    model = make_timed()
    ids, mask = pad_ids([torch.tensor([5, MASK, 7, MASK]), torch.tensor([MASK]), torch.tensor([8, 9, 10])])
    for unpad in (True, False):
        model.config.unpad = unpad
        share = model.model.encode(ids, mask).hidden
        given = model.model.encode(ids, mask, timesteps=torch.tensor([0.5, 1.0, 0.0])).hidden
        other = model.model.encode(ids, mask, timesteps=torch.tensor([0.4, 1.0, 0.0])).hidden
        torch.testing.assert_close(share, given)
        assert (given - other).abs().max() > 1e-3


def test_training_and_infilling_tell_the_model_the_level() -> None:
    model = make_timed()
    levels: list[Any] = []
    waves = model.model.embedding.timestep.waves  # type: ignore[union-attr]
    waves.register_forward_pre_hook(lambda _, args: levels.append(args[0] / 1000))
    ids = torch.randint(5, VOCAB, (4, 6))
    times = torch.tensor([0.1, 0.2, 0.3, 0.4])
    model(ids, labels=ids, timesteps=times)
    torch.testing.assert_close(levels.pop(), times)
    torch.manual_seed(0)
    model.train()(ids, labels=ids)  # draws the noise itself, one level in each quarter of [0, 1]
    assert sorted((levels.pop() * 4).int().tolist()) == [0, 1, 2, 3]
    model.infill(torch.tensor([[5, MASK, MASK, MASK]]), steps=3)
    assert [level.item() for level in levels] == pytest.approx([0.75, 0.5, 0.25])


def test_levels_without_labels_need_a_model_that_reads_them() -> None:
    ids, times = torch.tensor([[5, MASK]]), torch.tensor([0.5])
    assert make_timed()(ids, timesteps=times).logits.shape == (1, 2, VOCAB)
    with pytest.raises(ValueError, match="timesteps are given without labels"):
        make()(ids, timesteps=times)
    with pytest.raises(ValueError, match=r"timesteps has shape \[2\]; it must be \[1\]"):
        make_timed()(ids, timesteps=torch.tensor([0.5, 0.5]))


def test_timestep_embeddings_need_the_id_of_the_mask_and_ids() -> None:
    with pytest.raises(ConfigError, match="timestep_embedding is True; it requires mask_token_id"):
        tiny_config(timestep_embedding=True)
    with pytest.raises(ValueError, match="timestep_embedding needs input_ids or timesteps"):
        make_timed().model(inputs_embeds=torch.randn(1, 3, 32))


def test_a_timestep_embedding_costs_two_products_per_text() -> None:
    plain, timed = (
        analyze(tiny_config(mask_token_id=MASK, timestep_embedding=on), "masked-diffusion", [10])
        for on in (False, True)
    )
    assert timed.costs[0].flops["embedding projection"] == 2 * 2 * 32 * 32
    part = "position and type embedding"
    assert timed.parameters[part] - plain.parameters[part] == 2 * (32 * 32 + 32)
