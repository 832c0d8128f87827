"""QK-clip, tested against all products of queries and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bertblocks import BertBlocksForMaskedLM
from bertblocks.core.settings import RecipeError
from bertblocks.training import qk_clip
from bertblocks.training.optimizer_sections import Muon
from bertblocks.training.qk_clip import QKClip
from tests.helpers import tiny_config
from tests.training.helpers import make_trainer
from tests.training.test_registries import assert_resumes

IDS = torch.arange(5, 29)
CU_SEQLENS = torch.tensor([0, 13, 14, 24], dtype=torch.int32)
CASES: list[dict[str, Any]] = [
    {"attention_qkv_bias": True},
    {"num_kv_heads": 2, "block_pos_enc_kind": "rope", "attention_qkv_bias": True},
    {"local_attention": True, "block_pos_enc_kind": "rope"},
    {"local_attention": True, "num_global_tokens": 1},
    {"causal": True},
    {"attention_qkv_bias": True, "attention_key_bias": False},
]


def build(**options: Any) -> BertBlocksForMaskedLM:
    torch.manual_seed(0)
    model = BertBlocksForMaskedLM(tiny_config(num_hidden_layers=2, **options)).double().train()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def highest_logits(model: BertBlocksForMaskedLM) -> list[list[float]]:
    """For each layer and head the largest visible product, from the arguments of the backend, pair by pair."""
    found = []

    def note(q: Any, k: Any, context: Any) -> None:
        heads = []
        for head in range(q.shape[1]):
            group, best = head * k.shape[1] // q.shape[1], float("-inf")
            products = q[:, head] @ k[:, group].T * context.scale
            for tokens in context.layout.slices():
                for i in range(tokens.start, tokens.stop):
                    for j in range(tokens.start, tokens.stop):
                        at = torch.tensor([i - tokens.start]), torch.tensor([j - tokens.start])
                        if context.pattern.visible(*at).item():
                            best = max(best, products[i, j].item())
            heads.append(best)
        found.append(heads)

    attentions = [layer.attention for layer in model.model.encoder.layers]
    before = [attention.observe for attention in attentions]
    for attention in attentions:
        attention.observe = note
    with torch.no_grad():
        model(IDS, cu_seqlens=CU_SEQLENS)
    for attention, observe in zip(attentions, before, strict=True):
        attention.observe = observe
    return found


@pytest.mark.parametrize("options", CASES)
def test_heads_above_the_limit_are_scaled_to_it_and_others_stay(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qk_clip, "MAX_QUERIES", 7)  # several parts per sequence
    model = build(**options)
    before = highest_logits(model)
    limit = sorted(before[0])[1] * 1.001  # between the heads of the first layer
    clip = QKClip(model, limit)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    model(IDS, cu_seqlens=CU_SEQLENS)
    for index, expected in enumerate(before):
        assert clip.highest[index].tolist() == pytest.approx(expected, rel=1e-6)
    clip()
    after = highest_logits(model)
    assert after[0] == pytest.approx([min(limit, logit) for logit in before[0]], rel=1e-6)
    attention = model.model.encoder.layers[0].attention
    dim, heads = attention.head_dim, attention.num_heads
    rows = attention.qkv.weight / weights["model.encoder.layers.0.attention.qkv.weight"]
    shared = attention.num_kv_heads < heads
    for head, logit in enumerate(before[0]):
        factor = min(limit / logit, 1.0) if logit > 0 else 1.0
        row_factor = torch.tensor(factor if shared else factor**0.5).double()
        assert torch.allclose(rows[head * dim : (head + 1) * dim], row_factor, rtol=1e-6)
        if not shared:
            assert torch.allclose(rows[(heads + head) * dim : (heads + head + 1) * dim], row_factor, rtol=1e-6)
    assert torch.equal(rows[-attention.sizes[2] :], torch.ones_like(rows[-attention.sizes[2] :])), "values stay"
    touched = ("attention.qkv", "attention.query_bias")
    for name, weight in model.named_parameters():
        assert any(part in name for part in touched) or torch.equal(weight, weights[name]), name


def test_nothing_is_observed_in_evaluation_or_twice() -> None:
    model = build()
    clip = QKClip(model, 1e-3)
    model.eval()(IDS, cu_seqlens=CU_SEQLENS)
    before = [weight.clone() for weight in model.parameters()]
    clip()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model.train()(IDS, cu_seqlens=CU_SEQLENS)
    clip()
    after = [weight.clone() for weight in model.parameters()]
    clip()
    assert all(torch.equal(a, b) for a, b in zip(after, model.parameters(), strict=True))


def test_training_keeps_logits_at_the_limit_and_resumes(tmp_path: Path) -> None:
    assert_resumes(tmp_path / "runs", "optimizer={kind: muon, lr: 5e-3, qk_clip: 0.02}")
    free, clipped = (
        make_trainer(tmp_path / name, f"optimizer={{kind: muon, lr: 0.05{more}}}", "phases.0.duration=3")
        for name, more in (("free", ""), ("clipped", ", qk_clip: 0.02"))
    )
    logits = []
    for trainer in (free, clipped):
        trainer.train()
        clip = QKClip(trainer.model, 1.0)
        trainer.model.train()(IDS, cu_seqlens=CU_SEQLENS)
        logits.append(max(found.max().item() for found in clip.highest.values()))
    assert logits[1] < 0.5 * logits[0]


@pytest.mark.parametrize("options", [{"qk_norm": True}, {"ngpt": True}])
def test_models_that_normalize_queries_and_keys_raise(options: Any) -> None:
    with pytest.raises(RecipeError, match=r"optimizer.qk_clip is 100, but the model normalizes queries and keys"):
        Muon(qk_clip=100.0).build(BertBlocksForMaskedLM(tiny_config(**options)))
