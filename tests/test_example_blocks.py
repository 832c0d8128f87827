"""The blocks in examples/blocks/, each tested against its formula, in every layout, and through a saved model."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from bertblocks import BertBlocksModel, ConfigError, register_sharing
from bertblocks.config.blocks import SLOTS
from tests.helpers import EDGE_LENGTHS, pad_ids, ragged_ids, tiny_config

FOLDER = Path(__file__).parents[1] / "examples" / "blocks"
#: Configs that choose the block of each script.
CHOICES: dict[str, list[dict[str, Any]]] = {
    "layer_scale": [
        {"residual_fn": "layer_scale", "layer_scale_start": 0.3, "norm_pos": "sandwich"},
        {"layer_overrides": {1: {"residual_fn": "layer_scale"}}, "parallel_block": True},
    ],
    "soft_capping": [
        {"attention_fn": "soft_capping", "attention_score_cap": 2.0, "num_kv_heads": 2, "block_pos_enc_kind": "alibi"},
        {"layer_overrides": {1: {"attention_fn": "soft_capping"}}, "local_attention": True, "num_global_tokens": 1},
    ],
    "cyclic_sharing": [
        {"layer_sharing": "cyclic", "num_hidden_layers": 4, "num_hidden_groups": 2, "norm_pos": "pre"},
    ],
    "entmax": [
        {"attention_fn": "entmax", "num_kv_heads": 2, "block_pos_enc_kind": "alibi"},
        {"attention_fn": "entmax", "entmax_alpha": 2.0, "local_attention": True, "num_global_tokens": 1},
        {"layer_overrides": {1: {"attention_fn": "entmax", "entmax_alpha": 1.2}}},
    ],
    "exclusive_attention": [
        {"attention_gate": "exclusive", "num_kv_heads": 2, "block_pos_enc_kind": "rope"},
        {"layer_overrides": {1: {"attention_gate": "exclusive"}}, "ngpt": True},
    ],
}


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes what the examples register."""
    for registry in SLOTS.values():
        monkeypatch.setattr(registry, "_blocks", dict(registry._blocks))


def load(name: str) -> dict[str, Any]:
    """Registers the block of a script without running the rest."""
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def build(**options: Any) -> BertBlocksModel:
    """Returns a model in double precision whose parameters are all random."""
    torch.manual_seed(0)
    model = BertBlocksModel(tiny_config(**options)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def record(module: torch.nn.Module, run: Any) -> tuple[Any, Any]:
    """Returns the last input and output of a module while `run` runs."""
    calls: list[tuple[Any, Any]] = []
    handle = module.register_forward_hook(lambda _, inputs, output: calls.append((inputs, output)))
    run()
    handle.remove()
    return calls[-1]


def test_every_script_is_tested_and_short() -> None:
    scripts = {path.stem: path for path in FOLDER.glob("*.py")}
    assert scripts.keys() == CHOICES.keys()
    for path in scripts.values():
        assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize(("name", "options"), [(name, options) for name in CHOICES for options in CHOICES[name]])
def test_a_sequence_does_not_depend_on_its_layout(name: Any, options: Any, tmp_path: Path) -> None:
    """Padded on several backends, packed, and after a round trip through a file, all as each sequence alone."""
    load(name)
    model = build(**options)
    sequences = ragged_ids(EDGE_LENGTHS)
    ids, mask = pad_ids(sequences)
    with torch.no_grad():
        alone = torch.cat([model(sequence[None]).last_hidden_state[0] for sequence in sequences if len(sequence)])
        flat = torch.cat(sequences)
        cu_seqlens = torch.tensor([0, *EDGE_LENGTHS]).cumsum(0)
        results = [model(flat, cu_seqlens=cu_seqlens).last_hidden_state]
        for unpad, backend in ((True, "auto"), (False, "auto"), (True, "sdpa"), (False, "eager")):
            model.config.unpad, model.config.attention_backend = unpad, backend
            results.append(model(ids, attention_mask=mask).last_hidden_state[mask.bool()])
        model.save_pretrained(tmp_path)
        again = BertBlocksModel.from_pretrained(tmp_path, dtype=torch.float64)
        results.append(again(ids, attention_mask=mask).last_hidden_state[mask.bool()])
    for result in results:
        torch.testing.assert_close(result, alone, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("name", "options"), [(name, options) for name in CHOICES for options in CHOICES[name]])
def test_gradients_are_those_of_finite_differences(name: Any, options: Any) -> None:
    """Along a random direction through all parameters, with a row of padding only in the batch."""
    load(name)
    model = build(**options, unpad=False)
    ids, mask = pad_ids(ragged_ids([5, 0, 9]))
    weights = torch.randn(3, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss() -> Tensor:
        return (model(ids, attention_mask=mask).last_hidden_state * weights).sum()

    parameters = [p for p in model.parameters() if not p.grad_fn]
    gradients = torch.autograd.grad(loss(), parameters, allow_unused=True)
    pairs = [(p, torch.zeros_like(p) if g is None else g) for p, g in zip(parameters, gradients, strict=True)]
    directions = [torch.randn_like(p) for p in parameters]
    expected = sum(float((g * d).sum()) for (_, g), d in zip(pairs, directions, strict=True))
    values = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(step * direction)
            values.append(float(loss()))
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(expected, rel=1e-4)


def test_layer_scale_multiplies_what_each_sublayer_adds() -> None:
    load("layer_scale")
    model = build(residual_fn="layer_scale", norm_pos="pre", num_hidden_layers=1, final_norm=False)
    layer = model.encoder.layers[0]
    ids = torch.tensor([[5, 6, 7]])
    (x, *_), _ = record(layer, lambda: model(ids))
    _, (attended, _) = record(layer.attention, lambda: model(ids))
    _, fed = record(layer.mlp, lambda: model(ids))
    expected = x + attended * layer.attention_residual.combine.factors + fed * layer.mlp_residual.combine.factors
    torch.testing.assert_close(model(ids).last_hidden_state[0], expected)


def test_layer_scale_starts_with_the_value_of_its_layer() -> None:
    load("layer_scale")
    config = tiny_config(residual_fn="layer_scale", layer_overrides={2: {"layer_scale_start": 0.5}})
    layers = BertBlocksModel(config).encoder.layers
    starts = [layer.mlp_residual.combine.factors.unique().item() for layer in layers]
    assert starts == pytest.approx([0.1, 0.1, 0.5])
    with pytest.raises(ConfigError, match=r"layer_scale_start is 0\.0; it must be greater than 0"):
        tiny_config(residual_fn="layer_scale", layer_scale_start=0.0)
    with pytest.raises(ConfigError, match="residual_fn is 'layer_scale'; ngpt requires 'add'"):
        tiny_config(residual_fn="layer_scale", ngpt=True)


def scores_of_first_layer(model: BertBlocksModel, ids: Tensor) -> Tensor:
    """Returns the scores `[heads, queries, keys]` of one sequence."""
    attention = model.encoder.layers[0].attention
    _, qkv = record(attention.qkv, lambda: model(ids))
    q, k, _ = (part.unflatten(-1, (4, 8)) for part in qkv.split(32, dim=-1))
    return torch.einsum("qhd,khd->hqk", q, k) / 8**0.5


def test_soft_capping_equals_gemma() -> None:
    load("soft_capping")
    model = build(attention_fn="soft_capping", attention_score_cap=1.5)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    q, k, v = (torch.randn(1, 4, 5, 8, dtype=torch.float64) for _ in range(3))
    gemma = SimpleNamespace(num_key_value_groups=1, head_dim=8, training=False)
    _, weights = eager_attention_forward(gemma, q, k, v, None, softcap=1.5)
    scores, visible = q @ k.mT / 8**0.5, torch.ones(5, 5, dtype=torch.bool)
    torch.testing.assert_close(model.encoder.layers[0].attention.weigh(scores, visible), weights, atol=1e-6, rtol=0)
    expected = (1.5 * (scores_of_first_layer(model, ids) / 1.5).tanh()).exp()
    actual = model(ids, output_attentions=True).attentions[0][0]
    torch.testing.assert_close(actual, expected / expected.sum(-1, keepdim=True))


def test_exclusive_attention_removes_the_projection_on_the_own_value() -> None:
    """With one key/value head for two query heads, one token and head at a time."""
    load("exclusive_attention")
    model = build(attention_gate="exclusive", num_kv_heads=2)
    gate = model.encoder.layers[0].attention.gate
    (attended, _, values), output = record(gate, lambda: model(torch.tensor([[5, 6, 7]])))
    assert attended.shape == (3, 4, 8)
    for token in range(3):
        for head in range(4):
            y, v = attended[token, head], values[token, head // 2]
            torch.testing.assert_close(output[token, head], y - (y @ v) * v / (v @ v))
    nothing = torch.zeros(1, 2, 8, dtype=torch.float64)
    assert torch.equal(gate(nothing + 1, nothing, nothing), nothing + 1)  # a value of 0 has no direction


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_entmax_equals_its_closed_form(alpha: float) -> None:
    """For 1.5 and 2 the threshold has a closed form, given how many of the highest scores get a weight."""
    weigh = load("entmax")["Entmax"](alpha)
    scores = 3 * torch.randn(50, 7, dtype=torch.float64)
    visible = torch.rand(50, 7) < 0.7
    weights = weigh(scores, visible)
    assert not weights[~visible].any()
    assert (weights == 0)[visible].any()
    for row, allowed, actual in zip((alpha - 1) * scores, visible, weights, strict=True):
        expected = torch.zeros(7, dtype=torch.float64)
        ranked = row[allowed].sort(descending=True).values
        for count in range(1, len(ranked) + 1):
            mean, square = ranked[:count].mean(), (ranked[:count] ** 2).mean()
            root = ((1 / count) - (square - mean**2)).clamp(min=0).sqrt()
            threshold = mean - (1 / count if alpha == 2 else root)
            candidate = ((row - threshold).clamp(min=0) ** (1 / (alpha - 1))).masked_fill(~allowed, 0.0)
            if (candidate > 0).sum() == count and abs(candidate.sum() - 1) < 1e-9:
                expected = candidate
        torch.testing.assert_close(actual, expected)


def test_entmax_approaches_softmax() -> None:
    weigh = load("entmax")["Entmax"](1.0001)
    scores, visible = torch.randn(5, 7, dtype=torch.float64), torch.ones(5, 7, dtype=torch.bool)
    torch.testing.assert_close(weigh(scores, visible), scores.softmax(-1), atol=1e-3, rtol=0)


def test_cyclic_sharing_equals_a_model_with_copies() -> None:
    load("cyclic_sharing")
    shared = build(layer_sharing="cyclic", num_hidden_layers=5, num_hidden_groups=2)
    apart = build(num_hidden_layers=5)
    for name in ("embedding", "pooler"):
        getattr(apart, name).load_state_dict(getattr(shared, name).state_dict())
    for layer, source in zip(apart.encoder.layers, (0, 1, 0, 1, 0), strict=True):
        layer.load_state_dict(shared.encoder.layers[source].state_dict())
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(shared(ids).last_hidden_state, apart(ids).last_hidden_state)


def test_layers_that_share_weights_in_turn_must_agree() -> None:
    load("cyclic_sharing")
    options = {"layer_sharing": "cyclic", "num_hidden_layers": 4, "num_hidden_groups": 2}
    tiny_config(**options, layer_overrides={1: {"hidden_act": "silu"}, 3: {"hidden_act": "silu"}})
    with pytest.raises(ConfigError, match="makes layers 0 and 2 share their weights, so they must have the same"):
        tiny_config(**options, layer_overrides={2: {"hidden_act": "silu"}})
    with pytest.raises(ConfigError, match="requires a first layer that does not share its weights"):
        tiny_config(**options, norm_pos="pre", first_attention_norm=False)


def test_a_rule_of_sharing_must_use_every_set_of_weights() -> None:
    register_sharing("first_only")(type("FirstOnly", (), {"group": staticmethod(lambda index, layers, groups: 0)}))
    with pytest.raises(ConfigError, match=r"num_hidden_groups is 2; .* must use every set of weights"):
        tiny_config(layer_sharing="first_only", num_hidden_groups=2)
