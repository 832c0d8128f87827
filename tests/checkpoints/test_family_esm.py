"""Tests of ESM that go beyond those of all families: token dropout, contacts, RoPE precision, errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import EsmForMaskedLM, EsmForTokenClassification, EsmModel

from bertblocks import BertBlocksForMaskedLM, BertBlocksModel, ConfigError, from_huggingface
from bertblocks import to_huggingface as export
from bertblocks.checkpoints.families import read_config
from bertblocks.nn.embedding import TokenDropout
from bertblocks.nn.layout import SequenceLayout
from tests.checkpoints.family_cases import FAMILY_CASES
from tests.helpers import pad_ids, ragged_ids, tiny_config

MASK = 3
END = 2


def make_esm(model_class: Any = EsmModel, **options: Any) -> Any:
    torch.manual_seed(0)
    model = model_class(FAMILY_CASES["esm"].make_config(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def proteins(lengths: tuple[int, ...] = (120, 65, 4)) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that end in 2 and have different numbers of mask tokens."""
    rows = [ids.clamp(min=4) for ids in ragged_ids(list(lengths), vocab_size=90)]
    for number, ids in enumerate(rows):
        ids[1 :: number + 3] = MASK
        ids[-1] = END
    return pad_ids(rows)


# ---------------------------------------------------------------------- token dropout


@pytest.mark.parametrize("kind", ["absolute", "rotary"])
@pytest.mark.parametrize("unpad", [True, False])
def test_masked_proteins_equal_transformers(kind: Any, unpad: Any) -> None:
    theirs = make_esm(EsmForMaskedLM, position_embedding_type=kind)
    ours = from_huggingface(theirs)
    ours.config.unpad = unpad
    ids, mask = proteins()
    with torch.no_grad():
        expected, actual = (model(ids, attention_mask=mask).logits for model in (theirs, ours))
    torch.testing.assert_close(actual[mask == 1], expected[mask == 1], atol=1e-5, rtol=1e-5)


def test_token_dropout_scales_each_sequence_by_its_own_mask_tokens() -> None:
    ids = torch.tensor([5, MASK, 6, 7, 5, 6, MASK, MASK])
    layout = SequenceLayout.from_cu_seqlens(torch.tensor([0, 4, 6, 8]), (8,))
    out = TokenDropout(MASK)(torch.ones(8, 1), ids, layout)[:, 0]
    share = 1 - 0.15 * 0.8
    torch.testing.assert_close(out, torch.tensor([share / 0.75, 0, share / 0.75, share / 0.75, share, share, 0, 0]))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_token_dropout_does_not_depend_on_the_batch(backend: Any) -> None:
    config = tiny_config(token_dropout=True, mask_token_id=MASK, attention_backend=backend, pooler=False)
    model = BertBlocksModel(config).double().eval()
    sequences = [*ragged_ids([20, 1, 9]), torch.full((3,), MASK)]
    for ids in sequences[:1]:
        ids[2:7] = MASK
    holes = torch.tensor([[True, False, True, True]])
    with torch.no_grad():
        alone = torch.cat([model(ids[None]).last_hidden_state[0] for ids in sequences])
        bounds = torch.tensor([0, *map(len, sequences)]).cumsum(0)
        packed = model(torch.cat(sequences), cu_seqlens=bounds).last_hidden_state
        torch.testing.assert_close(packed, alone, atol=1e-9, rtol=1e-9)
        for unpad, side in ((True, "right"), (False, "right"), (False, "left")):
            model.config.unpad = unpad
            ids, mask = pad_ids(sequences, side)
            ids = ids.masked_fill(mask == 0, MASK)  # padding does not count, whatever stands there
            padded = model(ids, attention_mask=mask).last_hidden_state
            torch.testing.assert_close(padded[mask == 1], alone, atol=1e-9, rtol=1e-9)
        one, other = (model(torch.tensor([[5, hidden, 6, MASK]]), holes).last_hidden_state for hidden in (MASK, 9))
    assert torch.isfinite(alone).all()
    assert torch.equal(one, other)


def test_token_dropout_needs_a_mask_token_and_ids() -> None:
    with pytest.raises(ConfigError, match="token_dropout is True; it requires mask_token_id"):
        tiny_config(token_dropout=True)
    model = BertBlocksModel(tiny_config(token_dropout=True, mask_token_id=MASK))
    with pytest.raises(ValueError, match="inputs_embeds are given; token_dropout needs input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, 32))


# ---------------------------------------------------------------------- contacts


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_contacts_equal_transformers(backend: Any) -> None:
    theirs = make_esm(attn_implementation="eager")
    ours = from_huggingface(theirs)
    ours.config.attention_backend = backend
    ids, mask = proteins()
    with torch.no_grad():
        expected, actual = theirs.predict_contacts(ids, mask), ours.predict_contacts(ids, mask)
    assert actual.shape == (3, 118, 118)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_every_encoder_can_have_a_contact_head(tmp_path: Path) -> None:
    options = {"contact_head": True, "eos_token_id": [END, 4], "layer_overrides": {1: {"num_attention_heads": 2}}}
    model = BertBlocksModel(tiny_config(**options)).eval()
    assert model.contact_head.weight.shape == (1, 10)
    assert model.contact_head.weight.std() > 0.1
    assert not any(parameter.requires_grad for parameter in model.contact_head.parameters())
    ids, mask = proteins((10, 5))
    ids = ids.clamp(max=59)
    contacts = model.predict_contacts(ids, mask)
    assert contacts.shape == (2, 8, 8)
    torch.testing.assert_close(contacts, contacts.transpose(1, 2))
    model.save_pretrained(tmp_path)
    again = BertBlocksModel.from_pretrained(tmp_path).eval()
    assert torch.equal(again.predict_contacts(ids, mask), contacts)
    torch.testing.assert_close(again.bfloat16().predict_contacts(ids, mask).float(), contacts, atol=0.02, rtol=0)
    with pytest.raises(ValueError, match="contact_head is False"):
        BertBlocksModel(tiny_config()).predict_contacts(ids, mask)


# ---------------------------------------------------------------------- rotations


def assert_same_and_back(ours: Any, theirs: Any) -> None:
    ids, mask = proteins()
    with torch.no_grad():
        expected, actual = (model(ids, attention_mask=mask).logits for model in (theirs, ours))
    torch.testing.assert_close(actual[mask == 1], expected[mask == 1], atol=1e-5, rtol=1e-5)
    again = export(ours)
    assert set(again.state_dict()) == set(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_rope_frequencies_are_kept(dtype: Any) -> None:
    """Old checkpoints may contain frequencies in half precision, as in training, and transformers keeps them."""
    theirs = make_esm(EsmForTokenClassification, num_labels=3)
    frequencies = theirs.esm.rotary_embeddings.inv_freq
    frequencies.copy_(frequencies.to(dtype))
    ours = from_huggingface(theirs)
    assert ours.config.rope_frequency_dtype == str(dtype).removeprefix("torch.")
    assert_same_and_back(ours, theirs)
    assert_same_and_back(from_huggingface(export(ours)), theirs)


def test_frequencies_that_do_not_match_theta_raise() -> None:
    theirs = make_esm()
    theirs.rotary_embeddings.inv_freq.mul_(1.01)
    with pytest.raises(ConfigError, match=r"rotary_embeddings.inv_freq does not match rope_theta = 10000"):
        from_huggingface(theirs)


def test_half_precision_survives_reading_and_writing() -> None:
    theirs = make_esm(EsmForMaskedLM).bfloat16()
    again = export(from_huggingface(theirs))
    for name, tensor in theirs.state_dict().items():
        assert again.state_dict()[name].dtype == torch.bfloat16
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_frequency_dtype": "float8"}, "rope_frequency_dtype is 'float8'; it must be one of float32, float16"),
        ({"block_pos_enc_kind": "none"}, "rope_frequency_dtype is 'float16'; it belongs to block_pos_enc_kind 'rope'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "it must be 'float32' with rope_scaling"),
    ],
)
def test_impossible_frequency_dtypes_raise(options: Any, message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**{"block_pos_enc_kind": "rope", "rope_frequency_dtype": "float16", **options})


def test_an_old_esm_checkpoint_is_read(tmp_path: Path) -> None:
    """Contains frequencies in every layer and a table of positions that rotary models do not use."""
    theirs = make_esm(EsmForMaskedLM)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    saved = [name for name in tensors if name.endswith("inv_freq")]
    (frequencies,) = [tensors.pop(name) for name in saved]
    for index in range(4):
        tensors[f"esm.encoder.layer.{index}.attention.self.rotary_embeddings.inv_freq"] = frequencies.clone()
    tensors["esm.embeddings.position_embeddings.weight"] = torch.zeros(320, 32)
    tensors["esm.embeddings.position_ids"] = torch.arange(320)[None]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_and_back(from_huggingface(tmp_path), theirs)


# ---------------------------------------------------------------------- configs


def test_an_untied_decoder_keeps_its_matrix() -> None:
    theirs = make_esm(EsmForMaskedLM, tie_word_embeddings=False)
    ours = from_huggingface(theirs)
    assert not ours.config.tie_word_embeddings
    assert_same_and_back(ours, theirs)


def test_esm_dropouts_are_where_transformers_has_them() -> None:
    options = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}
    config = read_config(FAMILY_CASES["esm"].make_config(**options))
    assert config.embedding_dropout == config.mlp_dropout == 0.0
    assert config.attention_dropout == 0.3
    places = ("attention_output", "mlp_output", "classifier", "classifier_head", "token_classifier")
    assert {getattr(config, f"{place}_dropout") for place in places} == {0.2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key' in this esm config"),
        ({"position_embedding_type": "absolute", "pad_token_id": None}, "pad_token_id is None in this esm config"),
        ({"is_decoder": True}, "is_decoder is True in this esm config; BertBlocks supports False only"),
        ({"add_cross_attention": True}, "add_cross_attention is True in this esm config"),
        ({"is_folding_model": True}, "is_folding_model is True in this esm config; BertBlocks supports False only"),
        ({"mask_token_id": None}, "token_dropout is True; it requires mask_token_id"),
        ({"vocab_size": None}, "vocab_size is None"),
    ],
)
def test_unsupported_config_values_raise_an_error_that_names_them(options: Any, message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(FAMILY_CASES["esm"].make_config(**options))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("contact_head", False),
        ("embedding_dropout", 0.1),
        ("mlp_output_dropout", 0.3),
        ("hidden_act", "relu"),
        ("final_norm", False),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_values_that_esm_cannot_represent_raise_an_error(key: Any, value: Any) -> None:
    config = read_config(FAMILY_CASES["esm"].make_config())
    setattr(config, key, value)
    with pytest.raises(ConfigError, match=f"{key} is {value!r}; an? esm checkpoint has"):
        export(BertBlocksForMaskedLM(config), "esm")


def test_a_checkpoint_without_its_contact_head_raises() -> None:
    theirs = make_esm()
    del theirs.contact_head
    with pytest.raises(ValueError, match=r"lacks 'contact_head.regression.weight'"):
        from_huggingface(theirs)
