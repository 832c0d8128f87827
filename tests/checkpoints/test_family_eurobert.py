"""Tests of EuroBERT, UltraBERT, Nomic BERT and GTE that go beyond those of all families."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bertblocks import BertBlocksConfig, BertBlocksModel, ConfigError, from_huggingface, to_huggingface
from bertblocks.checkpoints.families import read_config
from tests.checkpoints.family_cases import FAMILY_CASES
from tests.helpers import pad_ids, ragged_ids


def make(class_name: str, family: str, *, base_options: dict | None = None, **options: Any) -> Any:
    """A tiny transformers model with random weights everywhere."""
    config = FAMILY_CASES[family].make_config(**options)
    model = getattr(transformers, class_name)(config, **(base_options or {}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def assert_same_output(ours: Any, theirs: Any, lengths: tuple[int, ...] = (20, 7)) -> None:
    ids, mask = pad_ids(ragged_ids(list(lengths), vocab_size=90))
    with torch.no_grad():
        actual, expected = ours(ids, mask)[0], theirs(ids, mask)[0]
    torch.testing.assert_close(actual[mask == 1], expected[mask == 1], atol=1e-5, rtol=1e-5)


def assert_same_state(actual: Any, expected: Any) -> None:
    assert set(actual.state_dict()) == set(expected.state_dict())
    for key, tensor in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[key], tensor), key


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("eurobert", {"classifier_pooling": "last"}, "classifier_pooling is 'last'"),
        ("eurobert", {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("eurobert", {"rope_parameters": {"rope_theta": 9.0, "rope_type": "proportional"}}, "rope_type must be one of"),
        ("ultrabert", {"rope_parameters": {"rope_theta": 9.0}}, "rope_parameters holds None"),
        ("ultrabert", {"layer_types": ["chunked_attention"] * 4}, "'chunked_attention'"),
        ("nomic_bert", {"activation_function": "gelu"}, "activation_function is 'gelu'.*'swiglu' only"),
        ("nomic_bert", {"moe_every_n_layers": 2}, "moe_every_n_layers is 2"),
        ("nomic_bert", {"prenorm": True}, "prenorm is True"),
        ("nomic_bert", {"qkv_proj_bias": True}, "qkv_proj_bias is True"),
        ("nomic_bert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction is 0.5"),
        ("nomic_bert", {"rotary_scaling_factor": 2}, "rotary_scaling_factor is 2"),
        ("gte", {"rope_scaling": {"type": "proportional", "factor": 8.0}}, "rope_type must be one of"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale is True"),
        ("gte", {"layer_norm_type": "rms_norm"}, "layer_norm_type is 'rms_norm'"),
        ("gte", {"position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
    ],
    ids=str,
)
def test_unsupported_config_values_raise_an_error_that_names_them(family: Any, options: Any, message: Any) -> None:
    values = {**FAMILY_CASES[family].make_config().to_dict(), **options}
    if "rope_scaling" in options:
        del values["rope_parameters"]
    with pytest.raises(ConfigError, match=message):
        read_config(values)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("eurobert", {"mask_token_id": None}, "mask_token_id is None"),
        ("eurobert", {"classifier_pooling": "max"}, "classifier_pooling is 'max'"),
        ("eurobert", {"decoder_bias": True}, "decoder_bias is True"),
        ("eurobert", {"mlp_dropout": 0.1}, "mlp_dropout is 0.1"),
        ("eurobert", {"local_attention": True}, "local_attention is True"),
        ("ultrabert", {"local_attention_window_size": 129}, "local_attention_window_size is 129.*has 128"),
        ("ultrabert", {"classifier_dropout": 0.3, "attention_output_dropout": 0.3}, "attention_output_dropout is 0.3"),
        ("nomic_bert", {"mlp_dropout": 0.1}, "mlp_dropout is 0.1"),
        ("nomic_bert", {"num_kv_heads": 2}, "num_kv_heads is 2"),
        ("gte", {"mlp_dropout": 0.0}, "mlp_dropout is 0.0; a gte checkpoint has 0.1"),
        ("gte", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
    ids=str,
)
def test_values_that_a_family_cannot_represent_raise_an_error_that_names_them(
    family: Any, options: Any, message: Any
) -> None:
    config = read_config(FAMILY_CASES[family].make_config())
    values = {**config.to_dict(), **options}
    if "local_attention" in options:
        del values["layer_types"]
    with torch.device("meta"):
        model = BertBlocksModel(BertBlocksConfig(**values))
    with pytest.raises(ConfigError, match=message):
        to_huggingface(model, family)


# ---------------------------------------------------------------------- dropout

DROPOUTS = (
    "embedding_dropout",
    "attention_dropout",
    "attention_output_dropout",
    "mlp_dropout",
    "mlp_output_dropout",
    "classifier_head_dropout",
    "classifier_dropout",
)


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("eurobert", {"attention_dropout": 0.2}, (0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0)),
        ("ultrabert", {"attention_dropout": 0.2, "classifier_dropout": 0.3}, (0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.3)),
        ("nomic_bert", {"hidden_dropout_prob": 0.2}, (0.2, 0.0, 0.2, 0.0, 0.2, 0.0, 0.2)),
        ("gte", {"hidden_dropout_prob": 0.2, "classifier_dropout": 0.0}, (0.2, 0.0, 0.2, 0.2, 0.2, 0.0, 0.0)),
    ],
)
def test_dropout_is_where_transformers_has_it(family: Any, options: Any, expected: Any) -> None:
    config = read_config(FAMILY_CASES[family].make_config(**options))
    assert tuple(getattr(config, key) for key in DROPOUTS) == expected


# ---------------------------------------------------------------------- RoPE


@pytest.mark.parametrize(
    ("class_name", "family"), [("EuroBertModel", "eurobert"), ("NomicBertModel", "nomic_bert"), ("GteModel", "gte")]
)
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_rope_scaling_equals_transformers(class_name: Any, family: Any, scaling: Any) -> None:
    options = {"max_position_embeddings": 128, "rope_parameters": {"rope_theta": 1000.0, **scaling}}
    theirs = make(class_name, family, **options)
    ours = from_huggingface(theirs)
    assert ours.config.rope_scaling == scaling
    again = to_huggingface(ours)
    assert again.config.rope_parameters == theirs.config.rope_parameters
    for length in (20, 300):
        assert_same_output(ours, theirs, (length,))


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_ultrabert_with_one_kind_of_layers_needs_one_theta(kind: Any) -> None:
    options = {"layer_types": [kind] * 4, "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 77.0}}}
    theirs = make("UltrabertModel", "ultrabert", **options)
    ours = from_huggingface(theirs)
    assert ours.config.rope_theta == ours.config.local_rope_theta == 77.0
    assert_same_output(ours, theirs, (150, 33))
    assert_same_output(to_huggingface(ours, "ultrabert"), theirs, (150, 33))


# ---------------------------------------------------------------------- heads


def test_the_published_ultrabert_checkpoint_is_read(tmp_path: Path) -> None:
    """It has another prefix and a separate decoder."""
    theirs = make("UltrabertForMaskedLM", "ultrabert")
    tensors = {}
    for key, tensor in theirs.state_dict().items():
        old = "ultrabert." + key[len("model.") :] if key.startswith("model.") else key.replace("head.decoder.", "cls.")
        tensors[old] = tensor.clone()
    save_file(tensors, tmp_path / "model.safetensors")
    config = {**theirs.config.to_dict(), "architectures": ["UltrabertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same_output(from_huggingface(tmp_path), theirs)
    assert_same_output(from_huggingface(tmp_path, task="base"), theirs.model)


@pytest.mark.parametrize(("class_name", "family"), [("NomicBertModel", "nomic_bert"), ("GteModel", "gte")])
def test_a_pooler_is_kept_if_there_is_one(class_name: Any, family: Any) -> None:
    theirs = make(class_name, family, base_options={"add_pooling_layer": True})
    ours = from_huggingface(theirs)
    ids, mask = pad_ids(ragged_ids([20, 7], vocab_size=90))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids, mask).pooler_output, theirs(ids, mask).pooler_output, atol=1e-5, rtol=1e-5)
    assert_same_state(to_huggingface(ours), theirs)


def test_nomic_bert_without_tied_embeddings() -> None:
    theirs = make("NomicBertForMaskedLM", "nomic_bert", tie_word_embeddings=False)
    ours = from_huggingface(theirs)
    assert ours.config.tie_word_embeddings is False
    assert_same_output(ours, theirs)
    again = to_huggingface(ours)
    assert again.config.tie_word_embeddings is False
    assert_same_output(again, theirs)


# ---------------------------------------------------------------------- published files

NOMIC_ON_THE_HUB = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertForPreTraining"],
    "activation_function": "swiglu",
    "attn_pdrop": 0.0,
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 40,
    "n_layer": 4,
    "n_positions": 8192,
    "prenorm": False,
    "qkv_proj_bias": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 300,
    "rotary_emb_fraction": 1.0,
    "rotary_scaling_factor": None,
    "tie_word_embeddings": True,
    "type_vocab_size": 2,
    "vocab_size": 90,
}


def test_nomic_bert_with_its_original_keys_and_names(tmp_path: Path) -> None:
    theirs = make("NomicBertForMaskedLM", "nomic_bert", rope_parameters={"rope_theta": 300.0})
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "nomic_bert.encoder.layers.0.attn.Wqkv.weight" in tensors
    renamed = {key.replace("nomic_bert.", "bert."): tensor for key, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(NOMIC_ON_THE_HUB))
    ours = from_huggingface(tmp_path)
    assert (ours.config.hidden_size, ours.config.head_dim, ours.config.max_position_embeddings) == (32, 8, 8192)
    assert_same_output(ours, theirs)
    assert_same_state(to_huggingface(ours), theirs)


def test_gte_with_its_original_name_and_stacked_matrices(tmp_path: Path) -> None:
    theirs = make("GteForMaskedLM", "gte")
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "gte.encoder.layer.0.mlp.up_gate_proj.weight" in tensors
    save_file({key.replace("gte.", "new."): tensor for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert_same_output(from_huggingface(tmp_path), theirs)
