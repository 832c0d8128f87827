"""Estimates the cost of a run from its recipe: parameters, FLOPs, memory per device, throughput and hours.

Nothing is measured. FLOPs count matrix products (`bertblocks.analysis`): three times the forward pass, or four times
with gradient checkpointing. The masked-LM head counts only the tokens that reach it, and the last layer counts all
tokens. Every row counts as one text of full length, so shorter texts cost less than estimated. Memory is weights,
gradients and optimizer state in fp32, plus the activations of one micro-batch, which take half as much in bf16. The
workspace of kernels and the overhead of the allocator are not included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bertblocks.analysis import build, count_flops, training_bytes
from bertblocks.analysis.flops import HEAD
from bertblocks.core.registry import nearest
from bertblocks.models import BertBlocksPreTrainedModel, GeneratorAndDiscriminator, TrainingModel
from bertblocks.training.build import expected_config
from bertblocks.training.optimizer_sections import Muon
from bertblocks.training.recipe import Recipe
from bertblocks.training.training_plan import PhasePlan, TrainingPlan

#: What ModernBERT-base's published first phase implies (1.7T tokens of length 1,024 in 194 hours on 8 H100s).
DEFAULT_UTILIZATION = 0.25


@dataclass(frozen=True)
class Gpu:
    """Peak FLOP/s of dense bf16 matrix products (fp16 for the V100) and bytes of memory, from the data sheets."""

    flops: float
    memory: float


GPUS = {
    "v100": Gpu(125e12, 32e9),
    "a100": Gpu(312e12, 80e9),
    "l40s": Gpu(362e12, 48e9),
    "rtx4090": Gpu(165e12, 24e9),
    "h100": Gpu(989e12, 80e9),
    "h200": Gpu(989e12, 141e9),
    "b200": Gpu(2250e12, 192e9),
    "mi300x": Gpu(1307e12, 192e9),
}


@dataclass(frozen=True)
class Memory:
    """Bytes per device."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class PhaseCost:
    """The cost of one phase."""

    name: str
    length: int
    steps: int
    tokens: int
    flops_per_token: float
    tokens_per_second: float
    hours: float
    #: Sequences of full length per device and forward pass.
    micro_batch: int
    memory: Memory


@dataclass(frozen=True)
class RunEstimate:
    """The cost of a recipe on a number of devices of one kind."""

    recipe: str
    gpu: str
    count: int
    utilization: float
    parameters: int
    flops: float
    hours: float
    phases: list[PhaseCost]

    @property
    def memory(self) -> float:
        """The peak memory per device over all phases."""
        return max(phase.memory.total for phase in self.phases)

    @property
    def fits(self) -> bool:
        return self.memory <= GPUS[self.gpu].memory


def estimate_run(recipe: Recipe, gpu: str, count: int, utilization: float = DEFAULT_UTILIZATION) -> RunEstimate:
    """The cost of a recipe on `count` devices that reach `utilization` of their peak.

    Example:
        >>> from bertblocks.training.recipe import read_recipe
        >>> estimate = estimate_run(read_recipe("modernbert-base"), "h100", 8)
        >>> estimate.parameters, estimate.fits
        (149655232, True)
    """
    if gpu == "cpu":
        raise ValueError(
            f"--gpu is 'cpu'; plan estimates GPUs ({', '.join(GPUS)}). For a CPU, start `bertblocks pretrain` with "
            "this recipe: its progress shows the tokens per second and the time left."
        )
    if gpu not in GPUS:
        raise ValueError(f"--gpu is {gpu!r}; it must be one of {', '.join(GPUS)}{nearest(gpu, GPUS)}.")
    if count < 1:
        raise ValueError(f"--count is {count}; it must be at least 1.")
    if not 0 < utilization <= 1:
        raise ValueError(f"--utilization is {utilization:g}; it must be above 0 and at most 1.")
    with torch.device("meta"):
        model = recipe.objective.prepare_model(build(expected_config(recipe), recipe.objective.model_task))
    if isinstance(model, TrainingModel) and not isinstance(model, GeneratorAndDiscriminator):
        objective = recipe.objective
        raise ValueError(f"plan does not estimate objective {objective.kind} with {objective.added_parts}.")
    speed = count * GPUS[gpu].flops * utilization
    phases = [_cost(recipe, model, phase, count, speed) for phase in TrainingPlan(recipe).phases]
    return RunEstimate(
        recipe=recipe.name,
        gpu=gpu,
        count=count,
        utilization=utilization,
        parameters=model.num_parameters(),
        flops=sum(phase.flops_per_token * phase.tokens for phase in phases),
        hours=sum(phase.hours for phase in phases),
        phases=phases,
    )


def flops_per_token(model: BertBlocksPreTrainedModel, length: int, labelled: float, passes: int = 3) -> float:
    """FLOPs of `passes` forward passes in which a share `labelled` of the tokens reaches the head, per token."""
    forward = count_flops(model, length)
    return passes * (forward["total"] - (1 - labelled) * forward[HEAD]) / length


def _parts(model: BertBlocksPreTrainedModel) -> list[BertBlocksPreTrainedModel]:
    """The models that a step runs one after the other, the one whose head gets the labelled tokens first."""
    return [model.generator, model.discriminator] if isinstance(model, GeneratorAndDiscriminator) else [model]


def _cost(recipe: Recipe, model: BertBlocksPreTrainedModel, phase: PhasePlan, count: int, speed: float) -> PhaseCost:
    rows = phase.batches.rows
    if rows < count:
        raise ValueError(f"{phase.name} has batches of {rows} rows; {count} devices need at least one row each.")
    micro_batch = -(-rows // count)
    if recipe.run.micro_batch_tokens is not None:
        micro_batch = min(micro_batch, max(recipe.run.micro_batch_tokens // phase.length, 1))
    passes = 4 if recipe.run.gradient_checkpointing else 3
    predictor, *others = _parts(model)
    per_token = flops_per_token(predictor, phase.length, phase.objective.labelled_share, passes)
    per_token += sum(flops_per_token(part, phase.length, 1.0, passes) for part in others)
    return PhaseCost(
        name=phase.name,
        length=phase.length,
        steps=phase.batches.steps,
        tokens=phase.batches.total,
        flops_per_token=per_token,
        tokens_per_second=speed / per_token,
        hours=phase.batches.total * per_token / speed / 3600,
        micro_batch=micro_batch,
        memory=_memory(recipe, model, phase.length, micro_batch, count),
    )


def _memory(recipe: Recipe, model: BertBlocksPreTrainedModel, length: int, micro_batch: int, count: int) -> Memory:
    parameters = model.num_parameters()
    shards = {"fsdp": count, "hybrid": min(recipe.run.shard_over or count, count)}.get(recipe.run.parallel, 1)
    encoders = [part.base_model.encoder for part in _parts(model)]
    matrices = sum(weight.numel() for encoder in encoders for weight in encoder.parameters() if weight.dim() == 2)
    # AdamW keeps two moments per parameter; Muon keeps one for the matrices inside layers
    moments = 2 * parameters - (matrices if isinstance(recipe.optimizer, Muon) else 0)
    average = parameters if recipe.run.ema else 0
    kept = sum(_kept_bytes(recipe, part, length) for part in _parts(model))
    in_fp32 = recipe.run.precision == "fp32"
    return Memory(
        weights=4 * (parameters + average) / shards,
        gradients=4 * parameters / shards,
        optimizer=4 * moments / shards,
        activations=micro_batch * kept * (1.0 if in_fp32 else 0.5),
    )


def _kept_bytes(recipe: Recipe, model: BertBlocksPreTrainedModel, length: int) -> int:
    """The activations of one sequence in fp32 that the backward pass needs."""
    kept = training_bytes(model, length)
    if not recipe.run.gradient_checkpointing:
        return kept
    layers = model.config.num_hidden_layers
    return 4 * length * model.config.hidden_size * layers + kept // layers
