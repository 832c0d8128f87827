"""What is particular to decoders that serve as encoders: the direction of attention, and the last token."""

from typing import Any

import pytest
import torch
import transformers

from bertblocks import BertBlocksModel, from_huggingface
from bertblocks.checkpoints.families import read_config
from bertblocks.nn.head import pool
from tests.checkpoints.family_cases import FAMILY_CASES
from tests.helpers import pad_ids, ragged_ids, tiny_config


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"is_causal": False}, False),
        ({"architectures": ["LlamaBiModel"]}, False),
        ({"architectures": ["LlamaBiForMNTP"]}, False),
        ({"architectures": ["LlamaForCausalLM"]}, True),
    ],
    ids=str,
)
def test_config_and_class_say_whether_a_decoder_is_causal(options: Any, expected: Any) -> None:
    values = {**FAMILY_CASES["llama"].make_config().to_dict(), **options}
    assert read_config(values).causal is expected


def test_a_causal_model_does_not_see_later_tokens_until_it_is_told_to() -> None:
    model = BertBlocksModel(tiny_config(causal=True, block_pos_enc_kind="rope", pooler=False)).eval()
    ids = ragged_ids([12])[0][None]
    changed = ids.clone()
    changed[0, 8:] = 7
    with torch.no_grad():
        before, after = (model(row).last_hidden_state[0, :8] for row in (ids, changed))
        assert torch.equal(before, after)
        model.set_causal(False)
        before, after = (model(row).last_hidden_state[0, :8] for row in (ids, changed))
    assert not model.config.causal
    assert (before - after).abs().amax(-1).min() > 1e-3


def test_the_last_token_of_clip_is_its_pooled_output() -> None:
    torch.manual_seed(0)
    theirs = transformers.CLIPTextModel(FAMILY_CASES["clip_text_model"].make_config()).eval()
    sequences = [torch.cat((ids.clamp(min=4), torch.tensor([3]))) for ids in ragged_ids([20, 7, 1], vocab_size=90)]
    ids, mask = pad_ids(sequences)
    model: Any = from_huggingface(theirs)
    with torch.no_grad():
        encoded = model.encode(ids, mask)
        actual = pool(encoded.hidden, encoded.layout, model.config.classifier_pooling)
        torch.testing.assert_close(actual, theirs(ids, mask).pooler_output, atol=1e-5, rtol=1e-5)
