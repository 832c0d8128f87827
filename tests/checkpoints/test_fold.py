"""Models with muP in other families' formats: their scales are part of the weights, and outputs stay the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bertblocks import BertBlocksForMaskedLM, BertBlocksForSequenceClassification, ConfigError
from bertblocks.checkpoints.convert import convert
from bertblocks.checkpoints.fold import to_standard
from bertblocks.checkpoints.grow import grow
from bertblocks.checkpoints.load import load
from tests.helpers import tiny_config

MUP: dict[str, Any] = {
    "parametrization": "mup",
    "mup_base_hidden_size": 12,
    "mup_output_multiplier": 2.0,
    "local_attention_window_size": 128,
}


def randomize(model: Any) -> Any:
    """Norms and biases that are not 1 and 0, so that folding them wrongly shows."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
    return model.eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": False},
        {"qk_norm": True, "norm_eps": 1e-5},
        {"qk_norm": True, "norm_fn": "rms", "norm_weight": "one_plus", "norm_bias": False, "norm_pos": "pre"},
        {"block_pos_enc_kind": "disentangled", "num_kv_heads": 2},
        {"block_pos_enc_kind": "disentangled", "disentangled_share_projections": True, "attention_key_bias": False},
        {"span_convolution": True, "attention_sinks": True, "num_hidden_groups": 1},
        {"layer_overrides": {1: {"head_dim": 16}}, "block_pos_enc_kind": "alibi", "norm_fn": "dynamic_tanh"},
    ],
    ids=str,
)
def test_the_standard_model_with_folded_scales_has_the_same_outputs(options: Any) -> None:
    model = randomize(BertBlocksForMaskedLM(tiny_config(**MUP, **options)).double())
    config, tensors = to_standard(model)
    assert config.parametrization == "standard"
    standard = BertBlocksForMaskedLM(config).double().eval()
    missing, unexpected = standard.load_state_dict(tensors, strict=False)
    assert set(missing) <= set(standard.all_tied_weights_keys)
    assert not unexpected
    ids = torch.randint(1, 60, (3, 9))
    torch.testing.assert_close(standard(ids).logits, model(ids).logits)


@pytest.mark.parametrize("model_class", [BertBlocksForMaskedLM, BertBlocksForSequenceClassification])
def test_transformers_computes_the_same_from_a_converted_checkpoint(tmp_path: Path, model_class: Any) -> None:
    model = randomize(model_class(tiny_config(**MUP, num_labels=3)))
    model.save_pretrained(tmp_path / "own")
    loaded, _ = load(tmp_path / "own")
    assert loaded.config.mup_base_hidden_size == 12
    done = convert(tmp_path / "own", tmp_path / "bert", to="bert")  # which compares outputs with transformers'
    assert done.target_family == "bert"
    assert all(difference.agrees for difference in done.differences)
    again, _ = load(tmp_path / "bert")
    assert again.config.parametrization == "standard"


def test_what_no_weight_can_hold_is_rejected_in_one_sentence() -> None:
    model = BertBlocksForMaskedLM(tiny_config(**MUP, mlm_head_norm=False))
    with pytest.raises(ConfigError, match=r"its scale fits into no weight of this tied decoder.* own format"):
        to_standard(model)
    model = BertBlocksForMaskedLM(tiny_config(**MUP, qk_norm=True, norm_weight="none", norm_bias=False))
    with pytest.raises(ConfigError, match="its attention scale does not fit into keys whose norm has no weight"):
        to_standard(model)


def test_growth_in_width_needs_a_base_that_grows_too() -> None:
    small = BertBlocksForMaskedLM(tiny_config(**MUP)).eval()
    wide = {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 48}
    with pytest.raises(ValueError, match="parametrization is 'mup', whose decoder reads"):
        grow(small, tiny_config(**MUP, **wide))
    large = grow(small, tiny_config(**{**MUP, "mup_base_hidden_size": 24}, **wide), noise=0.0).eval()
    ids = torch.randint(1, 60, (2, 9))
    torch.testing.assert_close(large(ids).logits, small(ids).logits, atol=1e-4, rtol=1e-4)
