"""Task models that start from a checkpoint without their head."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

import bertblocks
from bertblocks import (
    BertBlocksForMaskedDiffusion,
    BertBlocksForMaskedLM,
    BertBlocksForPreTraining,
    BertBlocksModel,
)
from tests.helpers import tiny_config

#: Tensors of the masked-LM head; the weight of the tied decoder is the embeddings'.
MLM_HEAD = {"head.dense.weight", "head.dense.bias", "head.norm.weight", "head.norm.bias", "decoder.bias"}


@pytest.fixture
def encoder(tmp_path):
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
def test_a_tied_language_model_starts_from_an_encoder(encoder, tmp_path, model_class, head):
    model, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == head
    assert model.decoder.weight is model.model.embedding.token.weight
    assert not model.decoder.bias.any()
    for name, tensor in encoder.state_dict().items():
        if not name.startswith("pooler."):
            assert torch.equal(model.model.state_dict()[name], tensor), name


def test_load_starts_a_language_model_with_a_warning(encoder, tmp_path):
    with pytest.warns(UserWarning, match="decoder, head"):
        model, _ = bertblocks.load(tmp_path, task="masked-lm")
    assert torch.equal(model.model.embedding.token.weight, encoder.embedding.token.weight)


@pytest.mark.parametrize("name", sorted(MLM_HEAD))
def test_half_a_language_model_head_raises(tmp_path, name):
    BertBlocksForMaskedLM(tiny_config()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match=f"lacks '{name}'"):
        BertBlocksForMaskedLM.from_pretrained(tmp_path)
