"""Mixing of the input into layers, and embeddings of tokens as values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bertblocks import BertBlocksForMaskedLM, BertBlocksModel
from tests.helpers import naive_attention, tiny_config
from tests.nn.test_scales import forward_context

IDS = torch.tensor([[5, 6, 7, 8]])


def test_layers_mix_their_input_with_the_first() -> None:
    model = BertBlocksModel(tiny_config(input_mixing=True)).eval().requires_grad_(False)
    plain = BertBlocksModel(tiny_config()).eval()
    plain.load_state_dict({key: value for key, value in model.state_dict().items() if "mixing" not in key})
    assert torch.equal(model(IDS).last_hidden_state, plain(IDS).last_hidden_state)  # a = 1 and b = 0
    inputs: list[Any] = []
    for index, layer in enumerate(model.encoder.layers):
        layer.input_mixing.weight.copy_(torch.tensor([0.5 + index, 2.0]))
        layer.attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    states = model(IDS, output_hidden_states=True).hidden_states
    for index, x in enumerate(inputs):  # with post norms, attention reads the mixture itself
        torch.testing.assert_close(x, (0.5 + index) * states[index][0] + 2 * states[0][0])


def test_values_have_an_embedding_of_their_token() -> None:
    model = BertBlocksModel(tiny_config(value_embedding=True, num_kv_heads=2)).eval().requires_grad_(False)
    attention: Any = model.encoder.layers[1].attention
    seen: list[Any] = []
    attention.out.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x, context = torch.randn(4, 32), forward_context(model, 4, IDS[0])
    attention(x, context)
    q, k, v = attention.split(attention.qkv(x))
    v = v + attention.value_embedding.table.weight[IDS[0]].view(4, 2, 8)
    torch.testing.assert_close(seen[0], naive_attention(q, k, v, 8**-0.5).flatten(1), atol=1e-5, rtol=1e-5)


def test_embeddings_instead_of_ids_raise() -> None:
    model = BertBlocksModel(tiny_config(value_embedding=True))
    with pytest.raises(ValueError, match="inputs_embeds are given; value_embedding needs input_ids"):
        model(inputs_embeds=torch.randn(1, 4, 32))


def test_value_embeddings_follow_the_vocabulary() -> None:
    model = BertBlocksForMaskedLM(tiny_config(value_embedding=True))
    model.resize_token_embeddings(70)
    assert model(torch.tensor([[5, 69]])).logits.shape == (1, 2, 70)


@pytest.mark.parametrize("options", [{"input_mixing": True}, {"value_embedding": True}])
def test_gradient_checkpointing_gives_the_same_gradients(options: Any) -> None:
    model = BertBlocksModel(tiny_config(**options)).train()
    gradients = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(IDS).last_hidden_state.square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)
