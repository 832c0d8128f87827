"""Every block, backend and layout gives the result of each sequence alone on the reference backend."""

import copy
import itertools
from typing import Any

import pytest
import torch

from bertblocks import (
    BertBlocksForMaskedDiffusion,
    BertBlocksForMaskedLM,
    BertBlocksForPreTraining,
    BertBlocksForSequenceClassification,
    BertBlocksModel,
)
from bertblocks.nn.backends import SdpaBackend
from tests.helpers import EDGE_LENGTHS, pad_ids, ragged_ids, tiny_config

NORMS = [
    {"norm_fn": norm_fn, "norm_pos": norm_pos, "parallel_block": parallel}
    for norm_fn, norm_pos, parallel in itertools.product(
        ("layer", "rms", "group", "dynamic_tanh", "deep"),
        ("pre", "post", "pre_and_post", "sandwich", "none"),
        (False, True),
    )
    if norm_fn != "deep" or norm_pos == "post"
]
WINDOWS: list[dict[str, Any]] = [{}, {"local_attention": True}, {"local_attention": True, "num_global_tokens": 2}]
POSITIONS: list[dict[str, Any]] = [
    {"block_pos_enc_kind": "none"},
    {"block_pos_enc_kind": "alibi", "embd_pos_enc_kind": "none"},
    {"block_pos_enc_kind": "t5", "embd_pos_enc_kind": "none", "relative_attention_num_buckets": 8},
    {"block_pos_enc_kind": "disentangled", "embd_pos_enc_kind": "none", "disentangled_max_distance": 10},
    {
        "block_pos_enc_kind": "disentangled",
        "disentangled_num_buckets": 8,
        "disentangled_max_distance": 20,
        "disentangled_norm": True,
        "disentangled_share_projections": True,
    },
    {"block_pos_enc_kind": "rope", "embd_pos_enc_kind": "sinusoidal", "local_rope_theta": 100.0},
    {"block_pos_enc_kind": "rope", "rope_interleaved": True, "partial_rotary_factor": 0.5},
]
ATTENTION = [
    {**window, **position, "num_kv_heads": kv_heads, "qk_norm": qk_norm, "norm_pos": "pre", "norm_eps": 1e-5}
    for window, position, kv_heads, qk_norm in itertools.product(WINDOWS, POSITIONS, (4, 2), (False, True))
]
NGPT = [{"ngpt": True, **window, **position} for window, position in itertools.product(WINDOWS, POSITIONS)]
OTHERS = [
    {"mlp_type": "glu", "hidden_act": "silu", "norm_pos": "pre", "first_attention_norm": False, "norm_bias": False},
    {
        "local_attention": True,
        "layer_types": ["local", "global", "local"],
        "norm_pos": "pre",
        "layer_overrides": {1: {"num_kv_heads": 1, "mlp_type": "glu"}, 2: {"local_attention_window_size": 4}},
    },
]
CAUSAL = [
    {"causal": True, "norm_pos": "pre", **window, **position}
    for window, position in itertools.product(WINDOWS[:2], POSITIONS)
] + [
    {"causal": True, "ngpt": True, "block_pos_enc_kind": "rope"},
    {"causal": True, "local_attention": True, "layer_overrides": {1: {"causal": False}}, "num_kv_heads": 2},
]
DISENTANGLED = [
    {"block_pos_enc_kind": "disentangled", "disentangled_scores": ["c2p"], "attention_key_bias": False},
    {"block_pos_enc_kind": "disentangled", "disentangled_scores": ["p2c"], "attention_key_bias": False},
    {
        "block_pos_enc_kind": "none",
        "layer_overrides": {1: {"block_pos_enc_kind": "disentangled"}, 2: {"block_pos_enc_kind": "rope"}},
    },
]
CONVOLUTIONS = [{"input_conv_size": 3}, {"input_conv_size": 7, "input_conv_groups": 4, "num_hidden_layers": 1}]
SCALES: list[dict[str, Any]] = [
    {
        "norm_fn": "rms",
        "norm_weight": "one_plus",
        "norm_pos": "sandwich",
        "qk_norm": True,
        "block_pos_enc_kind": "rope",
        "embedding_scale": 3.0,
        "residual_scale": 0.5,
        "attention_scale": 0.2,
    },
    {"norm_weight": "none", "norm_pos": "pre_and_post", "residual_scale": 2.0, "local_attention": True},
]
NORM_SCALING: list[dict[str, Any]] = [
    {"norm_scaling": True, "norm_pos": "pre"},
    {"norm_scaling": True, "norm_pos": "sandwich", "parallel_block": True, "norm_fn": "rms"},
    {"norm_scaling": True, "attention_norm_pos": "pre", "first_attention_norm": False},
]
EXPERTS: list[dict[str, Any]] = [
    {"mlp_type": "moe", "num_experts": 4, "norm_pos": "pre"},
    {"mlp_type": "moe", "num_experts": 5, "experts_per_token": 3, "expert_type": "glu", "parallel_block": True},
    {"layer_overrides": {1: {"mlp_type": "moe", "experts_per_token": 1, "shared_expert": True}}},
    {"mlp_type": "moe", "num_experts": 3, "normalize_expert_weights": False, "num_hidden_groups": 1},
]
GROUPED: list[dict[str, Any]] = [
    {"mlp_type": "grouped"},
    {"layer_overrides": {1: {"mlp_type": "grouped", "mlp_groups": 4}}, "norm_pos": "pre", "mlp_in_bias": False},
]
SPANS: list[dict[str, Any]] = [
    {"span_convolution": True, "span_conv_size": 3},
    {"span_convolution": True, "span_conv_size": 1, "norm_pos": "pre", "num_kv_heads": 2, "qk_norm": True},
    {"span_convolution": True, "local_attention": True, "num_global_tokens": 2, "block_pos_enc_kind": "rope"},
    {"layer_overrides": {1: {"span_convolution": True, "head_dim": 8}}, "num_attention_heads": 2},
]
GATES: list[dict[str, Any]] = [
    {"attention_gate": "headwise", "norm_pos": "pre"},
    {"attention_gate": "elementwise", "num_kv_heads": 2, "local_attention": True, "block_pos_enc_kind": "rope"},
    {"attention_gate": "elementwise", "ngpt": True, "layer_overrides": {1: {"attention_gate": "none"}}},
]
SINKS: list[dict[str, Any]] = [
    {"attention_sinks": True, "norm_pos": "pre", "num_kv_heads": 2},
    {"attention_sinks": True, "local_attention": True, "num_global_tokens": 2, "block_pos_enc_kind": "alibi"},
    {"attention_sinks": True, "local_attention": True, "causal": True, "layer_overrides": {1: {"causal": False}}},
    {"attention_sinks": True, "block_pos_enc_kind": "disentangled", "disentangled_max_distance": 10},
    {"ngpt": True, "layer_overrides": {1: {"attention_sinks": True}}, "block_pos_enc_kind": "rope"},
]
APART: list[dict[str, Any]] = [
    {"attention_norm_pos": "pre", "mlp_norm_pos": "post"},
    {"norm_pos": "sandwich", "mlp_norm_pos": "pre", "layer_overrides": {1: {"attention_norm_pos": "none"}}},
]
LEARNED_ALIBI: list[dict[str, Any]] = [
    {"block_pos_enc_kind": "alibi", "alibi_learned": True},
    {"block_pos_enc_kind": "alibi", "alibi_learned": True, "local_attention": True, "num_kv_heads": 2},
]
SHORTCUTS: list[dict[str, Any]] = [
    {"input_mixing": True, "norm_pos": "pre"},
    {"value_embedding": True, "num_kv_heads": 2, "block_pos_enc_kind": "rope", "local_attention": True},
    {"layer_overrides": {1: {"value_embedding": True, "input_mixing": True}}, "parallel_block": True},
]
TIMESTEPS: list[dict[str, Any]] = [
    {"timestep_embedding": True, "mask_token_id": 7},
    {"timestep_embedding": True, "mask_token_id": 7, "embedding_size": 8, "token_dropout": True},
    {"timestep_embedding": True, "mask_token_id": 7, "ngpt": True},
]
QK_NORMS: list[dict[str, Any]] = [
    {"qk_norm": True, "qk_norm_fn": "layer", "qk_norm_across_heads": True, "num_kv_heads": 2},
    {"qk_norm": True, "qk_norm_fn": "layer", "norm_eps": 1e-5, "local_attention": True},
    {
        "qk_norm": True,
        "qk_norm_across_heads": True,
        "block_pos_enc_kind": "disentangled",
        "norm_pos": "pre",
        "final_norm_bias": False,
    },
]
FACTORISED: list[dict[str, Any]] = [
    {"embedding_size": 8, "output_embedding_size": 24, "tie_word_embeddings": False},
    {"embedding_size": 8},
    {"embedding_size": 8, "embedding_projection_bias": False, "embedding_norm_after_projection": True},
    {"embedding_size": 48, "norm_fn": "group", "norm_pos": "pre", "embd_pos_enc_kind": "sinusoidal"},
    {"embedding_size": 32, "embedding_projection": True},
    {"embedding_size": 8, "ngpt": True},
]
SHARED = [
    {"num_hidden_groups": 1},
    {"num_hidden_groups": 2, "norm_pos": "pre", "norm_fn": "rms", "block_pos_enc_kind": "rope", "embedding_size": 8},
    {"num_hidden_groups": 1, "local_attention": True, "num_global_tokens": 2, "mlp_type": "glu"},
    {
        "num_hidden_groups": 2,  # layers 0 and 1, layer 2
        "local_attention": True,
        "layer_types": ["local", "local", "global"],
        "layer_overrides": {0: {"hidden_act": "silu"}, 1: {"hidden_act": "silu"}},
    },
    {"num_hidden_groups": 1, "norm_fn": "deep"},
    {"num_hidden_groups": 1, "ngpt": True},
]
MUP: list[dict[str, Any]] = [
    {"parametrization": "mup", "mup_base_hidden_size": 8},
    {"parametrization": "mup", "mup_base_hidden_size": 64, "block_pos_enc_kind": "disentangled", "num_kv_heads": 2},
]
#: test_invariance combines norms and attention on random configs; all combinations would be thousands.
CHOICES = [
    *NORMS,
    *ATTENTION,
    *NGPT,
    *OTHERS,
    *CAUSAL,
    *DISENTANGLED,
    *CONVOLUTIONS,
    *SCALES,
    *NORM_SCALING,
    *EXPERTS,
    *GROUPED,
    *SPANS,
    *GATES,
    *SINKS,
    *APART,
    *LEARNED_ALIBI,
    *SHORTCUTS,
    *TIMESTEPS,
    *QK_NORMS,
    *FACTORISED,
    *SHARED,
    *MUP,
]


def label(choice: dict) -> str:
    return " ".join(f"{key}={value}" for key, value in choice.items())


def gradients(model: BertBlocksModel) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("choice", CHOICES, ids=label)
def test_every_backend_and_layout_equals_sequences_alone(choice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SdpaBackend, "block_size", 3)  # so that the longer sequences go by blocks
    # in double precision, so that any difference is a mistake rather than rounding
    model = BertBlocksModel(tiny_config(pooler=False, **choice)).double().train()
    sequences = ragged_ids(EDGE_LENGTHS)
    weights: Any = [torch.randn(len(ids), model.config.hidden_size, dtype=torch.float64) for ids in sequences]

    model.config.attention_backend = "eager"
    expected: Any = []
    for ids, weight in zip(sequences, weights, strict=True):
        if len(ids):
            hidden = model(ids[None]).last_hidden_state[0]
            (hidden * weight).sum().backward()
            expected.append(hidden.detach())
    expected, weights = torch.cat(expected), torch.cat(weights)
    expected_gradients = gradients(model)
    scale = expected_gradients.abs().max()
    assert torch.isfinite(expected).all()
    assert torch.isfinite(expected_gradients).all()

    ids, mask = pad_ids(sequences)
    flat = torch.cat(sequences)
    bounds = torch.tensor([0, *EDGE_LENGTHS]).cumsum(0)
    rows, segments = pack_rows(sequences)
    for backend, layout in itertools.product(("eager", "sdpa", "cpu"), ("padded", "ragged", "flat", "rows")):
        model.zero_grad()
        model.config.attention_backend = backend
        model.config.unpad = layout != "padded"
        if layout == "flat":
            hidden = model(flat, cu_seqlens=bounds).last_hidden_state
        elif layout == "rows":
            hidden = model(rows, packed_seqlens=segments).last_hidden_state[rows != 0]
        else:
            out = model(ids, attention_mask=mask).last_hidden_state
            assert not out[mask == 0].any(), "padding is 0 in the result"
            hidden = out[mask == 1]
        (hidden * weights).sum().backward()
        where = f"{backend}, {layout}"
        torch.testing.assert_close(hidden, expected, atol=1e-9, rtol=1e-9, msg=lambda m, w=where: f"{w}: {m}")  # type: ignore[misc]
        difference = (gradients(model) - expected_gradients).abs().max() / scale
        assert difference < 1e-9, f"{where}: gradients differ by {difference:.1e} of the largest"


@pytest.mark.parametrize("choice", CHOICES, ids=label)
def test_fp32_on_a_cpu_equals_double_precision(choice: Any) -> None:
    """Compiled kernels know no double precision: what they compute, with and without gradients, is compared here."""
    exact = BertBlocksModel(tiny_config(pooler=False, attention_backend="eager", **choice)).double().train()
    model = copy.deepcopy(exact).float()
    model.config.attention_backend = "cpu"
    ids = torch.cat(ragged_ids(EDGE_LENGTHS))
    bounds = torch.tensor([0, *EDGE_LENGTHS]).cumsum(0)
    weights = torch.randn(len(ids), model.config.hidden_size, dtype=torch.float64)
    results = []
    for each in (exact, model):
        hidden = each(ids, cu_seqlens=bounds).last_hidden_state
        (hidden * weights).sum().backward()
        results.append((hidden.detach().double(), gradients(each).double()))
    with torch.no_grad():
        inferred = model.eval()(ids, cu_seqlens=bounds).last_hidden_state.double()
    (expected, expected_gradients), (hidden, found) = results
    tolerance = 2e-3 if choice.get("norm_pos") == "none" else 1e-4  # without norms scores are large, and so is rounding
    for one, other in ((hidden, expected), (inferred, expected), (found, expected_gradients)):
        scale = other.abs().max()
        torch.testing.assert_close(one / scale, other / scale, atol=tolerance, rtol=0)


@pytest.mark.parametrize("choice", CHOICES, ids=label)
def test_selected_tokens_equal_those_of_a_full_forward_pass(choice: Any) -> None:
    """The last layer computes only selected tokens, in any order and repeated. Checks outputs, gradients and states."""
    model = BertBlocksModel(tiny_config(pooler=False, **choice)).double().train()
    ids = torch.cat(ragged_ids(EDGE_LENGTHS))
    bounds = torch.tensor([0, *EDGE_LENGTHS]).cumsum(0)
    chosen = torch.tensor([len(ids) - 1, 3, 0, 3, 7])
    weight = torch.randn(len(chosen), model.config.hidden_size, dtype=torch.float64)
    results = []
    for options in (
        {},
        {"token_indices": lambda _: chosen},
        {"token_indices": lambda _: chosen, "output_hidden_states": True},
    ):
        model.zero_grad()
        encoded = model.encode(ids, cu_seqlens=bounds, **options)
        hidden = encoded.hidden if options else encoded.hidden[chosen]
        (hidden * weight).sum().backward()
        results.append((hidden, gradients(model)))
    assert encoded.hidden_states is not None
    assert torch.equal(encoded.hidden_states[-1][chosen], hidden)
    whole, scale = results[0], results[0][1].abs().max()
    for hidden, gradient in results[1:]:
        torch.testing.assert_close(hidden, whole[0], atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(gradient / scale, whole[1] / scale, atol=1e-9, rtol=0)


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("task", ["masked", "order", "diffusion", "first"])
def test_heads_on_selected_tokens_equal_heads_on_all_tokens(task: Any, unpad: Any) -> None:
    """Covers padding on both sides, holes, rows and batches of padding only, and gradient checkpointing."""
    config = tiny_config(unpad=unpad, mask_token_id=3, num_labels=3)
    models = {
        "masked": BertBlocksForMaskedLM,
        "order": BertBlocksForPreTraining,
        "diffusion": BertBlocksForMaskedDiffusion,
        "first": BertBlocksForSequenceClassification,
    }
    model = models[task](config).double().train()
    ids = torch.randint(5, 60, (5, 6))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 1, 1], [0] * 6])
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.5, -100)
    targets = {
        "masked": {"labels": labels},
        "order": {"labels": labels, "order_labels": torch.tensor([0, 1, 1, 0, -100])},
        "diffusion": {"labels": labels, "timesteps": torch.rand(5) * 0.9 + 0.1},
        "first": {"labels": torch.tensor([0, 1, 2, 0, 1])},
    }[task]

    def run(mask: Any, **options: Any) -> Any:
        model.zero_grad()
        loss = model(ids, attention_mask=mask, **targets, **options).loss
        loss.backward()
        return loss.detach(), gradients(model)

    every_row = {"output_hidden_states": True} if task == "first" else {"return_logits": True}
    for used in (mask, torch.zeros_like(mask)):
        whole = run(used, **every_row)
        torch.testing.assert_close(run(used), whole, atol=1e-12, rtol=1e-9)
        model.gradient_checkpointing_enable()
        torch.testing.assert_close(run(used), whole, atol=1e-12, rtol=1e-9)
        model.gradient_checkpointing_disable()


def pack_rows(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences in order, in two rows of several segments each."""
    real = [ids for ids in sequences if len(ids)]
    halves = [torch.cat(real[:5]), torch.cat(real[5:])]
    rows, _ = pad_ids(halves, width=max(map(len, halves)) + 2)
    segments = torch.zeros(2, 5, dtype=torch.long)
    segments[0] = torch.tensor([len(ids) for ids in real[:5]])
    segments[1, : len(real) - 5] = torch.tensor([len(ids) for ids in real[5:]])
    return rows, segments
