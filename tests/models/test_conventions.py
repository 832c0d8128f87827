"""Conventions of transformers that its tools rely on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel

import bertblocks
from bertblocks import (
    BertBlocksConfig,
    BertBlocksForMaskedLM,
    BertBlocksForSequenceClassification,
    BertBlocksModel,
    ConfigError,
)
from bertblocks.models import TASK_MODELS
from tests.helpers import pad_ids, ragged_ids, tiny_config

# ---------------------------------------------------------------------- attention implementations


@pytest.mark.parametrize("task", list(TASK_MODELS))
def test_sdpa_and_eager_give_the_same_outputs(task: Any, tmp_path: Path) -> None:
    """Follows transformers' own test and the names it looks for."""
    model_class = TASK_MODELS[task]
    assert model_class._supports_sdpa
    model_class(tiny_config(mask_token_id=3)).save_pretrained(tmp_path)
    ids, mask = pad_ids(ragged_ids([9, 4]))
    outputs = {}
    for name in ("sdpa", "eager"):
        model = model_class.from_pretrained(tmp_path, attn_implementation=name).eval()
        assert model.config._attn_implementation == model.config.attention_backend == name
        outputs[name] = model(ids, attention_mask=mask)[0]
    torch.testing.assert_close(outputs["sdpa"], outputs["eager"], atol=1e-5, rtol=1e-4)


def test_the_default_backend_is_reported_as_sdpa_and_survives_saving(tmp_path: Path) -> None:
    model = BertBlocksModel(tiny_config())
    assert model.config.attention_backend == "auto"
    assert model.config._attn_implementation == BertModel(BertConfig(num_hidden_layers=1)).config._attn_implementation
    model.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).config.attention_backend == "auto"


def test_an_unknown_implementation_raises_in_transformers_words_and_changes_nothing() -> None:
    models = BertModel(BertConfig(num_hidden_layers=1)), BertBlocksModel(tiny_config())
    for model in models:
        with pytest.raises(ValueError, match=r'^Specified `attn_implementation="foo"` is not supported'):
            model.set_attn_implementation("foo")
    assert models[1].config.attention_backend == "auto"


def test_transformers_option_decides_where_the_backend_is_left_open() -> None:
    values = tiny_config().to_dict()
    assert values["attention_backend"] == "auto"
    assert BertBlocksConfig(**values, attn_implementation="eager").attention_backend == "eager"
    with pytest.raises(ConfigError, match="both are given"):
        BertBlocksConfig(**{**values, "attention_backend": "sdpa"}, attn_implementation="eager")


# ---------------------------------------------------------------------- poolers


@pytest.mark.parametrize("add_pooling_layer", [True, False])
def test_add_pooling_layer_works_as_in_transformers(tmp_path: Path, add_pooling_layer: Any) -> None:
    config = BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40)
    for name, auto_config in (("theirs", config), ("ours", tiny_config())):
        AutoModel.from_config(auto_config).save_pretrained(tmp_path / name)
        model = AutoModel.from_pretrained(tmp_path / name, add_pooling_layer=add_pooling_layer)
        assert (model(torch.tensor([[5, 6]])).pooler_output is not None) == add_pooling_layer


# ---------------------------------------------------------------------- notes on a config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("return_loss", True),
        ("gradient_checkpointing", True),
        ("first_k_dense_replace", 2),
        ("rms_norm_eps", 1.0),
        ("num_dense_layers", 1),
    ],
)
def test_tools_may_set_extra_attributes_on_a_config(key: Any, value: Any, tmp_path: Path) -> None:
    model = BertBlocksForSequenceClassification(tiny_config())
    setattr(model.config, key, value)
    assert getattr(model.config, key) == value
    model.save_pretrained(tmp_path)
    assert key not in json.loads((tmp_path / "config.json").read_text())
    BertBlocksForSequenceClassification.from_pretrained(tmp_path)


def test_unknown_keys_from_users_still_raise() -> None:
    config = tiny_config()
    with pytest.raises(ConfigError, match=r"'norm_fnn'.*did you mean 'norm_fn'"):
        config.norm_fnn = "rms"
    with pytest.raises(ConfigError, match="'return_loss'"):
        BertBlocksConfig(return_loss=True)


def test_a_state_dict_without_a_checkpoint_may_be_incomplete() -> None:
    """transformers initializes the rest, as `_init_weights` says."""
    model, info = BertBlocksModel.from_pretrained(None, config=tiny_config(), state_dict={}, output_loading_info=True)
    assert info["missing_keys"] == set(model.state_dict())
    assert model(torch.tensor([[5, 6]])).last_hidden_state.isfinite().all()


# ---------------------------------------------------------------------- PEFT


@pytest.mark.parametrize("options", [{}, {"mlp_type": "glu", "norm_pos": "pre"}, {"ngpt": True}])
def test_lora_adapts_all_matrices_of_the_layers_by_default(options: Any) -> None:
    peft = pytest.importorskip("peft")
    base = BertBlocksForSequenceClassification(tiny_config(**options))
    matrices = [name for name, part in base.named_modules() if "layers" in name and isinstance(part, torch.nn.Linear)]
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", r=2))
    adapted = [name for name, part in model.base_model.model.named_modules() if hasattr(part, "lora_A")]
    assert adapted == matrices
    assert model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([1])).loss.isfinite()


@pytest.mark.parametrize("method", ["IA3Config", "LoHaConfig", "VeraConfig"])
def test_other_peft_methods_have_defaults(method: Any) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(BertBlocksModel(tiny_config()), getattr(peft, method)())
    loss = model(input_ids=torch.tensor([[5, 6]])).last_hidden_state.square().sum()
    loss.backward()
    assert any(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["import peft, bertblocks", "import bertblocks, peft"])
def test_peft_defaults_do_not_depend_on_the_order_of_imports(imports: Any) -> None:
    pytest.importorskip("peft")
    table = "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"
    check = f"from peft.utils.constants import {table} as table; print(table['bertblocks'])"
    result = subprocess.run([sys.executable, "-c", f"{imports}\n{check}"], capture_output=True, text=True, check=True)
    assert result.stdout == "['qkv', 'out', 'up', 'down']\n"


# ---------------------------------------------------------------------- token types


@pytest.mark.parametrize("unpad", [True, False])
def test_a_model_without_token_types_ignores_them(unpad: Any) -> None:
    """A BERT tokenizer returns token types for pairs, and pipelines pass them on."""
    model = BertBlocksModel(tiny_config(type_vocab_size=0, unpad=unpad)).eval()
    ids, mask = pad_ids(ragged_ids([6, 3]))
    expected = model(ids, attention_mask=mask).last_hidden_state
    for types in (torch.zeros_like(ids), torch.ones_like(ids)):
        assert torch.equal(model(ids, attention_mask=mask, token_type_ids=types).last_hidden_state, expected)


def test_pairs_of_a_bert_tokenizer_work_in_pipelines_and_cross_encoders(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from transformers import BertTokenizer, pipeline

    model = BertBlocksForSequenceClassification(tiny_config(type_vocab_size=0, num_labels=1)).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    tokenizer.save_pretrained(tmp_path)
    batch = tokenizer("a", "b a", return_tensors="pt")
    assert batch.pop("token_type_ids").any()
    expected = model(**batch).logits.item()
    classify = pipeline("text-classification", model=str(tmp_path), function_to_apply="none")
    assert classify({"text": "a", "text_pair": "b a"})["score"] == pytest.approx(expected, abs=1e-5)
    encoder = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu", activation_fn=torch.nn.Identity())
    assert encoder.predict([("a", "b a")]).item() == pytest.approx(expected, abs=1e-5)


# ---------------------------------------------------------------------- foreign configs and heads


def test_a_config_of_another_family_without_model_type_raises(tmp_path: Path) -> None:
    """The config.json of Google's BERT has no model_type."""
    config = {"vocab_size": 60, "hidden_size": 32, "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no model_type, and 'attention_probs_dropout_prob' .* such as \"bert\""):
        bertblocks.load(tmp_path)


def test_a_misspelled_key_without_model_type_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'hidden_sise'.*did you mean 'hidden_size'"):
        BertBlocksConfig.from_dict({"hidden_sise": 32})


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_the_base_task_ignores_unknown_heads(tmp_path: Path, kind: Any) -> None:
    config = BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40)
    ids = torch.tensor([[5, 6, 7]])
    model: Any
    if kind == "theirs":
        model, extra = BertForMaskedLM(config), "bert.encoder.layer.7.attention.self.query.weight"
    else:
        model, extra = BertBlocksForMaskedLM(tiny_config()), "model.encoder.layers.7.attention.qkv.weight"
    model.eval().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"my_head.dense.weight": torch.zeros(2, 32)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, _ = bertblocks.load(tmp_path, task="base")
    expected = model.base_model(ids).last_hidden_state
    torch.testing.assert_close(loaded(ids).last_hidden_state, expected, atol=1e-5, rtol=1e-4)
    with pytest.raises((OSError, ValueError), match=r"my_head\.dense\.weight"):
        bertblocks.load(tmp_path)
    save_file(tensors | {extra: torch.zeros(2, 2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((OSError, ValueError), match=r"layers?\.7\.attention"):
        bertblocks.load(tmp_path, task="base")
