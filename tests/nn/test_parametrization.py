"""muP: scales, initial weights and what a config accepts, against closed forms."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM, BertBlocksForSequenceClassification, ConfigError
from bertblocks.nn.attention import Attention
from tests.helpers import tiny_config

#: Four times as wide as the base, whose root is 2, so that factors are exact.
MUP: dict[str, Any] = {"parametrization": "mup", "mup_base_hidden_size": 8, "mup_base_head_dim": 2}
EVERYTHING: dict[str, Any] = {
    "mlp_type": "moe",
    "input_conv_size": 3,
    "span_convolution": True,
    "attention_gate": "elementwise",
    "value_embedding": True,
    "block_pos_enc_kind": "disentangled",
    "head_dim": 4,
    "tie_word_embeddings": False,
}
#: The factor on the initial standard deviation for r = 4, by the end of a weight's name; 1 for all others.
ROOT = re.compile(r"(qkv|out|up|down|projection|pointwise|kernel|value|query|key|conv|dense)\.weight")
WHOLE = re.compile(r"(router|classifier)\.weight")


def build(model_class: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return model_class(tiny_config(**options))


@pytest.mark.parametrize("init_kind", ["trunc_normal", "normal", "uniform", "megatron"])
@pytest.mark.parametrize("model_class", [BertBlocksForMaskedLM, BertBlocksForSequenceClassification])
def test_initial_weights_have_the_factor_of_their_kind(init_kind: str, model_class: Any) -> None:
    """Both models draw the same numbers, so every weight is the standard one times its factor."""
    standard = build(model_class, init_kind=init_kind, **EVERYTHING).state_dict()
    scaled = build(model_class, init_kind=init_kind, **EVERYTHING, **MUP).state_dict()
    factors = set()
    for name, weight in standard.items():
        factor = 0.5 if ROOT.search(name) else 0.25 if WHOLE.search(name) else 1.0
        if init_kind == "megatron" and name == "classifier.weight":
            factor = 0.5  # its standard deviation is already 1 / sqrt(hidden_size)
        factors.add(factor)
        torch.testing.assert_close(scaled[name], weight * factor, msg=name)
    assert factors == {0.25, 0.5, 1.0}


@pytest.mark.parametrize("init_kind", ["fan_in", "mitchell", "kaiming", "xavier"])
def test_kinds_that_follow_the_fan_in_are_already_scaled(init_kind: str) -> None:
    standard = build(BertBlocksForMaskedLM, init_kind=init_kind, mlp_type="moe").state_dict()
    scaled = build(BertBlocksForMaskedLM, init_kind=init_kind, mlp_type="moe", **MUP).state_dict()
    for name, weight in standard.items():
        torch.testing.assert_close(scaled[name], weight * (0.5 if "router" in name else 1.0), msg=name)


def test_scales_follow_their_formulas() -> None:
    model = build(BertBlocksForMaskedLM, **MUP, mup_output_multiplier=3.0, head_dim=8, decoder_bias=True).eval()
    attention = next(module for module in model.modules() if isinstance(module, Attention))
    assert attention.scale == pytest.approx(2**0.5 / 8)  # sqrt(base) / head_dim
    torch.nn.init.normal_(model.decoder.bias)
    ids = torch.tensor([[5, 6, 7, 8]])
    hidden = model.model(ids).last_hidden_state
    table = model.get_input_embeddings().weight
    expected = F.linear(model.head(hidden), table) * (3.0 * 8 / 32) + model.decoder.bias
    torch.testing.assert_close(model(ids).logits, expected)
    labels = torch.tensor([[-100, 9, -100, 3]])
    fused = model.train()(ids, labels=labels).loss
    torch.testing.assert_close(fused, F.cross_entropy(expected[0], labels[0]))


def test_attention_scale_per_layer_follows_the_layers_head_dim() -> None:
    model = build(BertBlocksForMaskedLM, **MUP, layer_overrides={1: {"head_dim": 16}})
    scales = [module.scale for module in model.modules() if isinstance(module, Attention)]
    assert scales == pytest.approx([2**0.5 / 8, 2**0.5 / 16, 2**0.5 / 8])


def test_configs_round_trip_and_follow(tmp_path: Any) -> None:
    config = tiny_config(**MUP, mup_output_multiplier=2.0)
    config.save_pretrained(tmp_path)
    loaded = BertBlocksConfig.from_pretrained(tmp_path)
    assert [loaded.mup_base_hidden_size, loaded.mup_base_head_dim, loaded.mup_output_multiplier] == [8, 2, 2.0]
    loaded.parametrization = "standard"
    assert "mup_base_hidden_size" not in loaded.to_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parametrization": "mup"}, "mup_base_hidden_size is None; .* requires the hidden_size"),
        ({"parametrization": "mupp"}, "did you mean 'mup'"),
        ({"mup_base_hidden_size": 8}, "belongs to parametrization 'mup', but parametrization is 'standard'"),
        ({**MUP, "mup_base_hidden_size": 0}, "at least 1"),
        ({**MUP, "mup_output_multiplier": 0.0}, "greater than 0"),
        ({**MUP, "ngpt": True}, "ngpt is True; parametrization 'mup' requires False"),
        ({**MUP, "embedding_size": 8}, "embedding_size is 8; .* requires hidden_size = 32"),
        ({**MUP, "mlm_head_size": 8}, "mlm_head_size is 8; parametrization 'mup' requires None"),
        (
            {**MUP, "qa_head": "question_aware", "question_token_id": 5},
            "qa_head is 'question_aware'; .* requires 'linear'",
        ),
    ],
)
def test_bad_configs_name_the_key(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**options)
