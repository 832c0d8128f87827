"""Mixtures of experts, compared with a loop over single tokens."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bertblocks import BertBlocksForMaskedLM, BertBlocksForReplacedTokenDetection, BertBlocksModel, ConfigError
from bertblocks.analysis import analyze, mermaid
from bertblocks.analysis.parameters import build
from bertblocks.models import (
    TASK_MODELS,
    EnhancedMaskedLM,
    GeneratorAndDiscriminator,
    MaskedLMWithPooledTerms,
    RetroMAE,
)
from bertblocks.nn.mlp import get_mlp
from bertblocks.nn.ops.gpu import Gpu
from tests.helpers import pad_ids, ragged_ids, tiny_config

EXPERTS = {"mlp_type": "moe", "num_experts": 5, "experts_per_token": 2}


def build_mixture(**options: Any) -> Any:
    torch.manual_seed(0)
    mixture: Any = get_mlp(tiny_config(**{**EXPERTS, **options}))
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixture.double().eval().requires_grad_(False)


def naive(mixture: Any, x: torch.Tensor, num_chosen: int, normalizes: bool) -> torch.Tensor:
    """One token and one of its experts at a time."""
    rows = []
    for token in x:
        scores = [math.exp(float(row @ token)) for row in mixture.router.weight]
        best = sorted(range(len(scores)), key=lambda expert: -scores[expert])[:num_chosen]
        total = sum(scores[expert] for expert in (best if normalizes else range(len(scores))))
        row = torch.zeros_like(token) if mixture.shared is None else run(mixture.shared, token)
        for expert in best:
            row = row + scores[expert] / total * run(mixture.experts[expert], token)
        rows.append(row)
    return torch.stack(rows)


def run(expert: Any, token: torch.Tensor) -> torch.Tensor:
    up = expert.up.weight @ token + expert.up.bias
    hidden = F.gelu(up) if len(up) == 24 else F.gelu(up[:24]) * up[24:]
    return expert.down.weight @ hidden + expert.down.bias


@pytest.mark.parametrize("expert_type", ["mlp", "glu"])
@pytest.mark.parametrize(
    ("num_chosen", "normalizes", "shared"), [(1, False, False), (2, False, True), (5, True, False)]
)
def test_every_token_gets_the_weighted_sum_of_its_experts(
    expert_type: str, num_chosen: int, normalizes: bool, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = build_mixture(
        expert_type=expert_type,
        experts_per_token=num_chosen,
        normalize_expert_weights=normalizes,
        shared_expert=shared,
    )
    x = torch.randn(17, 32, dtype=torch.float64)
    expected = naive(mixture, x, num_chosen, normalizes)
    torch.testing.assert_close(mixture(x)[0], expected)
    monkeypatch.setattr("bertblocks.nn.moe.is_capturing", lambda: True)  # computes all experts for all tokens
    torch.testing.assert_close(mixture(x)[0], expected)


@pytest.mark.parametrize("options", [{}, {"expert_type": "glu", "mlp_in_bias": False, "mlp_out_bias": False}])
@pytest.mark.parametrize("num_tokens", [1, 17])  # one token leaves three experts without any
def test_one_product_for_all_experts_equals_the_loop(
    options: Any, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = build_mixture(**options).float().requires_grad_(True)  # torch's product knows no double precision
    x = torch.randn(num_tokens, 32, requires_grad=True)
    inputs = [x, *mixture.parameters()]
    expected = mixture(x)[0]
    gradients = torch.autograd.grad(expected.square().sum(), inputs)
    monkeypatch.setattr("bertblocks.nn.moe.runs_grouped", lambda *_: True)
    monkeypatch.setattr(mixture, "_count", None)
    found = mixture(x)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for own, wanted in zip(torch.autograd.grad(found.square().sum(), inputs), gradients, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()) + 1e-6)


@pytest.mark.parametrize(
    ("gpu", "dtype", "hidden_size", "is_run"),
    [
        (Gpu((9, 0)), torch.bfloat16, 32, True),
        (Gpu((10, 0)), torch.bfloat16, 32, True),
        (Gpu((8, 0)), torch.bfloat16, 32, False),
        (Gpu((12, 0)), torch.bfloat16, 32, False),
        (Gpu((9, 0)), torch.float32, 32, False),
        (Gpu((9, 0)), torch.bfloat16, 36, False),
        (Gpu((9, 4), is_rocm=True), torch.bfloat16, 32, False),
        (None, torch.bfloat16, 32, False),
    ],
)
def test_one_product_runs_where_torch_has_a_kernel(gpu: Any, dtype: Any, hidden_size: int, is_run: bool) -> None:
    mixture = build_mixture(hidden_size=hidden_size)
    x = torch.zeros(3, hidden_size, dtype=dtype)
    assert mixture.is_grouped(x, gpu) == is_run
    mixture.experts[2].register_forward_hook(lambda *_: None)  # must be called
    assert not mixture.is_grouped(x, gpu)


def test_an_expert_computes_only_the_tokens_that_chose_it() -> None:
    mixture, sizes = build_mixture(), []
    for expert in mixture.experts:
        expert.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    _, logits = mixture(torch.randn(40, 32, dtype=torch.float64))
    assert sizes == logits.topk(2).indices.flatten().bincount(minlength=5).tolist()
    assert sum(sizes) == 80


def test_experts_without_tokens_get_gradients_of_zero() -> None:
    """Processes that share gradients must agree which parameters have one."""
    mixture = build_mixture().requires_grad_(True)
    mixture(torch.randn(1, 32, dtype=torch.float64))[0].sum().backward()
    used = [expert.up.weight.grad.abs().sum() > 0 for expert in mixture.experts]
    assert sum(used) == 2
    assert mixture(torch.zeros(0, 32, dtype=torch.float64))[0].shape == (0, 32)


def test_the_losses_and_statistics_of_a_router() -> None:
    mixture = build_mixture(router_balance_weight=0.3, router_z_weight=0.2)
    logits = torch.randn(30, 5, dtype=torch.float64)
    probabilities = logits.exp() / logits.exp().sum(1, keepdim=True)
    counts = [0] * 5
    for row in logits:
        for expert in row.argsort()[-2:]:
            counts[expert] += 1
    balance = 5 * sum(count / 60 * probabilities[:, expert].mean() for expert, count in enumerate(counts))
    z = logits.exp().sum(1).log().square().mean()
    routing = mixture.assess(logits)
    torch.testing.assert_close(routing.loss, 0.3 * balance + 0.2 * z)
    torch.testing.assert_close(routing.balance_loss, balance)
    torch.testing.assert_close(routing.z_loss, z)
    assert routing.load.tolist() == pytest.approx([count / 60 for count in counts])
    torch.testing.assert_close(routing.entropy, -(probabilities * probabilities.log()).sum(1).mean())
    even = mixture.assess(torch.eye(5, dtype=torch.float64) + torch.eye(5, dtype=torch.float64).roll(1, 0))
    assert even.balance_loss.item() == pytest.approx(1.0)


def test_the_load_balancing_loss_spreads_tokens_over_experts() -> None:
    mixture = build_mixture(router_balance_weight=1.0, router_z_weight=0.0, experts_per_token=1)
    mixture.router.requires_grad_(True)
    x = torch.randn(60, 32, dtype=torch.float64) + 1.0
    mixture.router.weight.data[0] = 0.2  # most tokens prefer the first expert, because all units have a mean of 1
    loads = []
    for _ in range(40):
        routing = mixture.assess(mixture.router(x))
        loads.append(routing.load.max().item())
        (gradient,) = torch.autograd.grad(routing.loss, mixture.router.weight)
        mixture.router.weight.data -= 0.5 * gradient
    assert loads[0] > 0.6
    assert loads[-1] < 0.35


IDS, MASK = pad_ids(ragged_ids([6, 3, 8]))
TARGETS: dict[str, dict[str, Any]] = {
    "masked-lm": {"labels": IDS.masked_fill(MASK == 0, -100)},
    "pretraining": {"labels": IDS.masked_fill(MASK == 0, -100), "order_labels": torch.tensor([0, 1, 0])},
    "masked-diffusion": {"labels": IDS.masked_fill(MASK == 0, -100), "timesteps": torch.tensor([0.5, 0.2, 1.0])},
    "replaced-token-detection": {"labels": (IDS % 2).masked_fill(MASK == 0, -100)},
    "sequence-classification": {"labels": torch.tensor([0, 1, 1])},
    "token-classification": {"labels": (IDS % 2).masked_fill(MASK == 0, -100)},
    "question-answering": {"start_positions": torch.tensor([1, 1, 1]), "end_positions": torch.tensor([2, 2, 2])},
}


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("task", TARGETS)
def test_models_add_the_losses_of_routers_in_training(task: str, unpad: bool) -> None:
    torch.manual_seed(0)
    layers = {1: {"mlp_type": "moe"}, 2: {"mlp_type": "moe", "num_experts": 3}}
    config = tiny_config(layer_overrides=layers, mask_token_id=3, unpad=unpad)
    model = TASK_MODELS[task](config).double().train()
    loss = model(IDS, attention_mask=MASK, **TARGETS[task]).loss
    routing = model.base_model.routing
    assert [len(layer.load) for layer in routing] == [8, 3]
    for layer in routing:
        assert layer.load.sum().item() == pytest.approx(1.0)
    added = sum(layer.loss for layer in routing)
    plain = model.eval()(IDS, attention_mask=MASK, **TARGETS[task]).loss
    torch.testing.assert_close(loss, plain + added)
    assert added.item() > 0.01


FLAT, CU_SEQLENS = torch.cat(ragged_ids([6, 3, 8])), torch.tensor([0, 6, 9, 17], dtype=torch.int32)
LABELS = FLAT.masked_fill(torch.arange(17) % 3 == 0, -100)
NUM_LABELS = int((LABELS != -100).sum())


@pytest.mark.parametrize("kind", [EnhancedMaskedLM, RetroMAE, MaskedLMWithPooledTerms, GeneratorAndDiscriminator])
def test_models_for_pretraining_add_them_to_the_loss_of_the_encoder(kind: Any) -> None:
    torch.manual_seed(0)
    config, seeds = tiny_config(**EXPERTS), torch.tensor([1, 2, 3])
    encoder = BertBlocksForMaskedLM(config)
    arguments: dict[Any, Any] = {
        EnhancedMaskedLM: (seeds, 0.5),
        RetroMAE: (LABELS, seeds, 0.5),
        MaskedLMWithPooledTerms: (None,),
    }
    model: Any
    if kind is GeneratorAndDiscriminator:
        model = kind(encoder, BertBlocksForReplacedTokenDetection(config), "separate")
    else:
        model = kind(encoder, predicts_bags=False) if kind is MaskedLMWithPooledTerms else kind(encoder)
    model.double()

    def totals() -> list[torch.Tensor]:
        # draws the same samples of a generator each time
        random = (torch.Generator().manual_seed(0),) if kind is GeneratorAndDiscriminator else ()
        out = model(FLAT, CU_SEQLENS, LABELS, *arguments.get(kind, random))
        return [value.detach() for value in out.values() if value.dim() == 0]

    model.eval()
    plain = totals()
    model.train()
    trained = totals()
    added = NUM_LABELS * sum(layer.loss for layer in encoder.model.routing)
    torch.testing.assert_close(trained[0], plain[0] + added)


def test_padding_does_not_count_in_the_losses_of_routers() -> None:
    model = BertBlocksModel(tiny_config(**EXPERTS)).double().train()
    found = []
    for unpad in (True, False):
        model.config.unpad = unpad
        model(IDS, attention_mask=MASK)
        found.append([torch.cat([layer.load, layer.loss[None]]) for layer in model.routing])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant: bool) -> None:
    model = BertBlocksForMaskedLM(tiny_config(**EXPERTS)).train()
    gradients = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.zero_grad()
        model(IDS, attention_mask=MASK, **TARGETS["masked-lm"]).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)
    assert gradients[0][0].abs().sum() > 0
    copy.deepcopy(model)  # what routers did must not hold a graph


def test_int8_keeps_the_router_and_replaces_the_experts() -> None:
    torch.manual_seed(0)
    model = BertBlocksModel(tiny_config(**EXPERTS, initializer_range=0.1)).eval()
    before = model(IDS, attention_mask=MASK).last_hidden_state
    model.quantize("int8", samples={"input_ids": IDS, "attention_mask": MASK})
    mixture: Any = model.encoder.layers[0].mlp
    assert mixture.router.weight.dtype == torch.float32
    assert mixture.experts[0].up.weight.dtype == torch.int8
    after = model(IDS, attention_mask=MASK).last_hidden_state
    assert F.cosine_similarity(after[MASK == 1], before[MASK == 1]).mean() > 0.98


def test_the_cost_counts_the_experts_of_a_token_and_all_parameters() -> None:
    plain = analyze(tiny_config(), "base", [10])
    mixture = analyze(tiny_config(**EXPERTS, shared_expert=True), "base", [10])
    expert, router = 2 * 32 * 24 + 24 + 32, 32 * 5
    part = "feed-forward"
    assert mixture.parameters[part] - plain.parameters[part] == 3 * (5 * expert + router)  # five and one instead of one
    assert mixture.parameters["total"] - mixture.parameters["active"] == 3 * 3 * expert
    assert "active" not in plain.parameters
    assert mixture.costs[0].flops[part] - plain.costs[0].flops[part] == 3 * 10 * 2 * (2 * 2 * 32 * 24 + router)
    assert "2 of 5 experts, each mlp of 24" in mixture.summary
    assert "5 experts, 2 per token<br/>MLP" in mermaid(build(tiny_config(**EXPERTS), "base"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mlp_type": "moe", "experts_per_token": 9}, "experts_per_token is 9; it must be at most num_experts = 8"),
        (
            {"mlp_type": "moe", "experts_per_token": 1, "normalize_expert_weights": True},
            "normalize_expert_weights is True; it must be false with experts_per_token 1",
        ),
        ({"mlp_type": "moe", "num_experts": 1}, "num_experts is 1; it must be at least 2"),
        ({"mlp_type": "moe", "expert_type": "moe"}, "expert_type is 'moe'; it must be one of mlp, glu"),
        ({"num_experts": 4}, "num_experts is 4; it belongs to mlp_type 'moe', but mlp_type is 'mlp'"),
        ({"mlp_type": "moe", "ngpt": True}, "mlp_type is 'moe'; ngpt requires 'glu'"),
    ],
)
def test_settings_that_contradict_each_other_raise(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**options)
