"""Conventions of transformers that its tools rely on."""

import json

import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel

from bertblocks import BertBlocksConfig, BertBlocksForSequenceClassification, BertBlocksModel, ConfigError
from bertblocks.models import TASK_MODELS
from tests.helpers import pad_ids, ragged_ids, tiny_config

# ---------------------------------------------------------------------- attention implementations


@pytest.mark.parametrize("task", list(TASK_MODELS))
def test_sdpa_and_eager_give_the_same_outputs(task, tmp_path):
    """As transformers' own test does, by the names that it looks for."""
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


def test_the_default_backend_is_reported_as_sdpa_and_kept(tmp_path):
    model = BertBlocksModel(tiny_config())
    assert model.config.attention_backend == "auto"
    assert model.config._attn_implementation == BertModel(BertConfig(num_hidden_layers=1)).config._attn_implementation
    model.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).config.attention_backend == "auto"


# ---------------------------------------------------------------------- poolers


@pytest.mark.parametrize("add_pooling_layer", [True, False])
def test_add_pooling_layer_is_that_of_transformers(tmp_path, add_pooling_layer):
    config = BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40)
    for name, auto_config in (("theirs", config), ("ours", tiny_config())):
        AutoModel.from_config(auto_config).save_pretrained(tmp_path / name)
        model = AutoModel.from_pretrained(tmp_path / name, add_pooling_layer=add_pooling_layer)
        assert (model(torch.tensor([[5, 6]])).pooler_output is not None) == add_pooling_layer


# ---------------------------------------------------------------------- notes on a config


@pytest.mark.parametrize(
    ("key", "value"), [("return_loss", True), ("gradient_checkpointing", True), ("first_k_dense_replace", 2)]
)
def test_tools_may_note_things_on_a_config(key, value, tmp_path):
    model = BertBlocksForSequenceClassification(tiny_config())
    setattr(model.config, key, value)
    assert getattr(model.config, key) == value
    model.save_pretrained(tmp_path)
    assert key not in json.loads((tmp_path / "config.json").read_text())
    BertBlocksForSequenceClassification.from_pretrained(tmp_path)


def test_keys_that_a_person_writes_stay_strict():
    config = tiny_config()
    with pytest.raises(ConfigError, match=r"'norm_fnn'.*did you mean 'norm_fn'"):
        config.norm_fnn = "rms"
    with pytest.raises(ConfigError, match="'return_loss'"):
        BertBlocksConfig(return_loss=True)
