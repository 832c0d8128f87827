"""Task models that start from a checkpoint without their head, and relabelled classifiers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
)

import bertblocks
from bertblocks import (
    BertBlocksForMaskedDiffusion,
    BertBlocksForMaskedLM,
    BertBlocksForPreTraining,
    BertBlocksForSequenceClassification,
    BertBlocksModel,
)
from tests.helpers import expect_log, tiny_config

#: Tensors of the masked-LM head; the weight of the tied decoder is the embeddings'.
MLM_HEAD = {"head.dense.weight", "head.dense.bias", "head.norm.weight", "head.norm.bias", "decoder.bias"}


@pytest.fixture
def encoder(tmp_path: Path) -> Any:
    model = BertBlocksModel(tiny_config(mask_token_id=3))
    model.save_pretrained(tmp_path)
    return model


@pytest.mark.parametrize(
    ("model_class", "head"),
    [
        (BertBlocksForMaskedLM, MLM_HEAD),
        (AutoModelForMaskedLM, MLM_HEAD),
        (BertBlocksForMaskedDiffusion, MLM_HEAD),
        (BertBlocksForPreTraining, MLM_HEAD | {"order.weight", "order.bias"}),
    ],
)
def test_a_tied_language_model_starts_from_an_encoder(
    encoder: Any, tmp_path: Path, model_class: Any, head: Any
) -> None:
    model, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == head
    assert model.decoder.weight is model.model.embedding.token.weight
    assert not model.decoder.bias.any()
    for name, tensor in encoder.state_dict().items():
        if not name.startswith("pooler."):
            assert torch.equal(model.model.state_dict()[name], tensor), name


def test_load_logs_a_warning_for_a_new_language_model_head(encoder: Any, tmp_path: Path) -> None:
    with expect_log("decoder, head"):
        model, _ = bertblocks.load(tmp_path, task="masked-lm")
    assert torch.equal(model.model.embedding.token.weight, encoder.embedding.token.weight)


@pytest.mark.parametrize("name", sorted(MLM_HEAD))
def test_an_incomplete_language_model_head_raises(tmp_path: Path, name: Any) -> None:
    BertBlocksForMaskedLM(tiny_config()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match=f"lacks '{name}'"):
        BertBlocksForMaskedLM.from_pretrained(tmp_path)


# ---------------------------------------------------------------------- relabelled classifiers

FIVE = {index: f"label {index}" for index in range(5)}
NAMES = {"id2label": FIVE, "label2id": {name: index for index, name in FIVE.items()}}


@pytest.mark.parametrize("options", [{"num_labels": 5}, NAMES, {"num_labels": 5, **NAMES}])
@pytest.mark.parametrize("auto_class", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_classifier_is_relabelled_as_in_transformers(tmp_path: Path, auto_class: Any, options: Any) -> None:
    theirs = BertConfig(  # type: ignore[call-arg]
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40, num_labels=3
    )
    ids = torch.tensor([[5, 6, 7]])
    relabelled = []
    for name, config in (("theirs", theirs), ("ours", tiny_config(num_labels=3))):
        auto_class.from_config(config).save_pretrained(tmp_path / name)
        relabelled.append(auto_class.from_pretrained(tmp_path / name, ignore_mismatched_sizes=True, **options))
    expected, actual = relabelled
    assert actual.config.id2label == expected.config.id2label
    assert actual.config.label2id == expected.config.label2id
    assert actual(ids).logits.shape == expected(ids).logits.shape
    before = auto_class.from_pretrained(tmp_path / "ours").state_dict()
    for key, tensor in actual.model.state_dict().items():
        assert torch.equal(tensor, before[f"model.{key}"]), key


def test_relabelling_needs_ignore_mismatched_sizes_and_consistent_names(tmp_path: Path) -> None:
    BertBlocksForSequenceClassification(tiny_config(num_labels=3)).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"classifier\.bias has shape \[3\]; its config asks for \[5\]. ignore_mism"):
        BertBlocksForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    with pytest.raises(ValueError, match="num_labels is 4; id2label names 5 labels"):
        BertBlocksForSequenceClassification.from_pretrained(tmp_path, num_labels=4, **NAMES)


def test_a_cross_encoder_is_relabelled(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from transformers import BertTokenizer

    BertBlocksForSequenceClassification(tiny_config(num_labels=3)).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    encoder = sentence_transformers.CrossEncoder(
        str(tmp_path), num_labels=5, device="cpu", model_kwargs={"ignore_mismatched_sizes": True}
    )
    assert encoder.predict([("a", "b")]).shape == (1, 5)
