"""Factors on embeddings, scores and sublayers, and the forms of a norm's weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from bertblocks import BertBlocksConfig, BertBlocksModel, ConfigError
from bertblocks.nn.norm import get_norm
from tests.helpers import naive_attention, tiny_config

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.mark.parametrize("norm_fn", ["layer", "rms", "deep"])
@pytest.mark.parametrize("norm_weight", ["one_plus", "none"])
def test_weights_of_norms_have_other_forms(norm_fn: str, norm_weight: str) -> None:
    config = tiny_config(norm_fn=norm_fn, norm_weight=norm_weight, norm_eps=0.3)
    norm: Any = get_norm(config)
    x = torch.randn(7, 32) * 2 + 1
    centered = x if norm_fn == "rms" else x - x.mean(-1, keepdim=True)
    expected = centered / (centered.square().mean(-1, keepdim=True) + 0.3).sqrt()
    torch.testing.assert_close(norm(x), expected)  # both start as the identity after normalization
    if norm_weight == "one_plus":
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
        torch.testing.assert_close(norm(x), expected * (1 + norm.weight) + norm.bias, atol=1e-5, rtol=1e-5)
    else:
        assert [name for name, _ in norm.named_parameters()] == ["bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_plus_equals_gemmas_norm(dtype: torch.dtype) -> None:
    theirs = Gemma3RMSNorm(32, eps=1e-6)
    torch.nn.init.normal_(theirs.weight)
    config = tiny_config(norm_fn="rms", norm_weight="one_plus", norm_eps=1e-6, norm_bias=False)
    ours: Any = get_norm(config)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(9, 32).to(dtype)
    assert torch.equal(ours.to(dtype)(x), theirs.to(dtype)(x))


def test_norms_of_queries_and_keys_follow() -> None:
    model = BertBlocksModel(tiny_config(norm_fn="rms", norm_weight="one_plus", qk_norm=True))
    assert not model.encoder.layers[0].attention.query_norm.weight.any()
    model = BertBlocksModel(tiny_config(norm_fn="rms", norm_weight="none", qk_norm=True))
    assert model.encoder.layers[0].attention.key_norm.weight is None


def test_the_scale_of_scores() -> None:
    assert BertBlocksConfig().attention_scale == 64**-0.5
    assert BertBlocksConfig(num_attention_heads=6).attention_scale == 128**-0.5
    assert BertBlocksConfig(ngpt=True).attention_scale == 8.0
    assert Gemma3TextConfig().query_pre_attn_scalar == 256  # Gemma states the square of the inverse
    model = BertBlocksModel(tiny_config(attention_scale=0.7, layer_overrides={1: {"attention_scale": 0.2}})).eval()
    model.requires_grad_(False)
    x = torch.randn(5, 32)
    for layer, scale in zip(model.encoder.layers, (0.7, 0.2, 0.7), strict=True):
        attention: Any = layer.attention
        seen: list[Any] = []
        attention.out.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        context = forward_context(model, 5)
        attention(x, context)
        q, k, v = attention.split(attention.qkv(x))
        torch.testing.assert_close(seen[0], naive_attention(q, k, v, scale).flatten(1), atol=1e-5, rtol=1e-5)


def forward_context(model: Any, length: int, token_ids: Any = None) -> Any:
    from bertblocks import SequenceLayout
    from bertblocks.nn.attention import ForwardContext
    from bertblocks.nn.backends import EagerBackend

    return ForwardContext(SequenceLayout.from_mask(torch.ones(1, length)), EagerBackend(), token_ids=token_ids)


def test_the_scale_of_embeddings_leaves_types_positions_and_given_embeddings_alone() -> None:
    model = BertBlocksModel(tiny_config(embedding_scale=3.0, embedding_norm=False)).eval()
    embedding = model.embedding
    others = embedding.token_type.weight[0] + embedding.position.table.weight[:4]
    tokens = embedding.token(IDS[0])
    states = model(IDS, output_hidden_states=True).hidden_states
    torch.testing.assert_close(states[0][0], 3 * tokens + others)
    states = model(inputs_embeds=tokens[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(states[0][0], tokens + others)


@pytest.mark.parametrize("norm_pos", ["pre", "post", "pre_and_post", "sandwich", "none"])
def test_the_scale_of_sublayers(norm_pos: str) -> None:
    model = BertBlocksModel(tiny_config(residual_scale=0.4, norm_pos=norm_pos, norm_eps=1e-5)).eval()
    block: Any = model.encoder.layers[0]
    x = torch.randn(4, 32)
    context = forward_context(model, 4)
    y = x
    for residual, sublayer in (
        (block.attention_residual, lambda x: block.attention(x, context)[0]),
        (block.mlp_residual, block.mlp),
    ):
        branch = sublayer(residual.pre_norm(y))
        is_inside = norm_pos == "sandwich"
        y = y + 0.4 * residual.post_norm(branch) if is_inside else residual.post_norm(y + 0.4 * branch)
    torch.testing.assert_close(block(x, context)[0], y)


def test_norms_sit_apart_in_attention_and_feed_forward() -> None:
    config = tiny_config(attention_norm_pos="pre", mlp_norm_pos="post", norm_eps=1e-5)
    assert (config.norm_pos, config.final_norm) == ("post", False)
    assert tiny_config(mlp_norm_pos="pre").final_norm
    block: Any = BertBlocksModel(config).eval().encoder.layers[0]
    x, context = torch.randn(4, 32), forward_context(None, 4)
    y = x + block.attention(block.attention_residual.pre_norm(x), context)[0]
    torch.testing.assert_close(block(x, context)[0], block.mlp_residual.post_norm(y + block.mlp(y)))
    config.norm_pos = "none"
    assert (config.attention_norm_pos, config.mlp_norm_pos) == ("pre", "none")  # only what was implied follows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"parallel_block": True, "mlp_norm_pos": "pre"},
            "mlp_norm_pos is 'pre'; it must be attention_norm_pos = 'post'",
        ),
        ({"norm_fn": "deep", "mlp_norm_pos": "pre"}, "mlp_norm_pos is 'pre'; norm_fn 'deep' requires 'post'"),
        ({"ngpt": True, "attention_norm_pos": "pre"}, "attention_norm_pos is 'pre'; ngpt requires 'none'"),
        ({"attention_norm_pos": "prenorm"}, "attention_norm_pos is 'prenorm'; it must be one of pre, post"),
    ],
)
def test_positions_of_norms_that_contradict_raise(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**options)
