"""The losses of distillation, compared with a few lines on transformers' own models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel, PreTrainedModel

from bertblocks.training.distillation.hidden import HiddenMethod, match_layers
from bertblocks.training.distillation.losses import embedding_loss, logit_loss
from bertblocks.training.distillation.models import load_teacher, make_student
from bertblocks.training.distillation.relations import RelationMethod
from bertblocks.training.distillation.settings import HiddenSettings, RelationSettings
from tests.small_tokenizers import wrap

TEXTS = ["plain words are here", "two leading", "trailing words don't"]
CPU = torch.device("cpu")


def save(kind: Any, folder: Path, width: int, layers: int, **options: Any) -> PreTrainedModel:
    """A random model of transformers, next to its tokenizer, with weights large enough that mistakes show."""
    config = BertConfig(
        vocab_size=120,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=64,
        initializer_range=0.3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )
    model = kind(config).eval()
    model.save_pretrained(folder)
    wrap("wordpiece").save_pretrained(folder)
    return model


def make(method: Any, settings: Any, folder: Path, task: str | None = None) -> Any:
    """A method on the models in a folder, with features of all texts."""
    teacher = load_teacher(folder / "teacher", task)
    made = method(settings, teacher, make_student(folder / "student", None, teacher), CPU)
    made.features = made.tokenize(TEXTS)
    made.model.eval()
    return made


ITEMS = [(number, number) for number in range(len(TEXTS))]


def split(batch: Any) -> list[Tensor]:
    return list(batch.input_ids.split(batch.cu_seqlens.diff().tolist()))


# ---------------------------------------------------------------------- relations


@torch.no_grad()
def relations(model: Any, ids: Tensor, layer: int, heads: int) -> list[Tensor]:
    """Queries, keys and values of one of transformers' layers, and from them one softmax per head and token."""
    entering = model(ids[None], output_hidden_states=True).hidden_states[layer - 1]
    attention = model.encoder.layer[layer - 1].attention.self
    found = []
    for project in (attention.query, attention.key, attention.value):
        parts = torch.stack(project(entering)[0].chunk(heads, dim=-1))
        found.append(torch.stack([F.softmax(x @ x.T / math.sqrt(x.shape[-1]), dim=-1) for x in parts]))
    return found


@pytest.mark.parametrize("layer", [None, 2])
def test_relations_are_those_of_transformers_queries_keys_and_values(tmp_path: Path, layer: int | None) -> None:
    """The student has half the width, other heads and fewer layers."""
    teacher = save(BertModel, tmp_path / "teacher", 32, 3)
    student = save(BertModel, tmp_path / "student", 16, 2)
    method = make(RelationMethod, RelationSettings(relation_heads=8, teacher_layer=layer), tmp_path, "base")
    batch = method.batch(ITEMS)
    with torch.no_grad():
        losses = method.losses(method.model, batch)
    expected = dict.fromkeys(("query", "key", "value"), 0.0)
    for ids in split(batch):
        theirs, own = relations(teacher, ids, layer or 3, 8), relations(student, ids, 2, 8)
        for kind, target, found in zip(expected, theirs, own, strict=True):
            expected[kind] += float(F.kl_div(found.log(), target, reduction="sum")) / 8
    assert {kind: float(loss) for kind, loss in losses.items()} == pytest.approx(expected, rel=1e-4)
    assert set(batch.counts.values()) == {sum(map(len, split(batch)))}  # means over tokens


def test_nothing_behind_the_last_values_is_trained(tmp_path: Path) -> None:
    for name in ("teacher", "student"):
        save(BertModel, tmp_path / name, 32, 2)
    method = make(RelationMethod, RelationSettings(), tmp_path, "base")
    torch.stack(list(method.losses(method.model, method.batch(ITEMS)).values())).sum().backward()
    trained = {name for name, weight in method.model.named_parameters() if weight.requires_grad}
    assert trained == {name for name, weight in method.model.named_parameters() if weight.grad is not None}
    assert "encoder.layers.1.attention.qkv.weight" in trained
    assert not any(name.startswith("encoder.layers.1.mlp") for name in trained)


# ---------------------------------------------------------------------- hidden states and logits


def state_loss(method: Any, teacher: Any, student: Any, sequences: list[Tensor]) -> float:
    """Squared distance over squared length, by token, as a mean over the pairs of layers."""
    total, layers = 0.0, match_layers(2, 4)
    assert layers == [0, 2, 4]
    for ids in sequences:
        theirs = teacher(ids[None], output_hidden_states=True).hidden_states
        own = student(ids[None], output_hidden_states=True).hidden_states
        for number, layer in enumerate(layers):
            projection = method.model.projections[number]
            for target, state in zip(theirs[layer][0], own[number][0], strict=True):
                found = projection.weight @ state + projection.bias
                total += float((found - target) @ (found - target) / (target @ target)) / len(layers)
    return total


@torch.no_grad()
def test_hidden_states_and_masked_tokens_are_compared_as_with_transformers(tmp_path: Path) -> None:
    teacher = save(BertForMaskedLM, tmp_path / "teacher", 32, 4)
    student = save(BertForMaskedLM, tmp_path / "student", 16, 2)
    settings = HiddenSettings(temperature=3.0, logit_weight=0.5, mask_rate=0.4)
    method = make(HiddenMethod, settings, tmp_path)
    batch = method.batch(ITEMS)
    is_scored = torch.zeros(len(batch.input_ids), dtype=torch.bool).index_fill(0, batch.scored_tokens, True)
    logits, size = 0.0, len(method.student.tokenizer)
    assert size < 120
    masks = is_scored.split(batch.cu_seqlens.diff().tolist())
    for ids, is_masked, feature in zip(split(batch), masks, method.features, strict=True):
        assert (ids[is_masked] == 4).all()  # [MASK]
        assert torch.equal(ids[~is_masked], torch.tensor(feature.ids)[~is_masked])
        # the models have rows for tokens that the tokenizer lacks
        theirs, own = (model(ids[None]).logits[0, is_masked, :size] for model in (teacher, student))
        divergence = F.kl_div((own / 3).log_softmax(-1), (theirs / 3).softmax(-1), reduction="sum")
        logits += 0.5 * 9 * float(divergence)
    losses = method.losses(method.model, batch)
    expected = {"hidden": state_loss(method, teacher, student, split(batch)), "logits": logits}
    assert {name: float(loss) for name, loss in losses.items()} == pytest.approx(expected, rel=1e-4)
    assert batch.counts["logits"] == len(batch.scored_tokens) > 0


def test_masks_depend_on_the_epoch_and_spare_special_tokens(tmp_path: Path) -> None:
    for name in ("teacher", "student"):
        save(BertForMaskedLM, tmp_path / name, 32, 2)
    method = make(HiddenMethod, HiddenSettings(mask_rate=0.5), tmp_path)
    batches = [method.batch([(0, epoch)]) for epoch in range(20)]
    assert len({tuple(batch.input_ids.tolist()) for batch in batches}) > 5
    assert all(batch.input_ids[0] == 2 and batch.input_ids[-1] == 3 for batch in batches)
    assert torch.equal(method.batch([(0, 7)]).input_ids, batches[7].input_ids)


@torch.no_grad()
def test_a_student_gets_the_head_of_a_classifier_and_its_labels(tmp_path: Path) -> None:
    names = {0: "bad", 1: "fine", 2: "good"}
    teacher = save(BertForSequenceClassification, tmp_path / "teacher", 32, 4, id2label=names)
    save(BertModel, tmp_path / "student", 16, 2)
    method = make(HiddenMethod, HiddenSettings(temperature=2.0), tmp_path)
    assert method.student.model.config.id2label == names
    batch = method.batch(ITEMS)
    _, logits = method.model(batch.inputs, None)
    theirs = torch.cat([teacher(ids[None]).logits for ids in split(batch)])
    expected = 4 * F.kl_div((logits / 2).log_softmax(-1), (theirs / 2).softmax(-1), reduction="sum")
    assert float(method.losses(method.model, batch)["logits"]) == pytest.approx(float(expected), rel=1e-4)
    assert batch.counts["logits"] == len(TEXTS)


def test_probabilities_of_several_labels_and_scores_are_compared_too() -> None:
    student, teacher = torch.randn(4, 3), torch.randn(4, 3)
    p = torch.sigmoid(teacher / 2)
    cross_entropy = F.binary_cross_entropy_with_logits(student / 2, p, reduction="sum")
    entropy = -(p * p.log() + (1 - p) * (1 - p).log()).sum()
    expected = 4 * (cross_entropy - entropy).item()
    assert logit_loss(student, teacher, 2.0, "multi").item() == pytest.approx(expected, rel=1e-4)
    assert logit_loss(student, teacher, 2.0, "regression").item() == pytest.approx(
        F.mse_loss(student, teacher, reduction="sum").item()
    )


# ---------------------------------------------------------------------- embeddings


def test_the_gradient_of_the_regression_turns_an_embedding_towards_the_teachers() -> None:
    """With u = s / |s|, the gradient of |u - t|^2 for a t of length 1 is -2 (t - (t u) u) / |s|."""
    student = torch.randn(5, 8, requires_grad=True)
    teacher = F.normalize(torch.randn(5, 8), dim=-1)
    embedding_loss(student, teacher).backward()
    lengths = student.detach().norm(dim=-1, keepdim=True)
    unit = student.detach() / lengths
    expected = -2 * (teacher - (teacher * unit).sum(-1, keepdim=True) * unit) / lengths
    assert torch.allclose(student.grad, expected, atol=1e-6)


def test_the_loss_is_twice_one_minus_the_cosine() -> None:
    student, teacher = torch.randn(5, 8), F.normalize(torch.randn(5, 8), dim=-1)
    expected = 2 * (1 - nn.CosineSimilarity()(student, teacher)).sum()
    assert embedding_loss(student, teacher).item() == pytest.approx(expected.item(), rel=1e-5)
