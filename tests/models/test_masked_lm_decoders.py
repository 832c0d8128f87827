"""RetroMAE and enhanced masked LM, tested against attention that is written out pair by pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bertblocks import BertBlocksForMaskedLM
from bertblocks.models import EnhancedMaskedLM, RetroMAE
from bertblocks.nn.backends.eager import RandomBackend
from bertblocks.nn.layout import SequenceLayout
from tests.helpers import tiny_config

LENGTHS = [5, 3]
CU_SEQLENS = torch.tensor([0, 5, 8], dtype=torch.int32)
ORIGINAL = torch.tensor([1, 11, 7, 12, 2, 1, 13, 2])
LABELS = torch.tensor([-100, 11, -100, 12, -100, -100, 13, -100])
IDS = torch.where(LABELS == -100, ORIGINAL, 3)
EVERY_LABEL = torch.tensor([-100, 11, 7, 12, -100, -100, 13, -100])
SEEDS = torch.tensor([5, 6])
SHARE = 0.4
#: Post-norm with learned positions as in BERT, and pre-norm with RoPE and shared key/value heads.
CONFIGS: list[dict[str, Any]] = [
    {"norm_pos": "post", "embd_pos_enc_kind": "learned", "block_pos_enc_kind": "none"},
    {"norm_pos": "pre", "embd_pos_enc_kind": "none", "block_pos_enc_kind": "rope", "num_kv_heads": 2},
    {"ngpt": True, "block_pos_enc_kind": "alibi"},
    {
        "value_embedding": True,
        "input_mixing": True,
        "local_attention": True,
        "layer_types": ["local", "global", "local"],
    },
]


def build(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(BertBlocksForMaskedLM(tiny_config(**options))).double().eval()


def drawn(length: int, seed: int, sees_first: bool) -> torch.Tensor:
    """The pairs that are visible, drawn as documented: hidden if a uniform number is below the share."""
    numbers = torch.rand(length, length, generator=torch.Generator().manual_seed(seed))
    visible = [[i != j and bool(numbers[i, j] >= SHARE) for j in range(length)] for i in range(length)]
    return torch.tensor([[(sees_first and j == 0) or visible[i][j] for j in range(length)] for i in range(length)])


def decode(model: Any, queries: torch.Tensor, memory: torch.Tensor, sees_first: bool) -> torch.Tensor:
    """The layer on one sequence after the other, with a loop over heads and queries."""
    block, outputs = model.decoder.block, []
    attention = block.attention
    for number, length in enumerate(LENGTHS):
        start = sum(LENGTHS[:number])
        x, source = queries[start : start + length], memory[start : start + length]
        normed, source = (block.attention_residual.pre_norm(part) for part in (x, source))
        q, _, _ = attention.split(attention.qkv(normed))
        _, k, v = attention.split(attention.qkv(source))
        q, k = attention.apply_positions(q, k, SequenceLayout.from_shape(1, length, x.device))
        visible, heads = drawn(length, int(SEEDS[number]), sees_first), []
        for head in range(attention.num_heads):
            group = head * attention.num_kv_heads // attention.num_heads
            mixed = torch.zeros(length, attention.head_dim, dtype=x.dtype)
            for i in range(length):
                seen = [j for j in range(length) if visible[i, j]]
                if seen:
                    weights = torch.softmax(torch.stack([q[i, head] @ k[j, group] * attention.scale for j in seen]), 0)
                    mixed[i] = sum(weight * v[j, group] for weight, j in zip(weights, seen, strict=True))
            heads.append(mixed)
        x = block.attention_residual.join(x, attention.out(torch.cat(heads, dim=1)))
        outputs.append(block.mlp_residual.join(x, block.mlp(block.mlp_residual.pre_norm(x))))
    return torch.cat(outputs)


def loss(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.encoder.logits(hidden), labels, reduction="sum", ignore_index=-100)


def encode(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Every sequence alone, as a batch of one row."""
    return torch.cat([model.encoder.model(part[None]).last_hidden_state[0] for part in ids.split(LENGTHS)])


@pytest.mark.parametrize("options", CONFIGS[:2])
def test_retromae_equals_its_definition(options: Any) -> None:
    model = build(RetroMAE, **options)
    out = model(IDS, CU_SEQLENS, LABELS, EVERY_LABEL, SEEDS, SHARE)
    hidden = encode(model, IDS)
    torch.testing.assert_close(out.encoder_total, loss(model, hidden, LABELS))
    firsts = torch.stack([hidden[0]] * 5 + [hidden[5]] * 3)
    embedding, positions = model.encoder.model.embedding, torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    queries = firsts if embedding.position is None else firsts + embedding.position(positions)
    memory = embedding(ORIGINAL, None, None, positions)
    memory[[0, 5]] = hidden[[0, 5]]
    expected = loss(model, decode(model, queries, memory, sees_first=True), EVERY_LABEL)
    torch.testing.assert_close(out.decoder_total, expected)


@pytest.mark.parametrize("options", CONFIGS[:2])
def test_enhanced_masked_lm_equals_its_definition(options: Any) -> None:
    model = build(EnhancedMaskedLM, **options)
    out = model(ORIGINAL, CU_SEQLENS, EVERY_LABEL, SEEDS, SHARE)
    hidden = encode(model, ORIGINAL)
    expected = loss(model, decode(model, hidden, hidden, sees_first=False), EVERY_LABEL)
    torch.testing.assert_close(out.decoder_total, expected)


@pytest.mark.parametrize("options", CONFIGS)
def test_a_masked_token_does_not_tell_the_retromae_decoder_what_it_is(options: Any) -> None:
    model = build(RetroMAE, **options)
    states = []
    model.decoder.register_forward_hook(lambda module, inputs, output: states.append(output))
    other = torch.where(LABELS == 12, 17, LABELS)
    for labels in (LABELS, other):
        model(IDS, CU_SEQLENS, labels, EVERY_LABEL, SEEDS, 0.0)
    changed = (states[0] - states[1]).abs().sum(dim=1) > 1e-9
    assert changed.tolist() == [True, True, True, False, True, False, False, False]


@pytest.mark.parametrize("options", CONFIGS)
@pytest.mark.parametrize("kind", [RetroMAE, EnhancedMaskedLM])
def test_every_weight_of_encoder_and_decoder_gets_a_gradient(kind: Any, options: Any) -> None:
    model = build(kind, **options)
    inputs = (IDS, CU_SEQLENS, LABELS, EVERY_LABEL) if kind is RetroMAE else (ORIGINAL, CU_SEQLENS, EVERY_LABEL)
    out = model(*inputs, SEEDS, SHARE)
    (out.decoder_total + (0 if out.encoder_total is None else out.encoder_total)).backward()
    without = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert without == []
    assert list(model.written()) == ["model"]
    assert model.written()["model"] is model.encoder


def test_theta_moves_in_the_decoder_too() -> None:
    model = build(RetroMAE, block_pos_enc_kind="rope", local_attention=True, layer_types=["local", "global", "local"])
    model.set_rope_theta(77.0)
    thetas = [layer.attention.position.theta for layer in model.encoder.model.encoder.layers]
    assert (model.config.rope_theta, model.decoder.block.attention.position.theta, thetas[1]) == (77.0, 77.0, 77.0)
    assert thetas[0] == thetas[2] == model.encoder.config.local_rope_theta != 77.0


def test_hidden_pairs_have_their_share_and_depend_on_the_seed_only() -> None:
    draw = RandomBackend([], 0.3).draw_visible
    visible = draw(200, 7, torch.device("cpu"))
    assert not visible.diagonal().any()
    assert visible.sum().item() / (200 * 199) == pytest.approx(0.7, abs=0.01)
    assert torch.equal(visible, draw(200, 7, torch.device("cpu")))
    assert not torch.equal(visible, draw(200, 8, torch.device("cpu")))
