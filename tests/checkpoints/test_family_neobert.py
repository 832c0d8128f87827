"""NeoBERT's folders and training files: golden checkpoints in both directions, and errors."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from bertblocks import (
    BertBlocksConfig,
    BertBlocksForMaskedLM,
    BertBlocksForSequenceClassification,
    BertBlocksForTokenClassification,
    BertBlocksModel,
    ConfigError,
    from_huggingface,
    to_huggingface,
)
from bertblocks.checkpoints.families import read_config
from bertblocks.checkpoints.families.family import RUNTIME_KEYS
from bertblocks.checkpoints.families.neobert import NEOBERT, read_yaml_config
from bertblocks.checkpoints.save import save_huggingface
from bertblocks.config.validation import own_keys
from tests.helpers import expect_log, pad_ids, ragged_ids

FOLDER = Path(__file__).parents[1] / "golden"
FORK, LEARNED, NGPT, OFFICIAL = NAMES = [
    "neobert-rope_rms_swiglu",
    "neobert-learned_layer_gelu",
    "neobert-ngpt",
    "neobert-official_layout",
]
#: config.json as published.
HUB = {
    "architectures": ["NeoBERTLMHead"],
    "auto_map": {"AutoConfig": "model.NeoBERTConfig", "AutoModelForMaskedLM": "model.NeoBERTLMHead"},
    "classifier_init_range": 0.02,
    "decoder_init_range": 0.02,
    "dim_head": 64,
    "embedding_init_range": 0.02,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "kwargs": {"classifier_init_range": 0.02, "trust_remote_code": True},
    "max_length": 4096,
    "model_type": "neobert",
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "pad_token_id": 0,
    "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
    "torch_dtype": "float32",
    "transformers_version": "4.48.2",
    "trust_remote_code": True,
    "vocab_size": 30522,
}
SMALL = {
    "model_type": "neobert",
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_length": 40,
}
FORK_KEYS = {"rope": True, "rms_norm": True, "hidden_act": "swiglu", "ngpt": False}


def copy_golden(name: str, folder: Path, change: Any = None, **values: Any) -> Path:
    """A golden folder with other config values and `change`d tensors."""
    config = json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(FOLDER / name / "model.safetensors")
    if change is not None:
        tensors = change(tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **values}), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def compared(config: BertBlocksConfig) -> dict:
    return {key: getattr(config, key) for key in own_keys(BertBlocksConfig) if key not in RUNTIME_KEYS}


# ---------------------------------------------------------------------- the golden folders


def run(model: Any, layout: str, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of the real tokens, in order."""
    lengths, flat = mask.sum(1), ids[mask]
    if layout == "cu_seqlens":
        ends = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
        out = model(flat, cu_seqlens=ends, output_hidden_states=True)
        return out.hidden_states[-1], out.logits
    if layout == "packed_seqlens":
        row = torch.cat((flat, torch.zeros(5, dtype=torch.long)))[None]
        out = model(row, packed_seqlens=lengths[None], output_hidden_states=True)
        return out.hidden_states[-1][0, : len(flat)], out.logits[0, : len(flat)]
    model.config.unpad = layout == "ragged"
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    return out.hidden_states[-1][mask], out.logits[mask]


@pytest.mark.parametrize("layout", ["padded", "ragged", "cu_seqlens", "packed_seqlens"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_golden_checkpoints_give_the_outputs_of_the_reference(name: Any, layout: Any) -> None:
    model = from_huggingface(FOLDER / name)
    assert type(model) is BertBlocksForMaskedLM
    reference = load_file(FOLDER / name / "reference.safetensors")
    ids, mask = reference["input_ids"], reference["attention_mask"].bool()
    hidden, logits = run(model, layout, ids, mask)
    torch.testing.assert_close(hidden, reference["last_hidden_state"][mask], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, reference["logits"][mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_golden_checkpoints_are_written_back_unchanged(tmp_path: Path, name: Any) -> None:
    model = from_huggingface(FOLDER / name)
    save_huggingface(model, tmp_path)
    expected, actual = load_file(FOLDER / name / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert set(actual) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(actual[key], tensor), key
    before = json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))
    after = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert after["architectures"] == ["NeoBERTLMHead"]
    # equal where it matters: no golden model is tied, and several widths round up to the same SwiGLU width
    before.update(tie_word_embeddings=False)
    if name == OFFICIAL:
        before.update(intermediate_size=108)
        assert not set(FORK_KEYS) & set(after)
    assert {key: after[key] for key in before} == before
    again = from_huggingface(tmp_path)
    assert compared(again.config) == compared(model.config)
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", NAMES)
def test_the_encoder_is_read_and_written_without_its_head(tmp_path: Path, name: Any) -> None:
    model = from_huggingface(FOLDER / name, task="base")
    assert type(model) is BertBlocksModel
    save_huggingface(model, tmp_path, "neobert")
    tensors = load_file(tmp_path / "model.safetensors")
    assert "encoder.weight" in tensors
    assert not any(key.startswith(("model.", "decoder.")) for key in tensors)
    again = from_huggingface(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).last_hidden_state, model(ids).last_hidden_state, atol=0, rtol=0)
    # and without a class in its config, by the names of its tensors
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(from_huggingface(tmp_path)) is BertBlocksModel


# ---------------------------------------------------------------------- tied or not, bias or not


@pytest.mark.parametrize("has_copy", [True, False])
def test_equal_matrices_are_read_as_tied(tmp_path: Path, has_copy: Any) -> None:
    def tie(tensors: Any) -> Any:
        tensors["decoder.weight"] = tensors["model.encoder.weight"].clone()
        return tensors if has_copy else {key: x for key, x in tensors.items() if key != "decoder.weight"}

    model = from_huggingface(copy_golden(FORK, tmp_path, tie))
    assert type(model) is BertBlocksForMaskedLM
    assert model.config.tie_word_embeddings
    assert not model.config.decoder_bias
    assert model.decoder.weight is model.model.embedding.token.weight
    save_huggingface(model, tmp_path / "out")
    again = from_huggingface(tmp_path / "out")
    assert again.config.tie_word_embeddings
    assert torch.equal(again.decoder.weight, model.decoder.weight)


@pytest.mark.parametrize(("flag", "name"), [(True, FORK), (False, FORK), (True, NGPT), (True, OFFICIAL)])
def test_different_matrices_are_not_tied_whatever_the_config_says(tmp_path: Path, flag: Any, name: Any) -> None:
    model = from_huggingface(copy_golden(name, tmp_path, tie_word_embeddings=flag))
    assert not model.config.tie_word_embeddings
    assert not torch.equal(model.decoder.weight, model.model.embedding.token.weight)


def test_an_ngpt_encoder_becomes_a_masked_lm_with_a_new_decoder(tmp_path: Path) -> None:
    def drop_decoder(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in tensors.items() if not name.startswith("decoder.")}

    folder = copy_golden(NGPT, tmp_path / "base", drop_decoder)
    model = from_huggingface(folder, task="masked-lm")
    assert isinstance(model, BertBlocksForMaskedLM)
    assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
    encoder = from_huggingface(FOLDER / NGPT).model.state_dict()
    assert all(torch.equal(tensor, encoder[name]) for name, tensor in model.model.state_dict().items())


def test_ngpt_with_equal_matrices_is_not_tied(tmp_path: Path) -> None:
    def tie(tensors: Any) -> Any:
        return {**tensors, "decoder.weight": tensors["model.encoder.weight"].clone()}

    assert not from_huggingface(copy_golden(NGPT, tmp_path, tie)).config.tie_word_embeddings


def test_separate_w1_and_w2_with_a_decoder_bias_are_read_too(tmp_path: Path) -> None:
    """Models that the fork exports have this form."""

    def split(tensors: Any) -> Any:
        for key in [key for key in tensors if "w12" in key]:
            first, second = tensors.pop(key).chunk(2)
            tensors[key.replace("w12", "w1")], tensors[key.replace("w12", "w2")] = first.clone(), second.clone()
        return tensors

    expected, actual = from_huggingface(FOLDER / OFFICIAL), from_huggingface(copy_golden(OFFICIAL, tmp_path, split))
    for key, tensor in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[key], tensor), key


def test_unused_tensors_are_ignored(tmp_path: Path) -> None:
    def add(tensors: Any) -> Any:
        extra = {"model.sz": torch.ones(97), "model.layer_norm.weight": torch.ones(32)}
        return {**tensors, **extra}

    from_huggingface(copy_golden(NGPT, tmp_path, add))


# ---------------------------------------------------------------------- classifiers


def plain_head(tensors: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """[CLS] -> dense -> tanh -> linear."""
    linear = torch.nn.functional.linear
    x = torch.tanh(linear(hidden[:, 0], tensors["dense.weight"], tensors["dense.bias"]))
    return linear(x, tensors["classifier.weight"], tensors["classifier.bias"])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_neobert_sequence_classifier_equals_its_formula(tmp_path: Path, name: Any) -> None:
    size = 48 if name == OFFICIAL else 32
    head = {
        "dense.weight": torch.randn(size, size),
        "dense.bias": torch.randn(size),
        "classifier.weight": torch.randn(3, size),
        "classifier.bias": torch.randn(3),
    }

    def replace_head(tensors: Any) -> Any:
        return {**{key: x for key, x in tensors.items() if not key.startswith("decoder.")}, **head}

    labels = {"id2label": {"0": "no", "1": "yes", "2": "perhaps"}, "label2id": {"no": 0, "yes": 1, "perhaps": 2}}
    folder = copy_golden(name, tmp_path, replace_head, classifier_dropout=0.25, **labels)
    model = from_huggingface(folder)
    assert type(model) is BertBlocksForSequenceClassification
    assert model.dropout.p == model.classifier_head.dropout.p == 0.25
    assert model.config.id2label[2] == "perhaps"
    reference = load_file(FOLDER / name / "reference.safetensors")
    ids, mask = reference["input_ids"], reference["attention_mask"]
    expected = plain_head(head, reference["last_hidden_state"])
    torch.testing.assert_close(model(ids, mask).logits, expected, atol=1e-4, rtol=1e-5)
    save_huggingface(model, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for key, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(written[key], tensor), key
    again = from_huggingface(tmp_path / "out")
    assert again.config.id2label == model.config.id2label
    assert compared(again.config) == compared(model.config)


def test_a_classifier_from_a_masked_lm_gets_a_new_head() -> None:
    with expect_log("has no classifier, classifier_head: newly initialized"):
        model = from_huggingface(FOLDER / OFFICIAL, task="sequence-classification")
    assert torch.isfinite(model(torch.tensor([[5, 6]])).logits).all()


def test_dropout_is_where_the_fork_has_it() -> None:
    config = read_config({**SMALL, **FORK_KEYS, "dropout": 0.2})
    assert config.attention_dropout == config.attention_output_dropout == config.mlp_output_dropout == 0.2
    assert config.embedding_dropout == config.mlp_dropout == 0.0
    assert read_config({**SMALL, **FORK_KEYS, "dropout_prob": 0.2}).attention_dropout == 0.2


# ---------------------------------------------------------------------- configs


def test_the_published_config_equals_the_preset() -> None:
    preset = BertBlocksConfig.from_preset("neobert")
    assert compared(read_config(HUB)) == compared(preset)
    written = NEOBERT.write_config(preset).to_dict()
    for key in ("hidden_size", "intermediate_size", "max_length", "norm_eps", "num_hidden_layers", "vocab_size"):
        assert written[key] == HUB[key], key
    assert not set(FORK_KEYS) & set(written)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"tie_word_embeddings": True},
        {"decoder_bias": False},
        {"dropout": 0.1},
        FORK_KEYS,
        {**FORK_KEYS, "rope": False, "pad_token_id": 7},
        {**FORK_KEYS, "hidden_act": "GELU", "rms_norm": False, "dropout": 0.1},
        {**FORK_KEYS, "ngpt": True, "hidden_act": "gelu"},
        {**FORK_KEYS, "attn_backend": "flash_attn_varlen", "kernel_backend": "torch"},
        {"problem_type": "regression", "num_labels": 1, "eos_token_id": 3},
    ],
    ids=str,
)
def test_a_config_survives_the_round_trip(values: Any) -> None:
    config = read_config({**SMALL, **values})
    written = NEOBERT.write_config(config)
    again = read_config(json.loads(written.to_json_string()))
    assert compared(again) == compared(config)
    for key in ("attention_backend", "kernel_backend", "initializer_range", "num_labels", "problem_type"):
        assert getattr(again, key) == getattr(config, key), key


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; it must be one of swiglu, gelu"),
        ({"attn_backend": "sdap"}, r"attn_backend is 'sdap'.*did you mean 'sdpa'"),
        ({"kernel_backend": "triton"}, "kernel_backend is 'triton'"),
        ({"ngpt": True, "base_scale": 0.25}, r"base_scale is 0\.25; nGPT in BertBlocks supports 0\.032"),
        ({"rms_nrom": False}, r"'rms_nrom' is not a key of a neobert config .*did you mean 'rms_norm'"),
        ({"embedding_rms_norm": True}, "'embedding_rms_norm' is not a key of a neobert config"),
        ({"rope_theta": 500.0}, "'rope_theta' is not a key of a neobert config"),
        (
            {"max_position_embeddings": 80},
            "max_length is 40, and 'max_position_embeddings', its other name, is 80",
        ),
        ({"hidden_size": "32"}, "hidden_size is '32'; it must be of type int"),
        ({"pad_token_id": 60}, "pad_token_id is 60; it must lie within the vocabulary"),
    ],
)
def test_unsupported_config_values_raise_an_error_that_names_them(values: Any, message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config({**SMALL, **values})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"intermediate_size": 100}, "intermediate_size is 100; a neobert checkpoint has 104"),
        ({"norm_bias": True}, "norm_bias is True"),
        ({"rope_theta": 5.0}, "rope_theta is 5.0"),
        ({"rope_interleaved": False}, "rope_interleaved is False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; a neobert checkpoint has 'silu'"),
        ({"num_kv_heads": 4}, "num_kv_heads is 4"),
        ({"mlp_output_dropout": 0.1}, "mlp_output_dropout is 0.1"),
        ({"classifier_head_dropout": 0.3}, "classifier_head_dropout is 0.3"),
    ],
)
def test_values_that_neobert_cannot_represent_raise_an_error_that_names_them(options: Any, message: Any) -> None:
    config = BertBlocksConfig.from_preset("neobert", num_hidden_layers=1, **options)
    with pytest.raises(ConfigError, match=message):
        NEOBERT.write_config(config)


def test_values_that_its_ngpt_cannot_represent_raise_an_error_that_names_them() -> None:
    config = from_huggingface(FOLDER / NGPT).config
    config.ngpt_logit_scale = True
    with pytest.raises(ConfigError, match="ngpt_logit_scale is True"):
        NEOBERT.write_config(config)


def test_to_huggingface_and_unknown_tasks_raise_for_neobert(tmp_path: Path) -> None:
    model = from_huggingface(FOLDER / FORK)
    for family in ("neobert", None):
        with pytest.raises(ConfigError, match="transformers has no neobert models; save_huggingface writes"):
            to_huggingface(model, family)
    with pytest.raises(ValueError, match="task is 'token-classification'; it must be one of base, masked-lm"):
        from_huggingface(FOLDER / FORK, task="token-classification")
    tagger = BertBlocksForTokenClassification(model.config)
    with pytest.raises(ConfigError, match="BertBlocksForTokenClassification has no class in the neobert family"):
        save_huggingface(tagger, tmp_path, "neobert")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- a model of NeoBERT's own code


class OwnConfig(PreTrainedConfig):
    """A config as the hub's code writes it, with its own keys and none of the fork's."""

    model_type = "neobert"
    hidden_size: int = 48
    num_hidden_layers: int = 2
    num_attention_heads: int = 3
    dim_head: int = 16
    intermediate_size: int = 100
    vocab_size: int = 89
    max_length: int = 40
    norm_eps: float = 1e-6
    pad_token_id: int = 0


class NeoBERTLMHead(PreTrainedModel):
    """Nothing but the tensors of the official golden file under their names."""

    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        for name, tensor in load_file(FOLDER / OFFICIAL / "model.safetensors").items():
            parent: torch.nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, torch.nn.Module())
                parent = parent.get_submodule(part)
            parent.register_parameter(last, torch.nn.Parameter(tensor))


def test_a_model_object_of_neoberts_own_code_is_read_like_its_folder() -> None:
    theirs = NeoBERTLMHead(OwnConfig())
    expected, actual = from_huggingface(FOLDER / OFFICIAL), from_huggingface(theirs)
    assert compared(actual.config) == compared(expected.config)
    assert compared(read_config(theirs.config)) == compared(expected.config)
    for key, tensor in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[key], tensor), key


# ---------------------------------------------------------------------- bad folders


def without(key: Any) -> Any:
    return lambda tensors: {name: x for name, x in tensors.items() if name != key}


@pytest.mark.parametrize(
    ("name", "change", "values", "message"),
    [
        (
            FORK,
            without("model.transformer_encoder.1.ffn.w2.weight"),
            {},
            r"lacks 'transformer_encoder.1.ffn.w2.weight'",
        ),
        (OFFICIAL, without("model.transformer_encoder.0.ffn.w12.weight"), {}, r"lacks 'transformer_encoder.0.ffn.w12"),
        (LEARNED, without("model.transformer_encoder.0.ffn.0.weight"), {}, r"lacks 'transformer_encoder.0.ffn.0.w"),
        (NGPT, without("model.transformer_encoder.2.suv"), {}, r"lacks 'transformer_encoder.2.suv'"),
        (NGPT, without("model.transformer_encoder.2.c_fc.weight"), {}, r"lacks 'transformer_encoder.2.c_fc.weight'"),
        (LEARNED, without("model.positional_embedding.weight"), {}, r"lacks 'positional_embedding.weight'"),
        (LEARNED, None, {"max_length": 63}, r"position.table.weight has shape \[65, 32\].*\[64, 32\]"),
        (LEARNED, None, {"rope": True}, r"'positional_embedding.weight' has no place"),
        (
            LEARNED,
            None,
            {"hidden_act": "swiglu"},
            r"mlp.up.weight has shape \[48, 32\]; its config asks for \[64,",
        ),
        (LEARNED, None, {"rms_norm": True}, r"'transformer_encoder.0.attention_norm.bias' has no place"),
        (FORK, None, {"rms_norm": False}, r"lacks 'transformer_encoder.0.attention_norm.bias'"),
        (FORK, None, {"intermediate_size": 60}, r"mlp.up.weight has shape \[64, 32\]; its config asks for \[80, 32\]"),
        (FORK, None, {"num_hidden_layers": 2}, r"'transformer_encoder.2.attention_norm.weight' has no place"),
        (NGPT, None, {"ngpt": False}, r"mlp.up.weight has shape \[96, 32\]; its config asks for \[64, 32\]"),
        (FORK, None, {"ngpt": True}, r"mlp.up.weight has shape \[64, 32\]; its config asks for \[96, 32\]"),
        (FORK, None, {"architectures": ["NeoBERTForMTEB"]}, r"The architecture is 'NeoBERTForMTEB'"),
    ],
)
def test_bad_folders_raise_one_clear_error(tmp_path: Path, name: Any, change: Any, values: Any, message: Any) -> None:
    with pytest.raises(ValueError, match=message):
        from_huggingface(copy_golden(name, tmp_path, change, **values))


def test_a_tensor_of_the_wrong_shape_raises_an_error_that_names_it(tmp_path: Path) -> None:
    def cut(tensors: Any) -> Any:
        key = "model.transformer_encoder.0.qkv.weight"
        return {**tensors, key: tensors[key][:-1].clone()}

    with pytest.raises(ValueError, match=r"attention.qkv.weight has shape \[95, 32\]; its config asks for \[96, 32\]"):
        from_huggingface(copy_golden(FORK, tmp_path, cut))


# ---------------------------------------------------------------------- other families are saved the same way


def test_a_written_transformers_folder_loads_in_transformers(tmp_path: Path) -> None:
    import transformers

    config = BertBlocksConfig(
        vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40
    )
    model = BertBlocksForMaskedLM(config).eval()
    save_huggingface(model, tmp_path, "bert")
    loaded: Any = transformers.BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    theirs, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids, mask = pad_ids(ragged_ids([9, 4]))
    with torch.no_grad():
        torch.testing.assert_close(model(ids, mask).logits[mask == 1], theirs(ids, mask).logits[mask == 1])


# ---------------------------------------------------------------------- the fork's YAML

DOCUMENTED = """
model:
  hidden_size: 768
  num_hidden_layers: 12
  num_attention_heads: 12
  intermediate_size: 3072
  max_position_embeddings: 4096
  hidden_act: swiglu
  rope: true
  rms_norm: true
  attn_backend: sdpa           # or flash_attn_varlen
  kernel_backend: auto         # auto | liger | torch
  ngpt: false
trainer:
  max_steps: 10
"""


def write_yaml(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_documented_yaml_file_is_read(tmp_path: Path) -> None:
    config = read_yaml_config(write_yaml(tmp_path, DOCUMENTED))
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (768, 12, 12)
    assert (config.mlp_type, config.hidden_act, config.intermediate_size) == ("glu", "silu", 2048)
    assert (config.block_pos_enc_kind, config.rope_interleaved, config.max_position_embeddings) == ("rope", True, 4096)
    assert (config.norm_fn, config.norm_pos, config.embedding_norm, config.final_norm) == ("rms", "pre", False, True)
    assert (config.attention_backend, config.kernel_backend) == ("sdpa", "auto")
    # the fork's masked-LM head
    assert config.tie_word_embeddings
    assert not config.decoder_bias
    assert not config.mlm_head_dense


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"rope": False}, {"embd_pos_enc_kind": "learned", "position_offset": 1, "max_position_embeddings": 513}),
        ({"rms_norm": False}, {"norm_fn": "layer", "norm_bias": True, "norm_eps": 1e-5}),
        ({"hidden_act": "gelu"}, {"mlp_type": "mlp", "hidden_act": "gelu", "intermediate_size": 3072}),
        ({"ngpt": True}, {"ngpt": True, "norm_pos": "none", "tie_word_embeddings": False, "intermediate_size": 3072}),
        ({"attn_backend": "flash_attn_varlen"}, {"attention_backend": "flash"}),
        ({"kernel_backend": "liger"}, {"kernel_backend": "liger"}),
        ({"dropout_prob": 0.1}, {"attention_dropout": 0.1, "mlp_output_dropout": 0.1, "embedding_dropout": 0.0}),
    ],
    ids=str,
)
def test_every_key_of_the_yaml_file_is_read(tmp_path: Path, values: Any, expected: Any) -> None:
    config = read_yaml_config(write_yaml(tmp_path, yaml.safe_dump({"model": values})))
    assert {key: getattr(config, key) for key in expected} == expected


def test_a_yaml_model_can_be_built_and_run(tmp_path: Path) -> None:
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    for options in ({}, {"rope": False, "rms_norm": False, "hidden_act": "gelu"}, {"ngpt": True}):
        text = yaml.safe_dump({"model": {**sizes, "intermediate_size": 48, **options}})
        model = BertBlocksForMaskedLM(read_yaml_config(write_yaml(tmp_path, text)))
        assert torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all()


def test_numbers_that_yaml_reads_as_text_are_converted(tmp_path: Path) -> None:
    text = "model:\n  norm_eps: 1e-6\n  decoder_init_range: 2E-2\n"
    assert yaml.safe_load(text)["model"]["norm_eps"] == "1e-6"
    config = read_yaml_config(write_yaml(tmp_path, text))
    assert math.isclose(config.norm_eps, 1e-6)
    assert math.isclose(config.initializer_range, 0.02)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  hiden_size: 32\n", r"run.yaml: 'hiden_size' is not a key .*did you mean 'hidden_size'"),
        ("model:\n  kernel_backnd: torch\n", r"'kernel_backnd' .*did you mean 'kernel_backend'"),
        ("model:\n  max_positions_embedding: 9\n", r"did you mean 'max_position_embeddings'"),
        ("model:\n  on: true\n", r"True is not a key of a neobert config"),
        ("model:\n  hidden_size: 1e2\n", r"run.yaml: hidden_size is 100.0; it must be of type int"),
        ("model:\n  rope: sometimes\n", r"rope is 'sometimes'; it must be of type bool"),
        ("model:\n  hidden_size: 50\n", r"run.yaml: num_attention_heads is 12; it must divide"),
        ("modle:\n  hidden_size: 32\n", r"run.yaml has no section 'model' .*did you mean 'model'"),
        ("model: neobert\n", r"run.yaml has no section 'model' with the keys"),
        ("", r"has no section 'model'"),
        ("model: [", r"run.yaml is not valid YAML"),
        ("model: !!python/object/apply:os.getcwd []\n", r"run.yaml is not valid YAML"),
    ],
)
def test_bad_yaml_raises_one_clear_error(tmp_path: Path, text: Any, message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        read_yaml_config(write_yaml(tmp_path, text))
