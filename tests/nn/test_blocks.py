"""Every block, tested against its formula or the implementation that defined it."""

import cmath
import math
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from bertblocks import (
    BertBlocksConfig,
    BertBlocksForMaskedLM,
    BertBlocksForQuestionAnswering,
    BertBlocksForSequenceClassification,
    BertBlocksForTokenClassification,
    BertBlocksModel,
    ConfigError,
    SequenceLayout,
)
from bertblocks.analysis import analyze
from bertblocks.analysis.flops import FEED_FORWARD, count_flops
from bertblocks.models import masked_lm as masked_lm_file
from bertblocks.nn import mlp as mlp_file
from bertblocks.nn import norm as norm_file
from bertblocks.nn.activation import get_activation
from bertblocks.nn.attention import ForwardContext
from bertblocks.nn.backends import EagerBackend
from bertblocks.nn.block import get_block
from bertblocks.nn.head import QuestionAwareHead
from bertblocks.nn.initialization import INITIALIZATIONS, register_initialization
from bertblocks.nn.linear import GroupedLinear
from bertblocks.nn.mlp import get_mlp
from bertblocks.nn.ngpt import NGPTBlock
from bertblocks.nn.norm import get_norm
from bertblocks.nn.ops import liger as kernels
from bertblocks.nn.position import ALiBi, BlockPosition, SinusoidalPosition, alibi_slopes
from bertblocks.nn.rope import RotaryPosition
from tests.helpers import naive_attention, pad_ids, ragged_ids, tiny_config

CPU = torch.device("cpu")


def randomize(module: nn.Module) -> nn.Module:
    """Draws all parameters at random, because initial ones and zeros would hide mistakes."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.1)
    return module.eval()


def one_sequence(length: int) -> SequenceLayout:
    return SequenceLayout.from_shape(1, length, CPU)


# ---------------------------------------------------------------------- norms


def layer_formula(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, eps)


def rms_formula(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
    scaled = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.weight
    return scaled if norm.bias is None else scaled + norm.bias


def group_formula(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
    """Normalizes each of four groups of a token's channels."""
    out = torch.empty_like(x)
    for token in range(x.shape[0]):
        for group in torch.arange(x.shape[1]).chunk(4):
            part = x[token, group]
            out[token, group] = (part - part.mean()) / (part.var(correction=0) + eps).sqrt()
    out = out * norm.weight
    return out if norm.bias is None else out + norm.bias


def tanh_formula(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
    out = norm.weight * torch.tanh(norm.alpha * x)
    return out if norm.bias is None else out + norm.bias


FORMULAS = {
    "layer": layer_formula,
    "deep": layer_formula,
    "rms": rms_formula,
    "group": group_formula,
    "dynamic_tanh": tanh_formula,
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("norm_fn", FORMULAS)
def test_norms_equal_their_formulas(norm_fn: Any, bias: Any) -> None:
    """Uses an eps so large that leaving it out would show."""
    config = tiny_config(norm_fn=norm_fn, norm_bias=bias, norm_eps=0.3)
    norm = randomize(get_norm(config))
    assert (norm.bias is not None) == bias
    x = torch.randn(7, 32) * 2 + 1
    torch.testing.assert_close(norm(x), FORMULAS[norm_fn](x, norm, 0.3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm_fn", FORMULAS)
def test_norm_weights_start_at_one_and_biases_at_zero(norm_fn: Any) -> None:
    norm = BertBlocksModel(tiny_config(norm_fn=norm_fn)).embedding.norm
    assert torch.equal(norm.weight, torch.ones(32))
    assert torch.equal(norm.bias, torch.zeros(32))
    if norm_fn == "dynamic_tanh":
        assert norm.alpha.tolist() == [0.5]


def test_rms_norm_is_computed_in_fp32_for_half_precision() -> None:
    norm = randomize(get_norm(tiny_config(norm_fn="rms", norm_bias=False, norm_eps=1e-6))).bfloat16()
    x = (torch.randn(5, 32) * 300).bfloat16()
    precise = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * norm.weight
    assert torch.equal(norm(x), precise)


# ---------------------------------------------------------------------- residual wiring

WIRING = {
    "pre": lambda x, f, pre, post: x + f(pre(x)),
    "post": lambda x, f, pre, post: post(x + f(x)),
    "pre_and_post": lambda x, f, pre, post: post(x + f(pre(x))),
    "sandwich": lambda x, f, pre, post: x + post(f(pre(x))),
    "none": lambda x, f, pre, post: x + f(x),
}
NORMS_PER_SUBLAYER = {"pre": 1, "post": 1, "pre_and_post": 2, "sandwich": 2, "none": 0}


def build_block(**options: Any) -> tuple[nn.Module, Tensor, SequenceLayout]:
    """The second layer of a small encoder, and an input for it."""
    return randomize(get_block(tiny_config(**options), 1)), torch.randn(6, 32), one_sequence(6)


def attend(block: nn.Module, layout: SequenceLayout) -> Any:
    return lambda x: block.attention(x, ForwardContext(layout, EagerBackend()))[0]


@pytest.mark.parametrize("norm_pos", WIRING)
def test_blocks_place_norms_where_norm_pos_says(norm_pos: Any) -> None:
    block, x, layout = build_block(norm_pos=norm_pos)
    wire = WIRING[norm_pos]
    first, second = block.attention_residual, block.mlp_residual
    middle = wire(x, attend(block, layout), first.pre_norm, first.post_norm)
    expected = wire(middle, block.mlp, second.pre_norm, second.post_norm)
    torch.testing.assert_close(block(x, ForwardContext(layout, EagerBackend()))[0], expected)
    norms = [module for module in block.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 2 * NORMS_PER_SUBLAYER[norm_pos]


@pytest.mark.parametrize("norm_pos", WIRING)
def test_a_parallel_block_adds_both_sublayers_of_the_same_normalized_input(norm_pos: Any) -> None:
    block, x, layout = build_block(norm_pos=norm_pos, parallel_block=True)
    residual = block.attention_residual
    attention = attend(block, layout)
    both = WIRING[norm_pos](x, lambda y: attention(y) + block.mlp(y), residual.pre_norm, residual.post_norm)
    torch.testing.assert_close(block(x, ForwardContext(layout, EagerBackend()))[0], both)
    norms = [module for module in block.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == NORMS_PER_SUBLAYER[norm_pos]


@pytest.mark.parametrize("norm_pos", ["pre", "sandwich", "pre_and_post"])
def test_norm_scaling_divides_norms_before_sublayers_by_the_root_of_the_depth(norm_pos: Any) -> None:
    config = tiny_config(norm_pos=norm_pos, norm_scaling=True)
    for index in range(3):
        block, x, layout = randomize(get_block(config, index)), torch.randn(6, 32), one_sequence(6)
        first, second, wire = block.attention_residual, block.mlp_residual, WIRING[norm_pos]

        def scaled(norm: Any, depth: int = index + 1) -> Any:
            return lambda hidden: norm(hidden) / math.sqrt(depth)

        middle = wire(x, attend(block, layout), scaled(first.pre_norm), first.post_norm)
        expected = wire(middle, block.mlp, scaled(second.pre_norm), second.post_norm)
        torch.testing.assert_close(block(x, ForwardContext(layout, EagerBackend()))[0], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_pos": "post"}, "norm_scaling is True; it requires a norm before a sublayer, but norm_pos is 'post'"),
        ({"ngpt": True}, "norm_scaling is True; it requires a norm before a sublayer, but norm_pos is 'none'"),
        ({"norm_pos": "pre", "num_hidden_groups": 1}, "it requires layers that do not share their weights"),
    ],
)
def test_norm_scaling_that_would_do_nothing_or_has_no_depth_raises(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(norm_scaling=True, **options)


def test_deepnorm_scales_the_residual_stream() -> None:
    """LayerNorm(alpha x + G(x)) with alpha = (2L)^(1/4)."""
    block, x, layout = build_block(norm_fn="deep", num_hidden_layers=5)
    alpha = (2 * 5) ** 0.25
    middle = block.attention_residual.post_norm(alpha * x + attend(block, layout)(x))
    expected = block.mlp_residual.post_norm(alpha * middle + block.mlp(middle))
    torch.testing.assert_close(block(x, ForwardContext(layout, EagerBackend()))[0], expected)


@pytest.mark.parametrize(("norm_pos", "has_final"), [("pre", True), ("sandwich", True), ("post", False)])
def test_the_encoder_has_a_final_norm_if_its_blocks_do_not_end_with_one(norm_pos: Any, has_final: Any) -> None:
    model = BertBlocksModel(tiny_config(norm_pos=norm_pos, num_hidden_layers=1)).eval()
    randomize(model.encoder)
    ids = torch.tensor([[5, 6, 7]])
    out = model(ids)
    layer_out = model.encoder.layers[0](
        model.embedding(ids[0], None, None, torch.arange(3)), ForwardContext(one_sequence(3), EagerBackend())
    )[0]
    expected = model.encoder.final_norm(layer_out) if has_final else layer_out
    assert (model.encoder.final_norm is not None) == has_final
    torch.testing.assert_close(out.last_hidden_state[0], expected, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- attention

HEADS, KV_HEADS, SIZE = 4, 2, 6


@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("position", ["none", "rope", "alibi"])
@torch.no_grad()
def test_attention_equals_its_steps_written_out(position: Any, qk_norm: Any) -> None:
    """Rows of `qkv` are Q|K|V; queries and keys are normalized per head, then rotated; scores are scaled by d^-1/2."""
    block, x, layout = build_block(
        num_kv_heads=KV_HEADS, head_dim=SIZE, block_pos_enc_kind=position, qk_norm=qk_norm, norm_eps=0.2
    )
    attention = block.attention
    weight, bias = attention.qkv.weight, attention.qkv.bias
    query_rows, kv_rows = HEADS * SIZE, KV_HEADS * SIZE
    q = F.linear(x, weight[:query_rows], bias[:query_rows]).view(6, HEADS, SIZE)
    k = F.linear(x, weight[query_rows : query_rows + kv_rows], bias[query_rows : query_rows + kv_rows])
    v = F.linear(x, weight[query_rows + kv_rows :], bias[query_rows + kv_rows :]).view(6, KV_HEADS, SIZE)
    k = k.view(6, KV_HEADS, SIZE)
    if qk_norm:
        q, k = rms_formula(q, attention.query_norm, 0.2), rms_formula(k, attention.key_norm, 0.2)
    if position == "rope":
        q, k = (rotate_halves(y, theta=10_000.0) for y in (q, k))
    slopes = [0.25, 0.0625, 0.015625, 0.00390625] if position == "alibi" else None
    expected = attention.out(naive_attention(q, k, v, SIZE**-0.5, slopes=slopes).flatten(1))
    torch.testing.assert_close(attend(block, layout)(x), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_queries_and_keys_are_normalized_over_all_heads_together_if_asked() -> None:
    options = {"qk_norm": True, "qk_norm_fn": "layer", "qk_norm_across_heads": True, "norm_eps": 0.2}
    block, x, layout = build_block(num_kv_heads=KV_HEADS, head_dim=SIZE, **options)
    attention = block.attention
    q, k, v = attention.qkv(x).split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=-1)
    q = F.layer_norm(q, (HEADS * SIZE,), attention.query_norm.weight, eps=0.2)
    k = F.layer_norm(k, (KV_HEADS * SIZE,), attention.key_norm.weight, eps=0.2)
    q, k, v = q.view(6, HEADS, SIZE), k.view(6, KV_HEADS, SIZE), v.view(6, KV_HEADS, SIZE)
    expected = attention.out(naive_attention(q, k, v, SIZE**-0.5).flatten(1))
    torch.testing.assert_close(attend(block, layout)(x), expected, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- question answering


@torch.no_grad()
def test_the_question_aware_head_equals_its_formula() -> None:
    """The second text has no question token (7), so its first token stands for the question."""
    head = randomize(QuestionAwareHead(8, question_token_id=7))
    x, ids = torch.randn(9, 8), torch.tensor([5, 6, 7, 8, 7, 1, 2, 3, 4])

    def layer(part: Any, y: Tensor) -> Tensor:
        y = F.gelu(F.linear(y, part.dense.weight, part.dense.bias))
        return F.layer_norm(y, (8,), part.norm.weight, part.norm.bias, 1e-5)

    expected = []
    for tokens, question in ((x[:5], x[2]), (x[5:], x[5])):
        start = layer(head.start, tokens) @ head.start_form.weight @ layer(head.question_start, question)
        end = layer(head.end, tokens) @ head.end_form.weight @ layer(head.question_end, question)
        expected.append(torch.stack((start, end), dim=-1))
    layout = SequenceLayout.from_cu_seqlens(torch.tensor([0, 5, 9]), (9,))
    torch.testing.assert_close(head(x, layout, ids), torch.cat(expected), atol=1e-5, rtol=1e-5)
    assert head.find_questions(layout, None).tolist() == [0, 5]


# ---------------------------------------------------------------------- feed-forward


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
def test_mlp_equals_its_formula(activation: Any) -> None:
    mlp = randomize(get_mlp(tiny_config(mlp_type="mlp", hidden_act=activation)))
    x = torch.randn(5, 32)
    up = getattr(F, activation)(x @ mlp.up.weight.T + mlp.up.bias)
    torch.testing.assert_close(mlp(x), up @ mlp.down.weight.T + mlp.down.bias)


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
def test_glu_activates_the_first_half_of_its_up_projection(activation: Any) -> None:
    mlp = randomize(get_mlp(tiny_config(mlp_type="glu", hidden_act=activation)))
    x = torch.randn(5, 32)
    first = x @ mlp.up.weight[:24].T + mlp.up.bias[:24]
    second = x @ mlp.up.weight[24:].T + mlp.up.bias[24:]
    expected = (getattr(F, activation)(first) * second) @ mlp.down.weight.T + mlp.down.bias
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_a_grouped_mlp_equals_an_mlp_with_block_diagonal_matrices(groups: Any) -> None:
    config = tiny_config(mlp_type="grouped", mlp_groups=groups)
    mlp, plain = randomize(get_mlp(config)), get_mlp(tiny_config(mlp_type="mlp"))
    with torch.no_grad():
        for name in ("up", "down"):
            grouped, full = getattr(mlp, name), getattr(plain, name)
            full.weight.copy_(torch.block_diag(*grouped.weight.chunk(groups)))
            full.bias.copy_(grouped.bias)
    x = torch.randn(5, 32)
    torch.testing.assert_close(mlp(x), plain(x))
    model, wide = BertBlocksForMaskedLM(config), BertBlocksForMaskedLM(tiny_config())
    assert groups * count_flops(model, 10)[FEED_FORWARD] == count_flops(wide, 10)[FEED_FORWARD]
    model.quantize("int8")
    assert isinstance(model.model.encoder.layers[0].mlp.up, GroupedLinear)


def test_groups_must_divide_the_sizes() -> None:
    with pytest.raises(ConfigError, match="mlp_groups is 3; it must divide hidden_size = 32"):
        tiny_config(mlp_type="grouped", mlp_groups=3)


@pytest.mark.parametrize("mlp_type", ["mlp", "glu", "grouped"])
def test_feed_forward_biases_follow_the_config(mlp_type: Any) -> None:
    for in_bias, out_bias in ((True, False), (False, True)):
        mlp = get_mlp(tiny_config(mlp_type=mlp_type, mlp_in_bias=in_bias, mlp_out_bias=out_bias))
        assert (mlp.up.bias is not None, mlp.down.bias is not None) == (in_bias, out_bias)


def test_an_unknown_activation_raises_and_suggests_the_nearest() -> None:
    with pytest.raises(KeyError, match="gelu"):
        get_activation("gelo")


# ---------------------------------------------------------------------- dropout


class Times(nn.Module):
    """Replaces a dropout module, to show where it acts."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_every_dropout_key_sets_its_own_rate() -> None:
    rates = {
        "embedding_dropout": 0.11,
        "attention_dropout": 0.12,
        "attention_output_dropout": 0.13,
        "mlp_dropout": 0.14,
        "mlp_output_dropout": 0.15,
        "classifier_dropout": 0.16,
        "classifier_head_dropout": 0.17,
    }
    config = tiny_config(**rates, classifier_head="dense", classifier_head_on_tokens=True)
    for model_class in (
        BertBlocksForSequenceClassification,
        BertBlocksForTokenClassification,
        BertBlocksForQuestionAnswering,
    ):
        model = model_class(config)
        assert model.model.embedding.dropout.p == 0.11
        for layer in model.model.encoder.layers:
            assert layer.attention.dropout == 0.12
            assert layer.attention.out_dropout.p == 0.13
            assert layer.mlp.dropout.p == 0.14
            assert layer.mlp.out_dropout.p == 0.15
        assert model.dropout.p == 0.16
        assert model.classifier_head.dropout.p == 0.17


def test_feed_forward_dropouts_come_before_and_after_the_down_projection() -> None:
    mlp = randomize(get_mlp(tiny_config()))
    mlp.dropout, mlp.out_dropout = Times(3.0), Times(5.0)
    x = torch.randn(4, 32)
    up = F.gelu(x @ mlp.up.weight.T + mlp.up.bias)
    torch.testing.assert_close(mlp(x), 5.0 * (3.0 * up @ mlp.down.weight.T + mlp.down.bias))


def test_embedding_dropout_comes_after_the_norm() -> None:
    embedding = randomize(BertBlocksModel(tiny_config()).embedding)
    embedding.dropout = Times(7.0)
    ids, positions = torch.tensor([5, 6]), torch.tensor([0, 1])
    summed = embedding.token.weight[ids] + embedding.token_type.weight[0] + embedding.position.table.weight[positions]
    expected = 7.0 * layer_formula(summed, embedding.norm, 1e-12)
    torch.testing.assert_close(embedding(ids, None, None, positions), expected)


def test_attention_dropout_applies_to_weights_and_to_the_projected_output() -> None:
    block, x, layout = build_block(attention_dropout=0.4)
    block.attention.out_dropout = Times(2.0)
    rates = []

    class Recording(EagerBackend):
        def attend(self, q: Any, k: Any, v: Any, context: Any) -> Any:
            rates.append(context.dropout)
            return torch.ones_like(q)

    for training in (True, False):
        out, _ = block.attention.train(training)(x, ForwardContext(layout, Recording()))
        expected = 2.0 * (block.attention.out.weight.sum(1) + block.attention.out.bias)
        torch.testing.assert_close(out, expected.expand(6, 32))
    assert rates == [0.4, 0.0]


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_classifier_dropouts_come_before_the_dense_and_the_last_layer(pooling: Any) -> None:
    config = tiny_config(classifier_head="dense", classifier_pooling=pooling, classifier_head_norm=True, num_labels=3)
    model = randomize(BertBlocksForSequenceClassification(config))
    model.classifier_head.dropout, model.dropout = Times(3.0), Times(5.0)
    ids = torch.tensor([[5, 6, 7]])
    hidden = model.model(ids).last_hidden_state[0]
    pooled = hidden[0] if pooling == "cls" else hidden.mean(0)
    dense = torch.tanh(3.0 * pooled @ model.classifier_head.dense.weight.T + model.classifier_head.dense.bias)
    normed = layer_formula(dense, model.classifier_head.norm, 1e-12)
    expected = 5.0 * normed @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(model(ids).logits[0], expected, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- embedding positions


@pytest.mark.parametrize("size", [8, 7])
def test_sinusoidal_positions_equal_their_formula(size: Any) -> None:
    positions = [0, 1, 5, 5000]
    table = SinusoidalPosition(size)(torch.tensor(positions))
    for row, position in enumerate(positions):
        for unit in range(size):
            angle = position / 10_000 ** ((unit - unit % 2) / size)
            expected = math.cos(angle) if unit % 2 else math.sin(angle)
            # fp32 angles of thousands are exact to about 1e-4
            assert table[row, unit].item() == pytest.approx(expected, abs=5e-4 if position == 5000 else 1e-6)


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_learned_positions_start_at_the_offset_and_count_real_tokens(offset: Any, unpad: Any) -> None:
    """For padding on either side. transformers' RoBERTa counts from pad_token_id + 1."""
    pad = max(offset - 1, 0)
    config = tiny_config(position_offset=offset, pad_token_id=pad, embedding_norm=False, type_vocab_size=0, unpad=unpad)
    model = randomize(BertBlocksModel(config))
    ids = torch.tensor([[5, 6, 7, pad], [pad, pad, 8, 9], [pad, 5, 9, pad]])
    mask = ids != pad
    start = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[0]
    table = model.embedding.position.table.weight
    if offset:
        positions = RobertaEmbeddings.create_position_ids_from_input_ids(ids, padding_idx=offset - 1)
    else:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model.embedding.token.weight[ids] + table[positions]
    torch.testing.assert_close(start[mask], expected[mask])


@pytest.mark.parametrize("offset", [1, 2])
def test_the_padding_row_of_learned_positions_is_zero_and_gets_no_gradient(offset: Any) -> None:
    model = BertBlocksModel(tiny_config(position_offset=offset, pad_token_id=offset - 1))
    table = model.embedding.position.table
    assert torch.equal(table.weight[offset - 1], torch.zeros(32))
    assert table.weight[offset:].abs().min(dim=1).values.gt(0).any()
    table(torch.tensor([offset - 1, offset])).sum().backward()
    assert torch.equal(table.weight.grad[offset - 1], torch.zeros(32))


def test_a_text_longer_than_the_position_table_raises_and_names_the_limit() -> None:
    model = BertBlocksModel(tiny_config(position_offset=2, pad_token_id=1))
    model(torch.full((1, 62), 5))
    with pytest.raises(ValueError, match=r"63 tokens.*max_position_embeddings = 64.*62"):
        model(torch.full((1, 63), 5))


# ---------------------------------------------------------------------- RoPE


def rotate_halves(x: Tensor, theta: float) -> Tensor:
    """Rotates the pairs (k, k + d/2) of `[tokens, heads, d]` as complex numbers."""
    out, half = x.clone(), x.shape[-1] // 2
    for position in range(x.shape[0]):
        for pair in range(half):
            turn = cmath.exp(1j * position / theta ** (2 * pair / x.shape[-1]))
            for head in range(x.shape[1]):
                rotated = complex(x[position, head, pair], x[position, head, pair + half]) * turn
                out[position, head, pair], out[position, head, pair + half] = rotated.real, rotated.imag
    return out


def rotate_interleaved(x: Tensor, theta: float) -> Tensor:
    """Rotates the pairs (2k, 2k + 1) in the same way."""
    order = torch.cat((torch.arange(0, x.shape[-1], 2), torch.arange(1, x.shape[-1], 2)))
    out = torch.empty_like(x)
    out[..., order] = rotate_halves(x[..., order], theta)
    return out


def llama_rotate(q: Tensor, k: Tensor, positions: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Rotates the flat queries and keys of one sequence with transformers' Llama."""
    head_dim = q.shape[-1]
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, **options.pop("rope_parameters", {})}
    config = LlamaConfig(
        hidden_size=head_dim * q.shape[1],
        num_attention_heads=q.shape[1],
        head_dim=head_dim,
        rope_parameters=parameters,
        **options,
    )
    cos, sin = LlamaRotaryEmbedding(config)(q[None], positions[None])
    q, k = (x.transpose(0, 1)[None] for x in (q, k))
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q[0].transpose(0, 1), k[0].transpose(0, 1)


def random_qk(tokens: int, head_dim: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, 4, head_dim), torch.randn(tokens, 2, head_dim)


@pytest.mark.parametrize("theta", [10_000.0, 160_000.0])
def test_rope_equals_transformers(theta: Any) -> None:
    q, k = random_qk(700)  # beyond max_positions: tables are as long as they need to be
    rotated = RotaryPosition(16, theta, max_positions=32).rotate(q, k, one_sequence(700))
    expected = llama_rotate(q, k, torch.arange(700), rope_parameters={"rope_theta": theta})
    for ours, theirs in zip(rotated, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.25])
def test_partial_interleaved_rope_rotates_pairs_and_leaves_the_rest(factor: Any, interleaved: Any) -> None:
    q, k = random_qk(9)
    rope = RotaryPosition(16, 50.0, partial_factor=factor, interleaved=interleaved)
    turn, size = rotate_interleaved if interleaved else rotate_halves, int(16 * factor)
    for ours, x in zip(rope.rotate(q, k, one_sequence(9)), (q, k), strict=True):
        torch.testing.assert_close(ours[..., :size], turn(x[..., :size], 50.0), atol=1e-6, rtol=1e-5)
        assert torch.equal(ours[..., size:], x[..., size:])


def test_rope_restarts_with_every_sequence() -> None:
    layout = SequenceLayout.from_cu_seqlens(torch.tensor([0, 4, 4, 9]), (9,))
    q, k = random_qk(9)
    rotated, _ = RotaryPosition(16, 50.0).rotate(q, k, layout)
    torch.testing.assert_close(
        rotated, torch.cat((rotate_halves(q[:4], 50.0), rotate_halves(q[4:], 50.0))), atol=1e-6, rtol=1e-5
    )


def test_rope_angles_are_fp32_for_half_precision_input() -> None:
    q, k = random_qk(3000)
    rotated, _ = RotaryPosition(16, 10_000.0).rotate(q.bfloat16(), k.bfloat16(), one_sequence(3000))
    precise, _ = llama_rotate(q.bfloat16().float(), k, torch.arange(3000))
    assert rotated.dtype == torch.bfloat16
    torch.testing.assert_close(rotated.float(), precise, atol=1e-5, rtol=2**-8)  # one rounding, at the end


def test_layers_with_different_rope_settings_do_not_share_tables() -> None:
    layout, (q, k) = one_sequence(5), random_qk(5)
    settings = [
        {"theta": 50.0},
        {"theta": 90.0},
        {"theta": 50.0, "partial_factor": 0.5},
        {"theta": 50.0, "scaling": {"rope_type": "linear", "factor": 2.0}},
        {"theta": 50.0, "interleaved": True},
    ]
    together = [RotaryPosition(16, **options).rotate(q, k, layout)[0] for options in settings]
    alone = [RotaryPosition(16, **options).rotate(q, k, one_sequence(5))[0] for options in settings]
    for ours, theirs in zip(together, alone, strict=True):
        assert torch.equal(ours, theirs)
    assert len({tuple(rotated.flatten().tolist()) for rotated in together}) == len(settings)


MAX_POSITIONS = 32
LONG = {"rope_type": "longrope", "short_factor": [1.0 + 0.1 * pair for pair in range(8)]}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn of a shorter original": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "yarn with betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 2.0},
    "yarn with an attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    "yarn with mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.4},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {**LONG, "long_factor": [2.0 + pair for pair in range(8)], "factor": 4.0},
    "longrope of a shorter original": {
        **LONG,
        "long_factor": [2.0 + pair for pair in range(8)],
        "original_max_position_embeddings": 8,
    },
}


@pytest.mark.parametrize("length", [5, 8, 9, MAX_POSITIONS, MAX_POSITIONS + 1, 3 * MAX_POSITIONS])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_rope_equals_transformers(name: Any, length: Any) -> None:
    """Frequencies and the factor on the tables, for a text within the trained length or beyond it."""
    q, k = random_qk(length)
    rope = RotaryPosition(16, 100.0, scaling=SCALINGS[name], max_positions=MAX_POSITIONS)
    expected = llama_rotate(
        q,
        k,
        torch.arange(length),
        rope_parameters={**SCALINGS[name], "rope_theta": 100.0},
        max_position_embeddings=MAX_POSITIONS,
    )
    for ours, theirs in zip(rope.rotate(q, k, one_sequence(length)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=1e-5)


def test_scaled_rope_frequencies_equal_their_formulas() -> None:
    """Linear: divided by the factor. Dynamic: a larger theta for a longer text. YaRN: tables grow by 0.1 ln s + 1."""
    exponents = torch.arange(0, 16, 2) / 16
    plain = 100.0**-exponents
    linear, _ = RotaryPosition(16, 100.0, scaling=SCALINGS["linear"], max_positions=32).frequencies()
    torch.testing.assert_close(linear, plain / 3.0)
    dynamic = RotaryPosition(16, 100.0, scaling=SCALINGS["dynamic"], max_positions=32)
    torch.testing.assert_close(dynamic.frequencies(32)[0], plain)
    theta = 100.0 * (3.0 * 80 / 32 - 2.0) ** (16 / 14)
    torch.testing.assert_close(dynamic.frequencies(80)[0], theta**-exponents)
    _, factor = RotaryPosition(16, 100.0, scaling=SCALINGS["yarn"], max_positions=32).frequencies()
    assert factor == pytest.approx(0.1 * math.log(4.0) + 1.0)


@pytest.mark.parametrize("partial_factor", [1.0, 0.5])
@pytest.mark.parametrize("name", ["dynamic", "longrope"])
@pytest.mark.parametrize("kind", ["ragged", "padded", "packed"])
def test_dynamic_rope_of_a_short_text_does_not_depend_on_a_long_one_in_the_batch(
    kind: Any, name: Any, partial_factor: Any
) -> None:
    lengths = [5, 80, 0, 33]
    mask = torch.arange(80) < torch.tensor(lengths)[:, None]
    layout = {
        "ragged": lambda: SequenceLayout.from_mask(mask),
        "padded": lambda: SequenceLayout.from_mask(mask, unpad=False),
        "packed": lambda: SequenceLayout.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0), (sum(lengths),)),
    }[kind]()
    scaling = dict(SCALINGS[name])
    if name == "longrope":
        pairs = int(8 * partial_factor)
        scaling |= {key: scaling[key][:pairs] for key in ("short_factor", "long_factor")}
    rope = RotaryPosition(16, 100.0, partial_factor=partial_factor, scaling=scaling, max_positions=MAX_POSITIONS)
    q, k = random_qk(layout.positions.shape[0])
    together, _ = rope.rotate(q, k, layout)
    for row, length in enumerate(lengths):
        start = row * 80 if kind == "padded" else sum(lengths[:row])
        tokens = slice(start, start + length)
        if length:
            alone, _ = rope.rotate(q[tokens], k[tokens], one_sequence(length))
            torch.testing.assert_close(together[tokens], alone)
    frequencies = scaling["short_factor"] if name == "longrope" else [1.0] * int(8 * partial_factor)
    size = int(16 * partial_factor)
    inverse = 100.0 ** -(torch.arange(0, size, 2) / size) / torch.tensor(frequencies)
    angles = torch.arange(5)[:, None] * inverse
    factor = math.sqrt(1 + math.log(4.0) / math.log(MAX_POSITIONS)) if name == "longrope" else 1.0
    a, b = q[:5, :, : size // 2], q[:5, :, size // 2 : size]
    expected = factor * (a * angles.cos()[:, None] - b * angles.sin()[:, None])
    torch.testing.assert_close(together[:5, :, : size // 2], expected, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- ALiBi


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (4, [2, 4, 6, 8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),  # eight, then every second of sixteen
        (3, [4, 8, 2]),
        (16, [0.5 * (k + 1) for k in range(16)]),
    ],
)
def test_alibi_slopes_are_powers_of_two(heads: Any, exponents: Any) -> None:
    assert alibi_slopes(heads) == pytest.approx([2**-exponent for exponent in exponents])


def test_alibi_bias_falls_linearly_with_distance_in_both_directions() -> None:
    index = torch.arange(5)
    bias = ALiBi(4).bias(index - index[:, None])
    for head, slope in enumerate([2**-2, 2**-4, 2**-6, 2**-8]):
        for i in range(5):
            for j in range(5):
                assert bias[head, i, j].item() == pytest.approx(-slope * abs(i - j))


def test_block_position_none_changes_nothing() -> None:
    q, k = random_qk(4)
    rotated = BlockPosition().rotate(q, k, one_sequence(4))
    assert rotated[0] is q
    assert rotated[1] is k
    assert not BlockPosition().has_bias


# ---------------------------------------------------------------------- initialization

#: The standard deviation of a standard normal distribution that is cut at 2.
CUT_AT_2 = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))
LAYERS, HIDDEN, INNER = 3, 128, 256


def build_for_init(model_class: Any = BertBlocksForMaskedLM, **options: Any) -> nn.Module:
    """Matrices have at least 16,000 weights, so that their standard deviation is known to a few per mille."""
    sizes = {"vocab_size": 300, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": INNER}
    return model_class(BertBlocksConfig(**{**sizes, "num_attention_heads": 4, "pad_token_id": 7, **options}))


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """The weights of all layers, by role."""
    layers = model.model.encoder.layers
    parts = {
        "q": lambda layer: layer.attention.qkv.weight[:HIDDEN],
        "k": lambda layer: layer.attention.qkv.weight[HIDDEN : 2 * HIDDEN],
        "v": lambda layer: layer.attention.qkv.weight[2 * HIDDEN :],
        "out": lambda layer: layer.attention.out.weight,
        "up": lambda layer: layer.mlp.up.weight,
        "down": lambda layer: layer.mlp.down.weight,
    }
    stacked = {name: torch.stack([read(layer) for layer in layers]) for name, read in parts.items()}
    rows = torch.arange(300) != 7
    return {**stacked, "embedding": model.model.embedding.token.weight[rows]}


def assert_standard_deviations(model: nn.Module, expected: dict[str, float]) -> None:
    """Checks for means of 0 and standard deviations within 3 %, five times the expected error."""
    weights = matrices(model)
    assert expected.keys() <= weights.keys()
    for name, deviation in expected.items():
        assert weights[name].std().item() == pytest.approx(deviation, rel=0.03), name
        assert abs(weights[name].mean().item()) < 0.03 * deviation, name


def everywhere(value: float, **others: float) -> dict[str, float]:
    return {**dict.fromkeys(("q", "k", "v", "out", "up", "down", "embedding"), value), **others}


DEEP = (8 * LAYERS) ** -0.25


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, everywhere(0.02 * CUT_AT_2)),
        ({"initializer_range": 0.1}, everywhere(0.1 * CUT_AT_2)),
        ({"initializer_cutoff_factor": 50.0}, everywhere(0.02)),
        ({"init_kind": "normal"}, everywhere(0.02)),
        (
            {"init_kind": "megatron"},
            everywhere(
                0.02 * CUT_AT_2,
                out=0.02 * CUT_AT_2 / math.sqrt(2 * LAYERS),
                down=0.02 * CUT_AT_2 / math.sqrt(2 * LAYERS),
            ),
        ),
        (
            {"init_kind": "xavier"},
            {
                "out": math.sqrt(2 / (HIDDEN + HIDDEN)),
                "up": math.sqrt(2 / (HIDDEN + INNER)),
                "down": math.sqrt(2 / (HIDDEN + INNER)),
                "embedding": 0.02 * CUT_AT_2,
            },
        ),
        (
            {"init_kind": "kaiming"},
            everywhere(math.sqrt(2 / HIDDEN), down=math.sqrt(2 / INNER), embedding=0.02 * CUT_AT_2),
        ),
        (
            {"norm_fn": "deep"},
            everywhere(0.02 * CUT_AT_2 * DEEP, q=0.02 * CUT_AT_2, k=0.02 * CUT_AT_2, embedding=0.02 * CUT_AT_2),
        ),
        (
            {"norm_fn": "deep", "init_kind": "deepnet"},
            {
                "out": DEEP * math.sqrt(2 / (HIDDEN + HIDDEN)),
                "up": DEEP * math.sqrt(2 / (HIDDEN + INNER)),
                "down": DEEP * math.sqrt(2 / (HIDDEN + INNER)),
            },
        ),
        (
            {"init_kind": "fan_in"},
            everywhere(CUT_AT_2 * HIDDEN**-0.5, down=CUT_AT_2 * INNER**-0.5, embedding=0.02 * CUT_AT_2),
        ),
        ({"init_kind": "uniform"}, everywhere(0.02, embedding=0.02 * CUT_AT_2)),
        ({"embedding_initializer_range": 1e-4}, everywhere(0.02 * CUT_AT_2, embedding=1e-4 * CUT_AT_2)),
        ({"ngpt": True}, everywhere(960**-0.5, out=(960 * 2 * LAYERS) ** -0.5, down=(960 * 2 * LAYERS) ** -0.5)),
    ],
    ids=[
        "default",
        "wider",
        "hardly cut",
        "normal",
        "megatron",
        "xavier",
        "kaiming",
        "deep",
        "deepnet",
        "fan_in",
        "uniform",
        "small",
        "ngpt",
    ],
)
def test_initial_weights_have_the_standard_deviation_of_their_kind(options: Any, expected: Any) -> None:
    assert_standard_deviations(build_for_init(**options), expected)


@pytest.mark.parametrize("init_kind", ["xavier", "deepnet"])
def test_xavier_treats_queries_keys_and_values_as_separate_matrices(init_kind: Any) -> None:
    """They are stored in one matrix, but DeepNet initializes each projection by itself."""
    plain = math.sqrt(2 / (HIDDEN + HIDDEN))
    expected = {"q": plain, "k": plain, "v": plain * (DEEP if init_kind == "deepnet" else 1.0)}
    assert_standard_deviations(build_for_init(init_kind=init_kind), expected)


@pytest.mark.parametrize("model_class", [BertBlocksForMaskedLM, BertBlocksForSequenceClassification])
@pytest.mark.parametrize("options", [{"norm_fn": "deep"}, {"norm_fn": "deep", "init_kind": "deepnet"}], ids=str)
def test_deepnet_initialization_scales_each_weight_once(model_class: Any, options: Any) -> None:
    """The ratio between the standard deviations of value rows and query rows, in every task model."""
    weights = matrices(build_for_init(model_class, **options))
    assert (weights["v"].std() / weights["q"].std()).item() == pytest.approx(DEEP, rel=0.03)
    assert (weights["k"].std() / weights["q"].std()).item() == pytest.approx(1.0, rel=0.03)


def test_deepnet_initialization_does_not_scale_loaded_weights(tmp_path: Path) -> None:
    model = BertBlocksForMaskedLM(tiny_config(norm_fn="deep"))
    model.save_pretrained(tmp_path)
    loaded = BertBlocksForMaskedLM.from_pretrained(tmp_path).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded[name], weight), name


def test_initialization_skips_weights_that_transformers_marks_as_loaded() -> None:
    model = BertBlocksModel(tiny_config(norm_fn="deep"))
    for module in (model.encoder.layers[0].attention.qkv, model.embedding.token):
        with torch.no_grad():
            module.weight.fill_(3.0)
        module.weight._is_hf_initialized = True
        model._init_weights(module)
        assert (module.weight == 3.0).all()


@pytest.mark.parametrize("init_kind", ["trunc_normal", "megatron"])
def test_truncated_normal_is_cut_at_two_standard_deviations(init_kind: Any) -> None:
    weights = matrices(build_for_init(init_kind=init_kind))
    for name, weight in weights.items():
        shrink = math.sqrt(2 * LAYERS) if init_kind == "megatron" and name in ("out", "down") else 1.0
        assert 0.039 / shrink < weight.abs().max().item() <= 0.04 / shrink, name


def test_normal_initialization_is_not_truncated() -> None:
    assert matrices(build_for_init(init_kind="normal"))["up"].abs().max().item() > 0.06


@pytest.mark.parametrize(
    ("model_class", "name"),
    [
        (BertBlocksForSequenceClassification, "classifier"),
        (BertBlocksForTokenClassification, "tagger"),
        (BertBlocksForQuestionAnswering, "spans"),
    ],
)
def test_megatron_initialization_scales_classifiers_by_width(model_class: Any, name: Any) -> None:
    labels = {} if name == "spans" else {"num_labels": 50}
    model = build_for_init(model_class, init_kind="megatron", num_hidden_layers=1, **labels)
    weight = getattr(model, name).weight
    # the two rows of spans have 256 numbers, so their standard deviation is known only to 5 %
    assert weight.std().item() == pytest.approx(CUT_AT_2 * HIDDEN**-0.5, rel=0.2 if name == "spans" else 0.05)
    assert weight.abs().max().item() <= 2 * HIDDEN**-0.5


@pytest.mark.parametrize("init_kind", ["trunc_normal", "normal", "megatron", "xavier", "kaiming", "deepnet"])
def test_biases_and_padding_rows_start_at_zero_and_norms_at_one(init_kind: Any) -> None:
    model = build_for_init(init_kind=init_kind, num_hidden_layers=2, position_offset=8)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
    embedding = model.model.embedding
    assert not embedding.token.weight[7].any()
    assert not embedding.position.table.weight[7].any()
    assert embedding.token.weight[8].any()
    assert embedding.token_type.weight[0].any()


def test_without_a_padding_token_no_embedding_row_is_zero() -> None:
    model = build_for_init(num_hidden_layers=1, pad_token_id=None)
    assert model.model.embedding.token.weight.abs().sum(dim=1).min().item() > 0


# ---------------------------------------------------------------------- nGPT

BASE = 960**-0.5


def test_ngpt_scales_start_with_neoberts_values() -> None:
    model = build_for_init(ngpt=True, ngpt_logit_scale=True)
    for layer in model.model.encoder.layers:
        assert layer.attention.sqk.tolist() == pytest.approx([BASE] * HIDDEN)
        assert layer.attention_alpha.tolist() == pytest.approx([BASE] * HIDDEN)
        assert layer.mlp_alpha.tolist() == pytest.approx([BASE] * HIDDEN)
        assert layer.mlp.suv.tolist() == [1.0] * 2 * INNER
    assert model.logit_scale.tolist() == [1.0] * 300


def jn(x: Tensor) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)


@torch.no_grad()
def test_ngpt_blocks_keep_hidden_states_on_the_unit_sphere() -> None:
    """The formulas of NeoBERT's nGPT, except that the gate is the first half, as in every GLU here."""
    block, x, layout = build_block(ngpt=True, block_pos_enc_kind="rope")
    assert isinstance(block, NGPTBlock)
    out = block(x, ForwardContext(layout, EagerBackend()))[0]
    attention, mlp = block.attention, block.mlp
    q, k, v = (y.view(6, 4, 8) for y in attention.qkv(x).chunk(3, dim=-1))
    scale = (attention.sqk / BASE).view(4, 8)
    q, k = (scale * jn(rotate_halves(y, 10_000.0)) for y in (q, k))
    attended = attention.out(naive_attention(q, k, v, 8**0.5).flatten(1))
    x = jn(jn(x) + (block.attention_alpha * 0.05 / BASE).abs() * (jn(attended) - jn(x)))
    gate, value = (math.sqrt(32) * mlp.suv * mlp.up(x)).chunk(2, dim=-1)
    fed = mlp.down(F.silu(gate) * value)
    expected = jn(jn(x) + (block.mlp_alpha * 0.05 / BASE).abs() * (jn(fed) - jn(x)))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_renormalize_weights_gives_every_matrix_unit_norm_along_the_hidden_dimension() -> None:
    model = randomize(BertBlocksForMaskedLM(tiny_config(ngpt=True, head_dim=6, intermediate_size=20)))
    with torch.no_grad():
        model.model.embedding.token.weight[0] = 0.0
    directions = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.renormalize_weights()
    for layer in model.model.encoder.layers:
        for reads in (layer.attention.qkv, layer.mlp.up):  # rows take the 32 hidden units
            torch.testing.assert_close(reads.weight.norm(dim=1), torch.ones(reads.weight.shape[0]))
        for writes in (layer.attention.out, layer.mlp.down):  # columns give them
            torch.testing.assert_close(writes.weight.norm(dim=0), torch.ones(writes.weight.shape[1]))
    torch.testing.assert_close(model.decoder.weight.norm(dim=1), torch.ones(60))
    norms = model.model.embedding.token.weight.norm(dim=1)
    torch.testing.assert_close(norms, torch.cat((torch.zeros(1), torch.ones(59))))
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            assert torch.equal(parameter, directions[name]), name
        else:
            along = 0 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 1
            cosines = F.cosine_similarity(parameter, directions[name], dim=along)
            nonzero = directions[name].norm(dim=along) > 0
            torch.testing.assert_close(cosines[nonzero], torch.ones(int(nonzero.sum())))


@pytest.mark.parametrize("options", [{"ngpt": True, "ngpt_renormalize": False}, {"ngpt": False}], ids=str)
def test_renormalize_weights_does_nothing_unless_the_config_asks_for_it(options: Any) -> None:
    model = randomize(BertBlocksForMaskedLM(tiny_config(**options)))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.renormalize_weights()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("options", [{}, {"embedding_size": 8, "mlm_head_size": 12, "mlm_head_bias": False}])
def test_a_gated_head_multiplies_the_activation_of_its_first_half_with_the_second(options: Any) -> None:
    model = randomize(BertBlocksForMaskedLM(tiny_config(mlm_head_glu=True, mlm_head_act="silu", **options)))
    head, x = model.head, torch.randn(5, 32)
    inner = x if head.inner is None else F.silu(head.inner(x))
    w, v = head.dense.weight.chunk(2)
    b, c = (0, 0) if head.dense.bias is None else head.dense.bias.chunk(2)
    expected = F.layer_norm(F.silu(inner @ w.T + b) * (inner @ v.T + c), [len(w)], head.norm.weight, head.norm.bias)
    torch.testing.assert_close(model.logits(x), model.decoder(expected), atol=1e-4, rtol=1e-4)
    size = head.dense.in_features * len(w)
    plain, gated = (analyze(tiny_config(mlm_head_glu=on, **options), "masked-lm", [10]) for on in (False, True))
    assert gated.costs[0].flops["head"] - plain.costs[0].flops["head"] == 2 * 10 * size


def test_a_gated_head_without_its_dense_layer_raises() -> None:
    with pytest.raises(ConfigError, match="mlm_head_glu is True; it requires mlm_head_dense true"):
        tiny_config(mlm_head_glu=True, mlm_head_dense=False)


def test_the_logit_scale_multiplies_the_logits() -> None:
    model = randomize(BertBlocksForMaskedLM(tiny_config(ngpt=True, ngpt_logit_scale=True, mlm_head_dense=False)))
    ids = torch.tensor([[5, 6, 7]])
    hidden = model.model(ids).last_hidden_state
    expected = (hidden @ model.decoder.weight.T + model.decoder.bias) * model.logit_scale
    torch.testing.assert_close(model(ids).logits, expected)


# ---------------------------------------------------------------------- Liger


def on_cuda() -> SimpleNamespace:
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda"))


@pytest.mark.parametrize("kernel_backend", ["auto", "torch"])
def test_auto_uses_torch_kernels_without_cuda(kernel_backend: Any) -> None:
    assert kernels.liger(kernel_backend, torch.zeros(1)) is None


@pytest.mark.parametrize(
    ("kernel_backend", "is_installed", "is_used"),
    [
        ("auto", True, True),
        ("liger", True, True),
        ("torch", True, False),
        ("auto", False, False),
        ("torch", False, False),
    ],
)
def test_liger_is_used_on_cuda_if_installed_and_allowed(
    kernel_backend: Any, is_installed: Any, is_used: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "liger_installed", lambda: is_installed)
    assert (kernels.liger(kernel_backend, on_cuda()) is not None) == is_used


def test_liger_raises_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"kernel_backend is 'liger'.*on cpu.*'auto' or 'torch'"):
        kernels.liger("liger", torch.zeros(1))
    monkeypatch.setattr(kernels, "liger_installed", lambda: False)
    with pytest.raises(RuntimeError, match=r"kernel_backend is 'liger'.*not installed.*'auto' or 'torch'"):
        kernels.liger("liger", on_cuda())


def test_liger_on_cpu_raises_and_names_the_remedy() -> None:
    model = BertBlocksModel(tiny_config(norm_fn="rms", kernel_backend="liger"))
    with pytest.raises(RuntimeError, match=r"kernel_backend is 'liger'.*use 'auto' or 'torch'"):
        model(torch.tensor([[5, 6, 7]]))


@pytest.fixture
def fake_liger(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Liger's three operations, written in torch under its module names and signatures; records the calls."""
    calls = []

    class LigerRMSNormFunction:
        @staticmethod
        def apply(
            X: Any, W: Any, eps: Any, offset: Any = 0.0, casting_mode: Any = "llama", in_place: Any = True
        ) -> Any:
            calls.append(("rms_norm", in_place))
            assert (offset, casting_mode) == (0.0, "llama")
            return X * torch.rsqrt(X.pow(2).mean(-1, keepdim=True) + eps) * W

    class LigerSiLUMulFunction:
        @staticmethod
        def apply(a: Any, b: Any) -> Any:
            calls.append(("swiglu", a.is_contiguous() and b.is_contiguous()))
            return F.silu(a) * b

    class LigerFusedLinearCrossEntropyLoss:
        def __init__(self, lse_square_scale: float = 0.0, reduction: Any = "mean") -> None:
            assert reduction == "sum"
            self.lse_square_scale = lse_square_scale

        def __call__(self, lin_weight: Any, _input: Any, target: Any, bias: Any = None) -> Any:
            calls.append(("cross_entropy", _input.shape[0]))
            logits = F.linear(_input, lin_weight, bias)
            squares = logits.logsumexp(dim=-1).square()
            return F.cross_entropy(logits, target, reduction="sum") + self.lse_square_scale * squares.sum()

    for name, content in {
        "liger_kernel": {},
        "liger_kernel.ops": {},
        "liger_kernel.transformers": {},
        "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": LigerRMSNormFunction},
        "liger_kernel.ops.swiglu": {"LigerSiLUMulFunction": LigerSiLUMulFunction},
        "liger_kernel.transformers.fused_linear_cross_entropy": {
            "LigerFusedLinearCrossEntropyLoss": LigerFusedLinearCrossEntropyLoss
        },
    }.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

    def liger(kernel_backend: Any, x: Any) -> Any:
        return None if kernel_backend == "torch" else kernels.LigerKernels()

    for file in (norm_file, mlp_file, masked_lm_file):
        monkeypatch.setattr(file, "liger", liger)
    return calls


def training_step(kernel_backend: str, state: dict | None = None, **options: Any) -> Any:
    """The loss and gradients of a ragged batch of two texts with one label each."""
    config = tiny_config(norm_fn="rms", norm_pos="pre", mlp_type="glu", kernel_backend=kernel_backend, **options)
    model = BertBlocksForMaskedLM(config).train()
    if state is None:
        randomize(model).train()
    else:
        model.load_state_dict(state)
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    labels = torch.tensor([[-100, 11, -100], [12, -100, -100]])
    loss = model(ids, attention_mask=ids != 0, labels=labels, z_loss=1e-3).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, model.state_dict()


@pytest.mark.parametrize("options", [{}, {"mlm_head_dense": False, "decoder_bias": False}], ids=["head", "no head"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_liger_gives_the_results_of_torch_for_norms_swiglu_and_loss(
    activation: Any, options: Any, fake_liger: Any
) -> None:
    expected_loss, expected_gradients, state = training_step("torch", hidden_act=activation, **options)
    assert fake_liger == []
    loss, gradients, _ = training_step("auto", state, hidden_act=activation, **options)
    torch.testing.assert_close(loss, expected_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], atol=1e-6, rtol=1e-4, msg=name)
    head_norms = 0 if options else 1
    norms_in_model = 1 + 2 * 3 + 1 + head_norms  # of the embeddings, two a layer, the last one, and the head's
    # not in place: the input of a norm is the residual stream, which is read again
    assert fake_liger.count(("rms_norm", False)) == norms_in_model
    assert fake_liger.count(("swiglu", True)) == (3 if activation == "silu" else 0)
    assert fake_liger.count(("cross_entropy", 2)) == 1  # labelled rows only
    assert len(fake_liger) == norms_in_model + (3 if activation == "silu" else 0) + 1


def test_a_scaled_decoder_uses_torch_even_with_liger(fake_liger: Any) -> None:
    model = randomize(
        BertBlocksForMaskedLM(tiny_config(ngpt=True, ngpt_logit_scale=True, mlm_head_dense=False))
    ).train()
    ids, labels = torch.tensor([[5, 6, 7]]), torch.tensor([[-100, 11, -100]])
    hidden = model.model(ids).last_hidden_state[0, 1]
    logits = (model.decoder.weight @ hidden + model.decoder.bias) * model.logit_scale
    loss = model(ids, labels=labels).loss
    torch.testing.assert_close(loss, F.cross_entropy(logits[None], torch.tensor([11])))
    assert ("swiglu", True) in fake_liger
    assert not [call for call in fake_liger if call[0] == "cross_entropy"]


def test_denormals_are_flushed_only_inside_the_context() -> None:
    import sys

    from bertblocks.nn.ops.cpu import flushed_denormals

    tiny = torch.tensor(sys.float_info.min, dtype=torch.float64)
    assert (tiny / 2).item() > 0
    with flushed_denormals(), flushed_denormals():
        pass
    with flushed_denormals():
        assert (tiny / 2).item() == 0
    assert (tiny / 2).item() > 0


def test_learned_slopes_of_alibi_start_at_the_fixed_ones_and_get_gradients() -> None:
    model = BertBlocksModel(tiny_config(block_pos_enc_kind="alibi", alibi_learned=True))
    position = model.encoder.layers[0].attention.position
    assert position.learned_slopes.tolist() == pytest.approx(alibi_slopes(4))
    nn.init.uniform_(position.learned_slopes)
    distance = torch.arange(-3, 4)
    expected = torch.stack([-slope * distance.abs() for slope in position.learned_slopes])
    torch.testing.assert_close(position.bias(distance), expected)
    model(torch.tensor([[5, 6, 7, 8]])).last_hidden_state.square().sum().backward()
    assert position.learned_slopes.grad.abs().min() > 0


def test_mitchell_divides_outputs_by_the_root_of_twice_their_layer() -> None:
    model = build_for_init(init_kind="mitchell", num_hidden_layers=3)
    for number, layer in enumerate(model.base_model.encoder.layers, start=1):
        for linear, depth in ((layer.mlp.up, 1), (layer.mlp.down, 2 * number), (layer.attention.out, 2 * number)):
            deviation = CUT_AT_2 * (depth * linear.in_features) ** -0.5
            assert linear.weight.std().item() == pytest.approx(deviation, rel=0.03)


def test_a_users_initialization_knows_the_role_and_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(INITIALIZATIONS, "_blocks", dict(INITIALIZATIONS._blocks))

    @register_initialization("counted")
    def draw(weight: Any, role: Any, layer: Any, config: Any) -> None:
        nn.init.constant_(weight, -1.0 if layer is None else layer + (0.5 if role == "out" else 0.0))

    model = BertBlocksModel(tiny_config(init_kind="counted"))
    assert [layer.mlp.down.weight[0, 0].item() for layer in model.encoder.layers] == [0.5, 1.5, 2.5]
    assert [layer.mlp.up.weight[0, 0].item() for layer in model.encoder.layers] == [0.0, 1.0, 2.0]
    assert model.pooler.dense.weight[0, 0].item() == -1.0


#: Blocks that bring matrices, convolutions or softmaxes of their own.
MANY_BLOCKS: dict[str, Any] = {
    "attention_sinks": True,
    "span_convolution": True,
    "mlp_type": "moe",
    "num_experts": 4,
    "mask_token_id": 3,
    "timestep_embedding": True,
    "norm_pos": "pre",
    "norm_scaling": True,
    "mlm_head_glu": True,
    "initializer_range": 0.05,
}


@pytest.mark.parametrize("unpad", [True, False])
def test_many_blocks_together_run_in_half_precision_and_int8(unpad: bool) -> None:
    torch.manual_seed(0)
    model = BertBlocksForMaskedLM(tiny_config(**MANY_BLOCKS, unpad=unpad)).eval()
    ids, mask = pad_ids(ragged_ids([6, 3, 20]))
    batch = {"input_ids": ids, "attention_mask": mask}
    expected = model(**batch, labels=ids.masked_fill(mask == 0, -100)).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = model(**batch, labels=ids.masked_fill(mask == 0, -100)).loss
    cast.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    model.quantize("int8", samples=batch)
    for loss in (cast, model(**batch, labels=ids.masked_fill(mask == 0, -100)).loss):
        torch.testing.assert_close(loss, expected, atol=0.02, rtol=0)
