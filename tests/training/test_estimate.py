"""Cost estimates, tested against a published run and the tensors of a real model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM
from bertblocks.analysis import build, training_bytes
from bertblocks.cli.main import app
from bertblocks.training.build import expected_config
from bertblocks.training.estimate import (
    GPUS,
    estimate_run,
    flops_per_token,
)
from bertblocks.training.objective_sections import ReplacedTokens
from bertblocks.training.recipe import read_recipe, recipe_names

#: The local layers of ModernBERT-base.
LOCAL = ", ".join(f"{first}-{first + 1}" for first in range(1, 20, 3))


def test_the_estimate_matches_modernberts_published_run() -> None:
    """1.7T tokens of 1,024 in 194 h, 250B of 8,192 in 40 h and 50B in 12 h, on 8 H100."""
    peak = 8 * GPUS["h100"].flops
    model = build(BertBlocksConfig.from_preset("modernbert-base"), "masked-lm")
    share = flops_per_token(model, 1024, labelled=0.3) * 1.7e12 / (194 * 3600 * peak)
    assert share == pytest.approx(GPUS["h100"].utilization, rel=0.05)
    made = estimate_run(read_recipe("modernbert-base"), "h100", 8, share)
    hours = [phase.hours for phase in made.phases]
    # the recipe's first phase is 1.72T where the hours are given for 1.7T
    assert hours[0] == pytest.approx(194 * 1.72 / 1.7, rel=0.01)
    # the second and third phase had utilizations of their own: at that of the first they are within a quarter
    assert hours[1] == pytest.approx(40, rel=0.25)
    assert hours[2] == pytest.approx(12, rel=0.25)
    assert made.hours == pytest.approx(194 + 40 + 12, rel=0.05)


def test_training_flops_are_six_per_parameter_plus_attention() -> None:
    """The usual estimate of 6 N per token, where N counts the encoder's matrices and the labelled share of the head."""
    model = build(BertBlocksConfig.from_preset("bert-base"), "masked-lm")
    encoder = sum(
        parameter.numel() for name, parameter in model.named_parameters() if "layers" in name and parameter.dim() == 2
    )
    head = 768 * 768 + 768 * 30522
    attention = 12 * 4 * 128 * 768  # of a layer: scores and values, 2 FLOPs each, over 128 keys
    assert flops_per_token(model, 128, 0.15) == pytest.approx(6 * (encoder + 0.15 * head) + 3 * attention)


def test_estimated_memory_equals_that_of_real_tensors() -> None:
    recipe = read_recipe("demo", ["tokenizer.vocab_size=512", "run.precision=fp32"])
    made = estimate_run(recipe, "a100", 1)
    model = BertBlocksForMaskedLM(expected_config(recipe))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    optimizer.step()
    memory = made.phases[0].memory
    assert memory.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert memory.gradients == sum(parameter.grad.nbytes for parameter in model.parameters())  # type: ignore[misc]
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert memory.optimizer == sum(moment.nbytes for moment in moments)
    assert made.parameters == model.num_parameters()


def cost(*overrides: str, count: int = 1, name: str = "modernbert-base") -> Any:
    return estimate_run(read_recipe(name, list(overrides)), "h100", count).phases[0]


def test_each_setting_changes_the_estimate_it_should() -> None:
    plain = cost(count=8)
    sharded = cost("run.parallel=fsdp", count=8)
    assert sharded.memory.weights == plain.memory.weights / 8
    assert sharded.memory.optimizer == plain.memory.optimizer / 8
    assert sharded.memory.activations == plain.memory.activations
    assert cost("run.precision=fp32", count=8).memory.activations == 2 * plain.memory.activations
    assert cost("run.ema=0.999", count=8).memory.weights == 2 * plain.memory.weights
    assert cost("run.micro_batch_tokens=49152", count=8).memory.activations == plain.memory.activations / 2
    muon = cost("optimizer={kind: muon}", count=8)
    assert plain.memory.optimizer / 2 < muon.memory.optimizer < plain.memory.optimizer
    again = cost("run.gradient_checkpointing=true", count=8)
    assert again.memory.activations < plain.memory.activations / 4
    assert again.flops_per_token == pytest.approx(plain.flops_per_token * 4 / 3)
    assert cost(count=16).hours == pytest.approx(plain.hours / 2)
    assert cost("objective.rate=0.15", count=8).flops_per_token < plain.flops_per_token


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_a_plan(name: Any) -> None:
    made = estimate_run(read_recipe(name), "h100", 8)
    assert made.hours > 0
    assert made.flops == sum(phase.tokens * phase.flops_per_token for phase in made.phases)
    assert made.fits


@pytest.mark.parametrize("sharing", ["tied", "none"])
def test_replaced_token_detection_costs_both_models(sharing: str) -> None:
    recipe = read_recipe("electra-small", [f"objective.sharing={sharing}", "run.precision=fp32"])
    made, config = estimate_run(recipe, "h100", 1), expected_config(recipe)
    assert isinstance(recipe.objective, ReplacedTokens)
    generator = build(recipe.objective.generator_config(config), "masked-lm")
    discriminator = build(config, "replaced-token-detection")
    shared = config.vocab_size * config.embedding_size if sharing == "tied" else 0
    assert made.parameters == generator.num_parameters() + discriminator.num_parameters() - shared
    flops = flops_per_token(generator, 128, 0.15) + flops_per_token(discriminator, 128, 1.0)
    assert made.phases[0].flops_per_token == pytest.approx(flops)
    kept = sum(training_bytes(part, 128) for part in (generator, discriminator))
    assert made.phases[0].memory.activations == 128 * kept


def test_objectives_with_a_decoder_have_no_plan() -> None:
    with pytest.raises(ValueError, match="plan does not estimate objective retromae with a decoder"):
        estimate_run(read_recipe("demo", ["objective={kind: retromae}"]), "h100", 1)


@pytest.mark.parametrize(
    ("name", "overrides", "gpu", "kernels"),
    [
        ("modernbert-base", [], "h100", {("0-21", "torch's varlen_attn")}),
        ("modernbert-base", [], "v100", {("0-21", "sdpa, padded")}),
        ("modernbert-base", ["run.precision=fp32"], "a100", {("0-21", "sdpa, padded")}),
        (
            "modernbert-base",
            ["model.config.num_global_tokens=1"],
            "a100",
            {("0, 3, 6, 9, 12, 15, 18, 21", "torch's varlen_attn"), (LOCAL, "FlexAttention")},
        ),
        ("modernbert-base", ["model.config.attention_dropout=0.1"], "h100", {("0-21", "sdpa, padded")}),
    ],
)
def test_a_plan_lists_the_kernel_of_each_kind_of_layer(name: Any, overrides: Any, gpu: Any, kernels: Any) -> None:
    made = estimate_run(read_recipe(name, overrides), gpu, 8)
    found = {(choice.layers, choice.kernel) for choice in made.kernels if choice.part == "attention"}
    assert found == kernels
    assert all(choice.reason for choice in made.kernels if choice.kernel == "sdpa, padded")


@pytest.mark.parametrize(
    ("gpu", "parallel", "kernel", "reason"),
    [
        ("h100", "ddp", "one product", ""),
        ("h100", "fsdp", "one expert after the other", "sharded"),
        ("a100", "ddp", "one expert after the other", "no kernel"),
        ("mi300x", "ddp", "one expert after the other", "no kernel"),
    ],
)
def test_a_plan_says_how_experts_run(gpu: str, parallel: str, kernel: str, reason: str) -> None:
    overrides = ["model.config.layer_overrides={1: {mlp_type: moe}}", "run.precision=bf16", f"run.parallel={parallel}"]
    recipe = read_recipe("demo", overrides)
    found = [choice for choice in estimate_run(recipe, gpu, 1).kernels if choice.part == "experts"]
    assert [(choice.layers, choice.kernel) for choice in found] == [("1", kernel)]
    assert reason in found[0].reason


def test_every_gpu_has_a_share_of_its_peak_with_its_source() -> None:
    for name, gpu in GPUS.items():
        assert 0.1 < gpu.utilization < 0.7, name
        assert estimate_run(read_recipe("modernbert-base"), name, 8).source == gpu.source
    assert "assumed" in GPUS["b200"].source
    assert estimate_run(read_recipe("modernbert-base"), "h100", 8, 0.3).source == "given"


# ---------------------------------------------------------------------- command


def run(*arguments: str, expect: int = 0) -> Any:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == expect, result.output
    return result


def test_plan_prints_the_estimate_as_text_and_json() -> None:
    text = run("modernbert-base", "--gpu", "h100", "--count", "64").stdout
    assert text.startswith("modernbert-base on 64 h100 at 25% of their peak: 149,655,232 parameters")
    assert "context extension" in text
    assert "Expected MFU 25%: ModernBERT-base's first phase" in " ".join(text.split())
    assert "varlen_attn" in text
    assert "which fits" in text
    assert "does not fit" in run("bert", "--gpu", "rtx4090", "--count", "1", "phases.0.batch_tokens=1310720").stdout
    found = json.loads(run("neobert", "phases.0.duration=1000", "--utilization", "0.4", "--json").stdout)
    assert found["utilization"] == 0.4
    assert found["phases"][0]["steps"] == 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--gpu", "h10"], "--gpu is 'h10'; it must be one of v100,"),
        (["demo", "--count", "0"], "--count is 0"),
        (["demo", "--utilization", "40"], "--utilization is 40"),
        (["demo", "--count", "64"], "phase 1 has batches of 16 rows; 64 devices need at least one row each"),
        (["modernbert"], "modernbert is neither a file nor a shipped recipe (did you mean"),
        (["demo", "run.sede=1"], "did you mean 'seed'?"),
    ],
)
def test_mistakes_in_a_recipe_give_one_sentence(arguments: Any, message: Any) -> None:
    assert message in run(*arguments, expect=1).stderr
