"""Growing: weights follow the documented map, outputs stay equal where promised, and the initial loss is low."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bertblocks import (
    BertBlocksConfig,
    BertBlocksForMaskedDiffusion,
    BertBlocksForMaskedLM,
    BertBlocksForPreTraining,
    BertBlocksForSequenceClassification,
)
from bertblocks.checkpoints.grow import depth_map, grow
from tests.helpers import EDGE_LENGTHS, pad_ids, ragged_ids, tiny_config

MODERN = {
    "norm_pos": "pre",
    "first_attention_norm": False,
    "mlp_type": "glu",
    "norm_bias": False,
    "embd_pos_enc_kind": "none",
    "block_pos_enc_kind": "rope",
    "local_attention": True,
    "global_attention_every_n_layers": 3,
    "type_vocab_size": 0,
}
#: Twice the width of the tiny config.
DOUBLE = {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 48}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bert": {},
    "modern": MODERN,
    "rms, untied": {**MODERN, "norm_fn": "rms", "tie_word_embeddings": False, "mlm_head_dense": False},
    "rms, tied, no head": {**MODERN, "norm_fn": "rms", "mlm_head_dense": False},
    "grouped heads": {**MODERN, "num_kv_heads": 2, "qk_norm": True},
    "norms over all heads": {**MODERN, "qk_norm": True, "qk_norm_fn": "layer", "qk_norm_across_heads": True},
    "wide output": {"output_embedding_size": 48, "tie_word_embeddings": False},
    "t5": {"block_pos_enc_kind": "t5", "embd_pos_enc_kind": "none"},
    "disentangled": {"block_pos_enc_kind": "disentangled", "attention_key_bias": False},
    "deberta v2": {
        "block_pos_enc_kind": "disentangled",
        "disentangled_num_buckets": 8,
        "disentangled_norm": True,
        "disentangled_share_projections": True,
        "input_conv_size": 3,
    },
    "t5 in each layer": {"block_pos_enc_kind": "t5", "relative_attention_shared": False},
    "shared layers": {"num_hidden_groups": 1, "embedding_size": 16, "intermediate_size": 24},
    "deep": {"norm_fn": "deep"},
    "dynamic tanh": {"norm_fn": "dynamic_tanh"},
    "parallel": {**MODERN, "parallel_block": True},
    "gated head": {"mlm_head_glu": True, "embedding_size": 16},
    "norm scaling": {"norm_pos": "pre", "norm_scaling": True},
    "experts": {"mlp_type": "moe", "num_experts": 3, "expert_type": "glu", "shared_expert": True},
    "span convolution": {"span_convolution": True, "span_conv_size": 5},
    "sinks": {"attention_sinks": True},
    "sandwich": {"norm_pos": "sandwich"},
    "roberta": {"position_offset": 2, "pad_token_id": 1},
}


def randomized(model: Any) -> Any:
    """Draws biases and norms at random too, so that a wrong mapping shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_growing_to_a_multiple_of_the_width_keeps_the_outputs(name: Any) -> None:
    options = ARCHITECTURES[name]
    wider = dict(DOUBLE)
    if "num_kv_heads" in options:
        wider["num_kv_heads"] = 4
    if "embedding_size" in options:
        wider["embedding_size"] = 48
    small = randomized(BertBlocksForMaskedLM(tiny_config(**options)))
    large = grow(small, tiny_config(**{**options, **wider}), noise=0.0).eval()
    assert large.num_parameters() > 2 * small.num_parameters()
    ids, mask = pad_ids([ids.clamp(min=2) for ids in ragged_ids([n for n in EDGE_LENGTHS if n])])
    with torch.no_grad():
        torch.testing.assert_close(
            large(ids, attention_mask=mask).logits, small(ids, attention_mask=mask).logits, atol=2e-4, rtol=1e-4
        )


@pytest.mark.parametrize("task", [BertBlocksForPreTraining, BertBlocksForSequenceClassification])
def test_grow_works_for_every_head(task: Any) -> None:
    small = randomized(task(tiny_config(num_labels=3)))
    large = grow(small, tiny_config(**DOUBLE, num_labels=3), noise=0.0).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    for key, value in small(ids).items():
        torch.testing.assert_close(large(ids)[key], value, atol=2e-4, rtol=1e-4)


def test_every_weight_of_a_grown_modern_layer_follows_the_documented_map() -> None:
    """Width 24 -> 40, heads 3 -> 5, feed-forward 10 -> 16, which are not whole multiples, checked index by index."""
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 10}
    larger = {"hidden_size": 40, "num_attention_heads": 5, "intermediate_size": 16}
    small = randomized(BertBlocksForMaskedLM(tiny_config(**{**MODERN, **sizes})))
    large = grow(small, tiny_config(**{**MODERN, **larger}), noise=0.0)
    for model in (small, large):
        model.requires_grad_(False)
    old, new = small.model.encoder.layers[1], large.model.encoder.layers[1]
    copies = [2 if unit < 16 else 1 for unit in range(24)]  # 40 - 24 units are there twice
    head_copies = [2, 2, 1]
    for row in range(3 * 40):
        part, unit = divmod(row, 40)  # queries, keys, values
        head, place = divmod(unit, 8)
        source_row = part * 24 + head % 3 * 8 + place
        for column in range(40):
            expected = old.attention.qkv.weight[source_row, column % 24] / copies[column % 24]
            assert new.attention.qkv.weight[row, column] == expected
    for row in range(40):
        for column in range(40):
            head, place = divmod(column, 8)
            expected = old.attention.out.weight[row % 24, head % 3 * 8 + place] / head_copies[head % 3]
            assert new.attention.out.weight[row, column] == expected
    for half in range(2):
        for unit in range(16):
            expected = old.mlp.up.weight[half * 10 + unit % 10, 3] / copies[3]
            assert new.mlp.up.weight[half * 16 + unit, 3] == expected
    assert torch.equal(large.model.embedding.token.weight[:, 24:], small.model.embedding.token.weight[:, :16])
    assert torch.equal(new.mlp_residual.pre_norm.weight[24:], old.mlp_residual.pre_norm.weight[:16])


def kinds(every: int, layers: int) -> list[str]:
    return ["global" if index % every == 0 else "local" for index in range(layers)]


@pytest.mark.parametrize(("old", "new"), [(22, 28), (4, 12), (3, 7), (7, 7), (2, 9)])
def test_new_layers_copy_layers_of_their_kind_at_the_same_relative_depth(old: Any, new: Any) -> None:
    def model(layers: int) -> BertBlocksForMaskedLM:
        with torch.device("meta"):
            return BertBlocksForMaskedLM(tiny_config(**MODERN, num_hidden_layers=layers))

    mapped = depth_map(model(old), model(new))
    assert len(mapped) == new
    assert all(0 <= layer < old for layer in mapped)
    before, after = kinds(3, old), kinds(3, new)
    assert [before[layer] for layer in mapped] == after
    assert mapped[0] == 0
    for kind in ("global", "local"):
        of_kind = [layer for layer, name in zip(mapped, after, strict=True) if name == kind]
        assert of_kind == sorted(of_kind)
    # the first layer lacks a norm, so it is copied only if there is no other layer of its kind
    if before.count("global") > 1:
        assert mapped.count(0) == 1
    if old == new:
        assert mapped == list(range(old))


def test_growing_in_depth_copies_layers_and_keeps_everything_else() -> None:
    small = randomized(BertBlocksForMaskedLM(tiny_config(**MODERN, num_hidden_layers=4)))
    large = grow(small, tiny_config(**MODERN, num_hidden_layers=7))  # no width is tiled, so there is no noise
    mapped = depth_map(small, large)
    assert mapped == [0, 1, 1, 3, 2, 2, 3]
    for index, layer in enumerate(mapped):
        for name, weight in large.model.encoder.layers[index].named_parameters():
            assert torch.equal(weight, small.model.encoder.layers[layer].get_parameter(name)), (index, name)
    assert torch.equal(large.decoder.weight, small.decoder.weight)
    assert torch.equal(large.head.norm.weight, small.head.norm.weight)


def test_growing_to_the_same_size_changes_nothing() -> None:
    small = randomized(BertBlocksForMaskedLM(tiny_config(**MODERN)))
    again = grow(small, tiny_config(**MODERN))
    for name, weight in small.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def train(model: Any, ids: torch.Tensor, steps: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(step)) < 0.3
        loss = model(ids.masked_fill(hidden, 3), labels=ids.masked_fill(~hidden, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return measure(model, ids)


@torch.no_grad()
def measure(model: Any, ids: torch.Tensor) -> float:
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(99)) < 0.3
    return model.eval()(ids.masked_fill(hidden, 3), labels=ids.masked_fill(~hidden, -100)).loss.item()


@pytest.mark.parametrize(
    "larger",
    [DOUBLE, {"hidden_size": 40, "num_attention_heads": 5, "intermediate_size": 40, "num_hidden_layers": 4}],
    ids=["twice the width", "other widths and a layer more"],
)
@pytest.mark.slow
def test_a_grown_model_starts_with_a_much_lower_loss_than_a_new_one(larger: Any) -> None:
    options = {**MODERN, "initializer_range": 0.05}
    # texts that count upwards, from which any hidden token can be told
    ids = (torch.arange(16) + torch.arange(24)[:, None]) % 50 + 5
    small = BertBlocksForMaskedLM(tiny_config(**options))
    fresh = measure(BertBlocksForMaskedLM(tiny_config(**{**options, **larger})), ids)
    trained = train(small, ids, 150)
    assert trained < fresh / 4
    large = grow(small, tiny_config(**{**options, **larger}))
    start = measure(large, ids)
    assert start < fresh / 2
    assert train(large.train(), ids, 40) < start


def test_copies_diverge_only_with_noise() -> None:
    small = BertBlocksForMaskedLM(tiny_config(**MODERN))
    ids = torch.randint(5, 60, (4, 12))
    for noise, together in ((0.0, True), (0.01, False)):
        large = grow(small, tiny_config(**MODERN, **DOUBLE), noise=noise).train()
        large(ids, labels=ids).loss.backward()
        gradient = large.model.encoder.layers[1].mlp.up.weight.grad[:48]
        assert torch.allclose(gradient[:24], gradient[24:], rtol=1e-3, atol=1e-5) == together


def test_a_grown_ngpt_model_has_normalized_matrices() -> None:
    options = {"ngpt": True, "embd_pos_enc_kind": "none", "block_pos_enc_kind": "rope", "mask_token_id": 3}
    small = BertBlocksForMaskedDiffusion(tiny_config(**options))
    large = grow(small, tiny_config(**options, **DOUBLE))
    rows = large.model.encoder.layers[0].attention.qkv.weight.norm(dim=1)
    torch.testing.assert_close(rows, torch.ones_like(rows))


@pytest.mark.parametrize(
    ("small", "large", "message"),
    [
        ({}, {"hidden_size": 64}, "head_dim is 16 in the larger model and 8 in the smaller: heads stay whole"),
        ({}, {"norm_fn": "rms"}, "norm_fn is 'rms' in the larger model and 'layer' in the smaller"),
        ({}, {"vocab_size": 61}, "vocab_size is 61"),
        ({}, {"num_hidden_layers": 2}, "num_hidden_layers is 2; it must be at least 3, as in the smaller model"),
        ({}, {"local_attention": True}, "Layer 0 is local, but the smaller model has no local layer to copy"),
        (
            {"num_kv_heads": 2},
            {"num_kv_heads": 2, "hidden_size": 64, "num_attention_heads": 8},
            "num_kv_heads is 2 for 8 heads and was 2 for 4",
        ),
        ({}, {"mlm_head_size": 20}, r"head.inner.weight has no counterpart"),
    ],
)
def test_growing_to_a_smaller_or_different_model_raises(small: Any, large: Any, message: Any) -> None:
    model = BertBlocksForMaskedLM(tiny_config(**small))
    with pytest.raises(ValueError, match=message):
        grow(model, tiny_config(**large))


def test_modernbert_base_grows_to_modernbert_large() -> None:
    with torch.device("meta"):
        small, large = (
            BertBlocksForMaskedLM(BertBlocksConfig.from_preset(f"modernbert-{size}")) for size in ("base", "large")
        )
    mapped = depth_map(small, large)
    assert [small.config.layer_types[layer] for layer in mapped] == large.config.layer_types


def test_block_diagonal_projections_cannot_grow() -> None:
    small, large = (tiny_config(mlp_type="grouped", **sizes) for sizes in ({}, DOUBLE))
    with pytest.raises(ValueError, match="mlp_type is 'grouped'; only full projections can grow"):
        grow(BertBlocksForMaskedLM(small), large)
