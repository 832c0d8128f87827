"""Factorized embeddings and layers that share weights, against equivalent models without them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from bertblocks import (
    BertBlocksConfig,
    BertBlocksForMaskedLM,
    BertBlocksForQuestionAnswering,
    BertBlocksForTokenClassification,
    BertBlocksModel,
)
from bertblocks.analysis import build, count_flops, count_parameters, mermaid, module_tree, summarize
from tests.helpers import tiny_config

IDS = torch.tensor([[5, 9, 3, 7, 2, 8], [4, 6, 1, 0, 0, 0]])
MASK = (IDS != 0).long()


# ---------------------------------------------------------------------- shared layers


@pytest.mark.parametrize(
    ("layers", "groups", "order"),
    [
        (4, 4, [0, 1, 2, 3]),
        (4, 1, [0, 0, 0, 0]),
        (12, 3, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]),
        (5, 2, [0, 0, 0, 1, 1]),
    ],
)
def test_neighbouring_layers_form_groups(layers: Any, groups: Any, order: Any) -> None:
    config = tiny_config(num_hidden_layers=layers, num_hidden_groups=groups)
    model = BertBlocksModel(config)
    assert model.encoder.order == [config.layer_group(index) for index in range(layers)] == order
    assert len(model.encoder.layers) == groups


def unshared(model: BertBlocksModel) -> BertBlocksModel:
    """Returns the same model with a copy of the weights for every layer."""
    config = BertBlocksConfig(**{**model.config.to_dict(), "num_hidden_groups": model.config.num_hidden_layers})
    copied = BertBlocksModel(config)
    copied.encoder.layers = torch.nn.ModuleList(
        copy.deepcopy(model.encoder.layers[group]) for group in model.encoder.order
    )
    copied.embedding.load_state_dict(model.embedding.state_dict())
    copied.pooler.load_state_dict(model.pooler.state_dict())
    return copied


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_shared_layers_equal_copies_and_sum_their_gradients(groups: Any, checkpointing: Any) -> None:
    model = BertBlocksModel(tiny_config(num_hidden_layers=5, num_hidden_groups=groups)).double().train()
    copies = unshared(model).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    shared, apart = (m(IDS, MASK, output_hidden_states=True, output_attentions=True) for m in (model, copies))
    assert len(shared.hidden_states) == 6
    assert len(shared.attentions) == 5
    for one, other in zip(
        shared.hidden_states + shared.attentions, apart.hidden_states + apart.attentions, strict=True
    ):
        torch.testing.assert_close(one, other)
    weights = torch.randn_like(shared.last_hidden_state)
    for out in (shared, apart):
        (out.last_hidden_state * weights).sum().backward()
    for group, layer in enumerate(model.encoder.layers):
        members = [copies.encoder.layers[index] for index, other in enumerate(model.encoder.order) if other == group]
        for name, parameter in layer.named_parameters():
            total = sum(member.get_parameter(name).grad for member in members)  # type: ignore[misc]
            torch.testing.assert_close(parameter.grad, total)
    torch.testing.assert_close(model.embedding.token.weight.grad, copies.embedding.token.weight.grad)


def test_shared_layers_reduce_parameters_but_not_flops() -> None:
    one, all_apart = tiny_config(num_hidden_groups=1), tiny_config()
    few, many = (count_parameters(build(config, "base")) for config in (one, all_apart))
    for part in ("attention", "feed-forward"):
        assert 3 * few[part] == many[part]
    assert count_flops(build(one, "base"), 20) == count_flops(build(all_apart, "base"), 20)


def test_the_analysis_shows_what_is_shared() -> None:
    config = tiny_config(num_hidden_groups=1, embedding_size=8)
    assert "3 layers of 32, with the weights of 1," in summarize(config)
    assert "vocabulary 60 of 8" in summarize(config)
    encoder = next(node for node in module_tree(build(config, "base")).children if node.name == "encoder")
    assert encoder.details == "3 layers with the weights of 1"
    chart = mermaid(build(config, "base"))
    assert '"3 layers: 0-2, sharing weights"' in chart
    assert "LayerNorm<br/>projection to 32" in chart


# ---------------------------------------------------------------------- narrow embeddings


def test_factorized_embeddings_without_a_norm_equal_a_low_rank_table() -> None:
    """Lookup and projection are linear, so the product of both tables gives the same model."""
    options = {"embedding_norm": False, "type_vocab_size": 0}
    narrow = BertBlocksModel(tiny_config(embedding_size=8, **options)).double().eval()
    wide = BertBlocksModel(tiny_config(**options)).double().eval()
    torch.nn.init.normal_(narrow.embedding.projection.bias)
    state = {name: tensor for name, tensor in narrow.state_dict().items() if not name.startswith("embedding.")}
    projection = narrow.embedding.projection
    state["embedding.token.weight"] = narrow.embedding.token.weight @ projection.weight.T
    state["embedding.position.table.weight"] = projection(narrow.embedding.position.table.weight)
    wide.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(narrow(IDS, MASK).last_hidden_state, wide(IDS, MASK).last_hidden_state)


def test_sizes_of_a_factorized_model() -> None:
    model = BertBlocksForMaskedLM(tiny_config(embedding_size=8))
    embedding = model.model.embedding
    shapes = {name: list(parameter.shape) for name, parameter in embedding.named_parameters()}
    assert shapes == {
        "token.weight": [60, 8],
        "token_type.weight": [2, 8],
        "position.table.weight": [64, 8],
        "norm.weight": [8],
        "norm.bias": [8],
        "projection.weight": [32, 8],
        "projection.bias": [32],
    }
    assert list(model.head.dense.weight.shape) == [8, 32]
    assert list(model.head.norm.weight.shape) == [8]
    assert model.decoder.weight is embedding.token.weight
    assert model(IDS, MASK).logits.shape == (2, 6, 60)
    embeds = embedding.token(IDS)
    torch.testing.assert_close(model(inputs_embeds=embeds, attention_mask=MASK).logits, model(IDS, MASK).logits)
    counts = count_parameters(build(model.config, "masked-lm"))
    assert counts["token embedding"] == 60 * 8 + 8 * 32 + 32
    assert counts["head"] == 32 * 8 + 8 + 2 * 8 + 60
    assert count_flops(build(model.config, "masked-lm"), 10)["embedding projection"] == 2 * 10 * 8 * 32


def test_an_embedding_projection_between_equal_sizes_is_optional() -> None:
    assert BertBlocksModel(tiny_config()).embedding.projection is None
    assert BertBlocksModel(tiny_config(embedding_projection=True)).embedding.projection.weight.shape == (32, 32)


@pytest.mark.parametrize("kind", ["trunc_normal", "megatron", "xavier"])
def test_the_projection_is_initialized_like_an_embedding(kind: Any) -> None:
    config = tiny_config(
        hidden_size=512, embedding_size=256, init_kind=kind, num_hidden_layers=8, initializer_range=0.1
    )
    projection = BertBlocksModel(config).embedding.projection
    # a normal cut at two standard deviations has 0.88 of its deviation left
    expected = (2 / (512 + 256)) ** 0.5 if kind == "xavier" else 0.88 * 0.1
    assert projection.weight.std().item() == pytest.approx(expected, rel=0.03)
    assert not projection.bias.any()


def test_ngpt_keeps_columns_of_the_projection_on_the_sphere() -> None:
    model = BertBlocksModel(tiny_config(ngpt=True, embedding_size=8))
    model.renormalize_weights()
    norms = model.embedding.projection.weight.norm(dim=0)  # each column is a vector of the residual stream
    torch.testing.assert_close(norms, torch.ones(8))


def test_sharing_and_factorization_survive_saving_and_resizing(tmp_path: Path) -> None:
    model = BertBlocksForMaskedLM(tiny_config(embedding_size=8, num_hidden_groups=2)).eval()
    model.save_pretrained(tmp_path)
    again = BertBlocksForMaskedLM.from_pretrained(tmp_path).eval()
    assert (again.config.embedding_size, again.config.num_hidden_groups) == (8, 2)
    with torch.no_grad():
        assert torch.equal(again(IDS, MASK).logits, model(IDS, MASK).logits)
    again.resize_token_embeddings(70)
    assert again(IDS, MASK).logits.shape == (2, 6, 70)
    assert again.decoder.weight is again.model.embedding.token.weight


def test_implied_sizes_follow_other_keys() -> None:
    config = tiny_config()
    config.hidden_size, config.num_hidden_layers = 64, 5
    assert (config.embedding_size, config.embedding_projection, config.num_hidden_groups) == (64, False, 5)
    config.embedding_size = 16
    assert config.embedding_projection
    config.hidden_size, config.num_hidden_groups, config.num_hidden_layers = 32, 1, 7
    assert (config.embedding_size, config.embedding_projection, config.num_hidden_groups) == (16, True, 1)
    config.validate()


# ---------------------------------------------------------------------- dropout of token heads


@pytest.mark.parametrize(
    ("options", "tags", "spans"),
    [
        ({}, 0.3, 0.0),
        ({"classifier_head": "dense", "classifier_head_on_tokens": True}, 0.3, 0.3),
        ({"token_classifier_dropout": 0.4, "qa_dropout": 0.2}, 0.4, 0.2),
        ({"classifier_head": "dense", "classifier_head_on_tokens": True, "qa_dropout": 0.0}, 0.3, 0.0),
    ],
)
def test_token_heads_have_their_own_dropout(options: Any, tags: Any, spans: Any) -> None:
    config = tiny_config(classifier_dropout=0.3, **options)
    assert BertBlocksForTokenClassification(config).dropout.p == tags
    assert BertBlocksForQuestionAnswering(config).dropout.p == spans
