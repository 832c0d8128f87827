"""DeBERTa's published layouts, its two masked-LM heads, its discriminator, and what BertBlocks cannot read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DebertaConfig, DebertaV2Config

import bertblocks
from bertblocks import BertBlocksConfig, BertBlocksForReplacedTokenDetection, ConfigError, from_huggingface
from bertblocks.checkpoints.families import read_config
from tests.checkpoints.family_cases import FAMILY_CASES
from tests.helpers import pad_ids, ragged_ids

#: As published: microsoft/deberta-v3-base, microsoft/deberta-v2-xlarge and microsoft/deberta-base.
V3_BASE = {
    "model_type": "deberta-v2",
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "layer_norm_eps": 1e-7,
    "max_relative_positions": -1,
    "position_biased_input": False,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "type_vocab_size": 0,
    "vocab_size": 128100,
}
V2_XLARGE = {
    **V3_BASE,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_attention_heads": 24,
    "num_hidden_layers": 24,
    "attention_head_size": 64,
    "conv_kernel_size": 3,
    "conv_act": "gelu",
    "pooler_dropout": 0,
    "pooler_hidden_act": "gelu",
    "pooler_hidden_size": 1536,
}
V1_BASE = {
    "model_type": "deberta",
    "hidden_size": 768,
    "relative_attention": True,
    "max_relative_positions": -1,
    "pos_att_type": "c2p|p2c",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "vocab_size": 50265,
    "layer_norm_eps": 1e-7,
}


@pytest.mark.parametrize(
    ("values", "parameters"), [(V3_BASE, 183_831_552), (V2_XLARGE, 884_593_152), (V1_BASE, 138_601_728)]
)
def test_published_configs_have_the_parameters_of_transformers(values: Any, parameters: int) -> None:
    config = read_config(values)
    classes = {"deberta": (DebertaConfig, "DebertaModel"), "deberta-v2": (DebertaV2Config, "DebertaV2Model")}
    config_class, model_class = classes[values["model_type"]]
    with torch.device("meta"):
        theirs = getattr(transformers, model_class)(config_class.from_dict(values))
        ours = bertblocks.BertBlocksModel(config)
    assert ours.num_parameters() == theirs.num_parameters() == parameters


def detector_tensors(size: int) -> dict[str, Tensor]:
    return {
        "mask_predictions.dense.weight": torch.randn(size, size) * 0.2,
        "mask_predictions.dense.bias": torch.randn(size),
        "mask_predictions.LayerNorm.weight": torch.randn(size),
        "mask_predictions.LayerNorm.bias": torch.randn(size),
        "mask_predictions.classifier.weight": torch.randn(1, size),
        "mask_predictions.classifier.bias": torch.randn(1),
    }


def published(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """A checkpoint as microsoft publishes v3: both heads, an unused position table, no architectures, no `legacy`."""
    theirs = transformers.DebertaV2ForMaskedLM(FAMILY_CASES["deberta-v2"].make_config()).eval()
    with torch.no_grad():
        theirs.lm_predictions.lm_head.bias.normal_()
    tensors = {**theirs.state_dict(), **detector_tensors(32)}
    tensors["deberta.embeddings.position_embeddings.weight"] = torch.randn(320, 32)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    values = {key: value for key, value in theirs.config.to_dict().items() if key not in ("legacy", "architectures")}
    (folder / "config.json").write_text(json.dumps(values))
    return theirs, tensors


def test_the_published_layout_has_an_encoder_and_two_heads(tmp_path: Path) -> None:
    theirs, tensors = published(tmp_path)
    ids, mask = pad_ids(ragged_ids([40, 7, 1], vocab_size=90))
    with torch.no_grad():
        states = theirs.deberta(ids, attention_mask=mask).last_hidden_state
        base = from_huggingface(tmp_path)
        assert isinstance(base, bertblocks.BertBlocksModel)
        torch.testing.assert_close(
            base(ids, mask).last_hidden_state[mask == 1], states[mask == 1], atol=1e-5, rtol=1e-5
        )
        logits = from_huggingface(tmp_path, task="masked-lm")(ids, mask).logits
        torch.testing.assert_close(logits[mask == 1], theirs(ids, mask).logits[mask == 1], atol=1e-4, rtol=1e-5)

        detector = from_huggingface(tmp_path, task="replaced-token-detection")
        head = {name.removeprefix("mask_predictions."): tensor for name, tensor in tensors.items()}
        norm = torch.nn.functional.layer_norm(
            states + states[:, :1],
            (32,),
            head["LayerNorm.weight"],
            head["LayerNorm.bias"],
            theirs.config.layer_norm_eps,
        )
        hidden = torch.nn.functional.gelu(norm @ head["dense.weight"].t() + head["dense.bias"])
        expected = (hidden @ head["classifier.weight"].t() + head["classifier.bias"])[..., 0]
        for unpad in (True, False):
            detector.config.unpad = unpad
            actual = detector(ids, mask).logits
            torch.testing.assert_close(actual[mask == 1], expected[mask == 1], atol=1e-4, rtol=1e-5)


def test_a_discriminator_is_written_bit_for_bit_and_converted(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    _, tensors = published(tmp_path / "source")
    conversion = bertblocks.convert(tmp_path / "source", tmp_path / "target", "native", task="replaced-token-detection")
    assert (conversion.target_family, conversion.task) == ("deberta-v2", "replaced-token-detection")
    written = load_file(tmp_path / "target" / "model.safetensors")
    unused = {"deberta.embeddings.position_embeddings.weight"}
    unused |= {name for name in tensors if name.startswith("lm_predictions.")}
    assert written.keys() == tensors.keys() - unused
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in written.items())
    detector = from_huggingface(tmp_path / "target")
    assert isinstance(detector, BertBlocksForReplacedTokenDetection)
    with pytest.raises(ConfigError, match="no class for replaced-token-detection in the deberta-v2 family"):
        bertblocks.to_huggingface(detector, "deberta-v2")


def test_the_loss_of_a_discriminator_is_the_mean_over_labelled_tokens() -> None:
    config = BertBlocksConfig.from_preset("mini", detector_norm=True)
    model = BertBlocksForReplacedTokenDetection(config).eval()
    ids, mask = pad_ids(ragged_ids([9, 4], vocab_size=90))
    labels = torch.randint(0, 2, ids.shape)
    labels[0, 3] = -100
    with torch.no_grad():
        out = model(ids, mask, labels=labels)
    chosen = (mask == 1) & (labels != -100)
    probability = out.logits[chosen].sigmoid()
    expected = -torch.where(labels[chosen] == 1, probability, 1 - probability).log().mean()
    torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize("name", ["deberta", "deberta-v2"])
def test_a_tied_legacy_head_is_read_and_written_in_the_newer_layout(name: str) -> None:
    config = FAMILY_CASES[name].make_config(legacy=True)
    theirs = getattr(transformers, "DebertaForMaskedLM" if name == "deberta" else "DebertaV2ForMaskedLM")(config).eval()
    with torch.no_grad():
        theirs.cls.predictions.bias.normal_()
        theirs.tie_weights()
    again = bertblocks.to_huggingface(from_huggingface(theirs))
    ids, mask = pad_ids(ragged_ids([20, 5], vocab_size=90))
    with torch.no_grad():
        expected, actual = theirs(ids, attention_mask=mask).logits, again(ids, attention_mask=mask).logits
    assert not again.config.legacy
    torch.testing.assert_close(actual[mask == 1], expected[mask == 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["deberta", "deberta-v2"])
def test_attention_weights_equal_those_of_transformers(name: str) -> None:
    model_class = transformers.DebertaModel if name == "deberta" else transformers.DebertaV2Model
    theirs: Any = model_class(FAMILY_CASES[name].make_config()).eval()
    ours = from_huggingface(theirs)
    ids, mask = pad_ids(ragged_ids([50, 17], vocab_size=90))
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask, output_attentions=True).attentions
        actual = ours(ids, attention_mask=mask, output_attentions=True).attentions
    for ours_layer, theirs_layer in zip(actual, expected, strict=True):
        real = (mask[:, None, :, None] * mask[:, None, None]).expand_as(ours_layer) == 1
        torch.testing.assert_close(ours_layer[real], theirs_layer[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["deberta", "deberta-v2"])
def test_int8_stays_close_to_fp32(name: str) -> None:
    model_class = transformers.DebertaModel if name == "deberta" else transformers.DebertaV2Model
    model: Any = from_huggingface(model_class(FAMILY_CASES[name].make_config(initializer_range=0.05)).eval())
    ids, mask = pad_ids(ragged_ids([50, 17], vocab_size=90))
    with torch.no_grad():
        before = model(ids, mask).last_hidden_state[mask == 1]
        after = model.quantize("int8")(ids, mask).last_hidden_state[mask == 1]
    assert torch.nn.functional.cosine_similarity(before, after).min() > 0.99
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**V3_BASE, "pos_att_type": "p2p|c2p"}, "pos_att_type is ['p2p', 'c2p'] in this deberta-v2 config; "),
        ({**V3_BASE, "pos_att_type": None}, "with relative_attention it must hold c2p or p2c"),
        ({**V3_BASE, "relative_attention": False}, "without relative_attention it only scales scores"),
        ({**V3_BASE, "norm_rel_ebd": "batch_norm"}, "norm_rel_ebd is 'batch_norm'"),
        ({**V3_BASE, "pooler_hidden_size": 100}, "pooler_hidden_size is 100 in this deberta-v2 config; "),
        ({**V3_BASE, "attention_head_size": 32}, "attention_head_size is 32 in this deberta-v2 config; "),
        (
            {**V1_BASE, "talking_head": True},
            "talking_head is True in this deberta config; BertBlocks does not mix heads",
        ),
    ],
)
def test_what_cannot_be_represented_raises_an_error(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_config(values)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads"),
        ({"qk_norm": True}, "qk_norm"),
        ({"local_attention": True}, "local_attention"),
    ],
)
def test_what_deberta_cannot_represent_is_not_written(options: Any, key: str) -> None:
    config = read_config(FAMILY_CASES["deberta-v2"].make_config())
    model = bertblocks.BertBlocksModel(BertBlocksConfig(**{**config.to_dict(), "layer_types": None, **options}))
    with pytest.raises(ConfigError, match=key):
        bertblocks.to_huggingface(model, "deberta-v2")
