"""The shipped recipes equal the published ones, build their models, and train."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForMaskedLM

from bertblocks import BertBlocksConfig
from bertblocks.models import TASK_MODELS
from bertblocks.training.objective_sections import MaskedLM, ReplacedTokens
from bertblocks.training.optimizer_sections import AdamW
from bertblocks.training.pretrain import pretrain
from bertblocks.training.recipe import Recipe, read_recipe, recipe_names
from bertblocks.training.training_plan import TrainingPlan

NAMES = ["bert", "demo", "electra-small", "masked-diffusion", "modernbert-base", "neobert", "ngpt"]
#: Parameters of each recipe's model, with its heads; those of ModernBERT are published, BERT's by transformers.
PARAMETERS = {"modernbert-base": 149_655_232, "bert": 110_106_428, "electra-small": 13_549_057}


def test_every_recipe_is_listed() -> None:
    assert recipe_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_builds_its_model_and_its_schedule(name: Any) -> None:
    recipe = read_recipe(name)
    assert recipe.name == name
    assert recipe.description
    config = BertBlocksConfig.from_preset(recipe.model.preset, **recipe.model.config)
    with torch.device("meta"):
        model = TASK_MODELS[recipe.objective.model_task](config)
    if name in PARAMETERS:
        assert model.num_parameters() == PARAMETERS[name]
    table = TrainingPlan(recipe)
    assert max(phase.length for phase in table.phases) <= config.max_position_embeddings
    rates = [table.at(step * (table.total_steps - 1) // 100).learning_rate for step in range(101)]
    assert all(0 < rate <= max(phase.peak for phase in table.phases) for rate in rates)


def test_the_size_of_berts_pretraining_model_equals_transformers() -> None:
    from transformers import BertConfig, BertForPreTraining

    with torch.device("meta"):
        assert BertForPreTraining(BertConfig()).num_parameters() == PARAMETERS["bert"]


def test_the_electra_recipe_equals_the_published_one() -> None:
    from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

    recipe = read_recipe("electra-small")
    objective, table = recipe.objective, TrainingPlan(recipe)
    assert isinstance(objective, ReplacedTokens)
    assert (objective.rate, objective.mask_share, objective.random_share, objective.weight) == (0.15, 1.0, 0.0, 50.0)
    assert (table.total_steps, table.phases[0].batches.rows) == (1_000_000, 128)
    assert table.at(9_999).learning_rate == pytest.approx(5e-4)
    config = BertBlocksConfig.from_preset(recipe.model.preset, **recipe.model.config)
    generator = objective.generator_config(config)
    small = {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 256}
    with torch.device("meta"):
        assert ElectraForPreTraining(ElectraConfig()).num_parameters() == PARAMETERS["electra-small"]
        expected = ElectraForMaskedLM(ElectraConfig(**small)).num_parameters()
        assert TASK_MODELS["masked-lm"](generator).num_parameters() == expected


@pytest.mark.parametrize("preset", ["bert-base", "modernbert-base", "neobert", "mini", "roberta-base"])
def test_the_generator_is_a_quarter_as_wide_for_every_kind_of_model(preset: Any) -> None:
    config = BertBlocksConfig.from_preset(preset)
    generator = ReplacedTokens().generator_config(config)
    assert generator.hidden_size * 4 == config.hidden_size
    assert generator.embedding_size == config.embedding_size


def test_the_demo_is_the_default_recipe() -> None:
    assert read_recipe("demo").model_copy(update={"description": ""}) == Recipe()
    assert read_recipe() == read_recipe("demo")


def sections(recipe: Recipe) -> tuple[MaskedLM, AdamW]:
    """The sections that depend on a kind, with their keys."""
    assert isinstance(recipe.objective, MaskedLM)
    assert isinstance(recipe.optimizer, AdamW)
    return recipe.objective, recipe.optimizer


def test_the_bert_recipe_equals_the_published_one() -> None:
    recipe = read_recipe("bert")
    table = TrainingPlan(recipe)
    assert table.total_steps == 1_000_000
    short, long = table.phases
    assert (short.length, short.batches.steps, short.batches.rows) == (128, 900_000, 256)
    assert (long.length, long.batches.steps, long.batches.rows) == (512, 100_000, 256)
    # warm-up over 10,000 steps to 1e-4, then a straight line to nothing over the rest
    assert table.at(9_999).learning_rate == pytest.approx(1e-4)
    assert table.at(4_999).learning_rate == pytest.approx(0.5e-4)
    assert table.at(505_000).learning_rate == pytest.approx(0.5e-4)
    assert table.at(901_000).learning_rate == pytest.approx(0.1e-4)
    objective, optimizer = sections(recipe)
    assert (objective.rate, objective.mask_share, objective.random_share) == (0.15, 0.8, 0.1)
    assert objective.sentence_order
    assert (optimizer.betas, optimizer.weight_decay) == ([0.9, 0.999], 0.01)


def test_the_modernbert_recipe_equals_the_published_one() -> None:
    recipe = read_recipe("modernbert-base")
    table = TrainingPlan(recipe)
    first, second, third = table.phases
    assert [phase.batches.total / 1e9 for phase in table.phases] == pytest.approx([1720, 250, 50], rel=1e-3)
    assert [phase.length for phase in table.phases] == [1024, 8192, 8192]
    assert [phase.batches.rows for phase in table.phases] == [4608, 576, 576]
    assert [phase.rope_theta for phase in table.phases] == [10_000, 160_000, 160_000]
    assert [phase.objective.labelled_share for phase in table.phases] == [0.3] * 3
    # the batch grows over the first 50B tokens, the rate over the first 3B
    assert first.batches.rows_at(0) == 768
    full = first.batches.step_at(50e9)
    assert first.batches.rows_at(full - 1) < first.batches.rows_at(full + 1) == 4608
    warm = first.batches.step_at(3e9)
    assert table.at(warm // 2).learning_rate < 8e-4 * 0.6
    assert table.at(warm).learning_rate == table.at(first.batches.steps - 1).learning_rate == 8e-4
    assert table.at(second.first_step).learning_rate == table.at(third.first_step - 1).learning_rate == 3e-4
    # 1 - sqrt to a thousandth
    middle = third.first_step + third.batches.steps // 4
    assert table.at(middle).learning_rate == pytest.approx(3e-4 * (0.001 + 0.999 / 2), rel=1e-3)
    last = table.at(table.total_steps - 1).learning_rate
    assert 3e-4 * 0.001 <= last < 3e-4 * 0.0012
    _, optimizer = sections(recipe)
    assert (optimizer.kind, optimizer.clip) == ("stable_adamw", None)
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ([0.9, 0.98], 1e-6, 1e-5)
    config = BertBlocksConfig.from_preset(recipe.model.preset, **recipe.model.config)
    assert (config.attention_output_dropout, config.mlp_output_dropout, config.init_kind) == (0.1, 0.0, "megatron")


def test_the_neobert_recipe_equals_the_published_one() -> None:
    recipe = read_recipe("neobert")
    table = TrainingPlan(recipe)
    first, second = table.phases
    assert (first.batches.steps, first.length, first.batches.rows) == (1_000_000, 1024, 2048)
    assert (second.batches.steps, second.length) == (50_000, 4096)
    assert first.mixture == {"all": 1}
    assert second.mixture == {"all": 0.2, "from-1024": 0.4, "from-2048": 0.4}
    assert {source.name: source.min_tokens for source in recipe.corpus.sources} == {
        "all": 0, "from-1024": 1024, "from-2048": 2048,
    }  # fmt: skip
    assert table.at(1_999).learning_rate == pytest.approx(6e-4)
    assert table.at(451_000).learning_rate == pytest.approx(6e-4 * 0.55, rel=1e-3)  # half of the cosine
    assert table.at(900_000).learning_rate == table.at(1_049_999).learning_rate == pytest.approx(6e-5)
    objective, optimizer = sections(recipe)
    assert (objective.rate, objective.mask_share, objective.random_share) == (0.2, 1.0, 0.0)
    assert (optimizer.betas, optimizer.eps, optimizer.clip) == ([0.9, 0.95], 1e-8, 1.0)


def test_the_ngpt_recipe_renormalizes_and_has_no_weight_decay() -> None:
    recipe = read_recipe("ngpt")
    config = BertBlocksConfig.from_preset(recipe.model.preset, **recipe.model.config)
    assert config.ngpt
    assert config.ngpt_renormalize
    assert recipe.optimizer.weight_decay == 0


# ---------------------------------------------------------------------- each of them, made small, trains


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Documents of 1 to 60 sentences, so that phases with a minimum length find long ones."""
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    sentences = ["the cat sat on the mat.", "a dog ran home.", "my aunt sings at night.", "it rains in the town."]
    lines = [
        " ".join(sentences[(number * 7 + place) % 4] for place in range(1 + number * 13 % 60)) for number in range(80)
    ]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("name", NAMES)
def test_a_small_version_of_each_recipe_trains_and_its_model_loads(name: Any, texts: Any, tmp_path: Path) -> None:
    recipe = read_recipe(name)
    sources = [
        {"name": source.name, "files": [str(texts)], "min_tokens": source.min_tokens // 16}
        for source in recipe.corpus.sources
    ]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    overrides = [
        *(f"model.config.{key}={value}" for key, value in {**sizes, "max_position_embeddings": 128}.items()),
        "tokenizer={vocab_size: 100}",
        f"corpus={json.dumps({'sources': sources, 'held_out': 0.2, 'workers': 1})}",
        "run.compile=false",
        "run.micro_batch_tokens=256",
        "run.evaluation.pseudo_perplexity_tokens=0",
        f"run.folder={tmp_path / 'run'}",
    ]
    for index in range(len(recipe.phases)):
        overrides += [f"phases.{index}.duration=2 steps", f"phases.{index}.length={32 * (index + 1)}"]
        overrides.append(f"phases.{index}.batch_tokens=512")
    if recipe.phases[0].batch_warmup:
        overrides.append("phases.0.batch_warmup={start: 256, over: 512 tokens}")
    done = pretrain(read_recipe(name, overrides), Console(quiet=True))
    assert done.outcome.state.step == 2 * len(recipe.phases)
    assert math.isfinite(done.metrics["held_out_loss"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("loss", 0.0) > 0 for line in lines)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model")
    assert model.config.hidden_size == 32
    if name == "modernbert-base":
        assert (model.config.rope_theta, model.config.local_rope_theta) == (160_000, 10_000)
    if name == "ngpt":
        rows = model.model.encoder.layers[0].attention.qkv.weight.norm(dim=1)
        torch.testing.assert_close(rows, torch.ones_like(rows))
