"""Estimates the cost of a run from its recipe: parameters, FLOPs, memory per device, throughput and hours.

Nothing is measured. FLOPs count matrix products (`bertblocks.analysis`): three times the forward pass, or four times
with gradient checkpointing. The masked-LM head counts only the tokens that reach it, and the last layer counts all
tokens. Every row counts as one text of full length, so shorter texts cost less than estimated. Memory is weights,
gradients and optimizer state in fp32, plus the activations of one micro-batch, which take half as much in bf16. The
workspace of kernels and the overhead of the allocator are not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bertblocks.analysis import build, count_flops, training_bytes
from bertblocks.analysis.flops import HEAD
from bertblocks.core.registry import nearest
from bertblocks.models import BertBlocksPreTrainedModel, GeneratorAndDiscriminator, TrainingModel
from bertblocks.nn.backends.kernels import KERNELS, AttentionCall, choose_kernel, explain
from bertblocks.nn.moe import MixtureOfExperts
from bertblocks.nn.ops.gpu import Gpu, has_varlen_attention
from bertblocks.training.build import expected_config
from bertblocks.training.compilation import DTYPES, why_not_whole_model
from bertblocks.training.optimizer_sections import Muon
from bertblocks.training.recipe import Recipe
from bertblocks.training.training_plan import PhasePlan, TrainingPlan

MODERNBERT = "ModernBERT-base's first phase: 1.7T tokens of length 1,024 in 194 hours on 8 H100 (Warner et al., 2024)"
LLM_FOUNDRY = "MPT-125m at length 1,024 on 8 A100 (benchmarking/README.md of mosaicml/llm-foundry), a decoder"
ASSUMED = f"assumed from another GPU, because no figure for this one is known: {MODERNBERT}"


@dataclass(frozen=True)
class GpuModel:
    """Peak FLOP/s of dense bf16 matrix products (fp16 for the V100) and bytes of memory, from the data sheets, and the
    share of the peak (MFU) that a published run of a model of about 150M parameters reached.
    """

    flops: float
    memory: float
    capability: tuple[int, int]
    utilization: float = 0.25
    source: str = ASSUMED
    is_rocm: bool = False


GPUS = {
    "v100": GpuModel(125e12, 32e9, (7, 0)),
    "a100": GpuModel(312e12, 80e9, (8, 0), 0.41, LLM_FOUNDRY),
    "l40s": GpuModel(362e12, 48e9, (8, 9)),
    "rtx4090": GpuModel(165e12, 24e9, (8, 9)),
    "h100": GpuModel(989e12, 80e9, (9, 0), 0.25, MODERNBERT),
    "h200": GpuModel(989e12, 141e9, (9, 0)),
    "b200": GpuModel(2250e12, 180e9, (10, 0)),
    "mi300x": GpuModel(1307e12, 192e9, (9, 4), is_rocm=True),
}


@dataclass(frozen=True)
class KernelChoice:
    """The kernel that a part of the model will run on a GPU with this torch and no further packages, and why."""

    part: str
    layers: str
    kernel: str
    reason: str


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
    #: Where the utilization comes from.
    source: str
    kernels: list[KernelChoice]

    @property
    def memory(self) -> float:
        """The peak memory per device over all phases."""
        return max(phase.memory.total for phase in self.phases)

    @property
    def fits(self) -> bool:
        return self.memory <= GPUS[self.gpu].memory


def estimate_run(recipe: Recipe, gpu: str, count: int, utilization: float | None = None) -> RunEstimate:
    """The cost of a recipe on `count` devices that reach `utilization` of their peak, by default a published share.

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
    source = "given" if utilization is not None else GPUS[gpu].source
    utilization = GPUS[gpu].utilization if utilization is None else utilization
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
        source=source,
        kernels=[choice for part in _parts(model) for choice in choose_kernels(part, recipe, gpu)],
    )


def choose_kernels(model: BertBlocksPreTrainedModel, recipe: Recipe, gpu: str) -> list[KernelChoice]:
    """What attention and the rest of each kind of layer will run on a GPU."""
    device = Gpu(GPUS[gpu].capability, gpu, GPUS[gpu].is_rocm, has_varlen_attention())
    precision = recipe.run.precision
    if precision == "auto":
        precision = "bf16" if device.capability >= (8, 0) else "fp32"
    kinds: dict[tuple[str, str], list[int]] = {}
    for index, group in enumerate(model.base_model.encoder.order):
        attention = model.base_model.encoder.layers[group].attention
        call = AttentionCall(attention.pattern, DTYPES[precision], attention.head_dim, attention.dropout > 0)
        kernel = choose_kernel(call, device)
        reason = explain(call, device, torch.device("cuda")) if kernel is None else ""
        label = "sdpa, padded" if kernel is None else KERNELS[kernel][0]
        kinds.setdefault((label, reason), []).append(index)
    choices = [KernelChoice("attention", _ranges(layers), *kind) for kind, layers in kinds.items()]
    choices += _choose_for_experts(model, device, DTYPES[precision], recipe.run.parallel != "ddp")
    every = _ranges(range(len(model.base_model.encoder.order)))
    why = why_not_whole_model(model, device, precision) if recipe.run.compile else "run.compile is false"
    fused = "torch.compile, whole layers" if why is None else "Liger where it is installed, own kernels, or torch"
    return [*choices, KernelChoice("norms, GLU, rotary", every, fused, why or "")]


def _choose_for_experts(
    model: BertBlocksPreTrainedModel, gpu: Gpu, dtype: torch.dtype, is_sharded: bool
) -> list[KernelChoice]:
    kinds: dict[str, list[int]] = {}
    for index, group in enumerate(model.base_model.encoder.order):
        mixture = model.base_model.encoder.layers[group].mlp
        if isinstance(mixture, MixtureOfExperts):
            has_kernel = mixture.is_grouped(torch.zeros(0, dtype=dtype), gpu)
            reason = "" if has_kernel else "torch has no kernel for this GPU, precision or size"
            reason = "the weights are sharded" if has_kernel and is_sharded else reason
            kinds.setdefault(reason, []).append(index)
    names = {reason: "one expert after the other" if reason else "one product" for reason in kinds}
    return [KernelChoice("experts", _ranges(layers), names[reason], reason) for reason, layers in kinds.items()]


def _ranges(indices: Sequence[int]) -> str:
    """Write indices in ranges.

    Example:
        >>> _ranges([0, 1, 2, 5, 7, 8])
        '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


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
    passes = 4 if recipe.run.gradient_checkpointing is True else 3
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
    if recipe.run.gradient_checkpointing is not True:  # what a selective run keeps is at most this
        return kept
    layers = model.config.num_hidden_layers
    return 4 * length * model.config.hidden_size * layers + kept // layers
