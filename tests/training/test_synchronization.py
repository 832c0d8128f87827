"""How often a step waits for its device, counted without a GPU.

A meta tensor has a device of its own and no values, so whatever reads one raises an error: `.item()`, `.tolist()`,
`nonzero`, `if tensor`, an index of booleans and a copy to the host. A step that runs on meta therefore reads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM, SequenceLayout
from bertblocks.models import TASK_MODELS
from bertblocks.nn.backends import FlashBackend, SdpaBackend
from bertblocks.nn.moe import MixtureOfExperts
from bertblocks.nn.ops.gpu import Gpu
from bertblocks.text.encoding import TextTokenizer
from bertblocks.training import objective_sections as sections
from bertblocks.training.backward import BackwardPass
from bertblocks.training.distributed import World
from bertblocks.training.finetune import TASKS
from bertblocks.training.prefetch import PreparedStep
from bertblocks.training.pretraining_task import PretrainingTask
from bertblocks.training.starting_model import load_starting_model
from bertblocks.training.step_results import StepResult, StepResults
from bertblocks.training.training_plan import TrainingPlan
from tests.helpers import tiny_config
from tests.training.helpers import VOCABULARY, Documents, make_recipe, make_trainer, make_vocabulary

META = torch.device("meta")
READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.sum() > 0),
    "float": lambda x: float(x.sum()),
    "nonzero": lambda x: x.nonzero(),
    "index of booleans": lambda x: x[x > 0],
    "copy to the host": lambda x: x.cpu(),
}


@pytest.mark.parametrize("read", READS)
def test_the_guard_sees_every_kind_of_read(read: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        READS[read](torch.ones(3, device="meta"))
    OnDevice.reads = 0
    READS[read](torch.ones(3).as_subclass(OnDevice))
    assert OnDevice.reads == 1


class NoBlockingCopies(TorchFunctionMode):
    """Raises an error where a copy to the device makes the host wait, as copies from memory that is not pinned do.

    Meta has no generators, so those of devices are replaced.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if isinstance(out, Tensor) and out.is_meta:
            from_host = any(isinstance(value, Tensor) and not value.is_meta and value.dim() for value in args)
            is_copy = name in ("to", "copy_", "type_as") and from_host and not kwargs.get("non_blocking")
            if is_copy or name in ("tensor", "as_tensor"):
                raise AssertionError(f"{name} copies to the device")
        return out

    def __enter__(self) -> Any:
        self.generator = torch.Generator
        torch.Generator = lambda device: self.generator()  # type: ignore[assignment, misc]
        return super().__enter__()

    def __exit__(self, *reason: Any) -> None:
        torch.Generator = self.generator  # type: ignore[misc]
        super().__exit__(*reason)


@pytest.mark.parametrize(
    "copy",
    [
        lambda: torch.tensor([1.0], device=META),
        lambda: torch.ones(2).to(META),
        lambda: torch.ones(2, device=META).copy_(torch.ones(2)),
    ],
)
def test_the_guard_sees_blocking_copies(copy: Callable[[], Tensor]) -> None:
    with pytest.raises(AssertionError, match="copies to the device"), NoBlockingCopies():
        copy()
    with NoBlockingCopies():
        torch.ones(2).to(META, non_blocking=True)


class OnDevice(Tensor):
    """A tensor that counts how often its values, or those of what is computed from it, are read on the host."""

    reads = 0
    names = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "nonzero", "cpu", "numpy")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = getattr(func, "__name__", "") in cls.names
        indices = args[1:2] if getattr(func, "__name__", "") == "__getitem__" else ()
        is_read |= any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)
        cls.reads += is_read
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out.as_subclass(Tensor) if is_read and isinstance(out, Tensor) else out


@pytest.fixture
def on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors take the way of an H100's, with torch's own kernels."""
    gpu = Gpu((9, 0))
    backend = FlashBackend(SdpaBackend(), gpu)
    monkeypatch.setattr("bertblocks.nn.encoder.get_backend", lambda *_: backend)
    monkeypatch.setattr("bertblocks.nn.moe.describe_gpu", lambda _: gpu)
    monkeypatch.setattr(MixtureOfExperts, "_count", None)  # does not read meta tensors, but others


MODERN = {
    "block_pos_enc_kind": "rope",
    "embd_pos_enc_kind": "none",
    "local_attention": True,
    "global_attention_every_n_layers": 2,
    "norm_pos": "pre",
    "norm_fn": "rms",
    "mlp_type": "glu",
    "hidden_act": "silu",
    "num_kv_heads": 1,
}
MASKED_LM = sections.MaskedLM()
#: What a step trains: an objective, the config keys of its model, and the recipe's keys.
STEPS: dict[str, tuple[sections.ObjectiveSection, dict[str, Any], list[str]]] = {
    "bert": (MASKED_LM, {}, []),
    "modernbert": (MASKED_LM, MODERN, []),
    "dynamic rope": (
        MASKED_LM,
        {"block_pos_enc_kind": "rope", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        [],
    ),
    "masked_lm with sentence_order": (sections.MaskedLM(sentence_order=True), {}, []),
    "masked_lm with pooled terms": (sections.MaskedLM(bag_of_subwords=1.0, isotropy=1.0), {}, []),
    "sentence_order": (sections.SentenceOrder(), {}, []),
    "causal_lm": (sections.CausalLM(), MODERN, []),
    "replaced_tokens": (sections.ReplacedTokens(), {}, []),
    "replaced_tokens, tied": (sections.ReplacedTokens(sharing="tied"), MODERN, []),
    "masked_diffusion": (sections.MaskedDiffusion(), {"timestep_embedding": True}, []),
    "retromae": (sections.RetroMAE(), {}, []),
    "enhanced_masked_lm": (sections.EnhancedMaskedLM(), MODERN, []),
    "experts": (MASKED_LM, {"mlp_type": "moe", "num_experts": 4, "expert_type": "glu", "hidden_act": "silu"}, []),
    "muon": (MASKED_LM, {}, ["optimizer.kind=muon"]),
    "qk_clip": (MASKED_LM, MODERN, ["optimizer.kind=muon", "optimizer.qk_clip=100"]),
    "checkpointing": (MASKED_LM, MODERN, ["run.gradient_checkpointing=selective"]),
    "average of weights": (MASKED_LM, {}, ["run.ema=0.9"]),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_pretraining_reads_nothing(name: str, tmp_path: Path, on_h100: None) -> None:
    """Forward and backward in micro-batches, clipping and the optimizer, as the training loop runs them."""
    objective, options, overrides = STEPS[name]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    own = {"vocab_size": VOCABULARY, "mask_token_id": 3, "max_position_embeddings": 32, **sizes, **options}
    config = BertBlocksConfig.from_preset("mini", **own)
    model = objective.prepare_model(TASK_MODELS[objective.model_task](config)).bfloat16()
    overrides = ["run.micro_batch_tokens=128", *overrides]
    trainer = make_trainer(tmp_path, *overrides, model=model, world=World(0, 1, META))
    plan = TrainingPlan(make_recipe(*overrides))
    trainer.task = PretrainingTask(plan, {"docstrings": Documents(0)}, [objective.build(make_vocabulary(), config)])
    trainer.scaler = torch.amp.GradScaler("cpu", enabled=False)
    trainer.results = StepResults(is_late=True)
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["fused"] = False  # the fused kernel does not know meta
    items, position = trainer.task.next_items(0, trainer.task.initial_position())
    halves = [trainer.task.collate(0, part) for part in (items[:4], items[4:])]
    with NoBlockingCopies():
        result = trainer._step(PreparedStep(0, halves, position))
    assert result.values.device == META
    assert all(weight.device == META for weight in trainer.model.parameters())


# ---------------------------------------------------------------------- fine-tuning

LISTS = [
    {"query": "which is red ?", "positive": "the house is red .", "negatives": ["the road is blue .", "the tree ."]},
    {"query": "which is blue ?", "positive": "the cloud is blue .", "negatives": ["the stone is green ."]},
]
PAIRS = [{"query": row["query"], "positive": row["positive"]} for row in LISTS]
SCORED = [{**row, "scores": [3.0, 1.0, 0.5][: 1 + len(row["negatives"])]} for row in LISTS]
SENTENCES = [{"text": "the house is red .", "label": "red"}, {"text": "the road is blue .", "label": "blue"}]
ANSWERS = [{"text": ["red"], "answer_start": [13]}, {"text": ["blue"], "answer_start": [12]}]
QUESTIONS = [
    {"id": str(number), "question": "which ?", "context": row["text"], "answers": answers}
    for number, (row, answers) in enumerate(zip(SENTENCES, ANSWERS, strict=True))
]
TAGS = "the O\nhouse O\nis O\nred B-RED\n\nthe O\nroad O\nis O\nblue B-BLUE\n"
SIMILAR = [
    {"text": "the house .", "text_pair": "the tree .", "score": 0.5},
    {"text": "red", "text_pair": "?", "score": 0.1},
]
#: Tasks with their settings, and the examples of a file.
TASK_STEPS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "classify": ("classify", {"class_weights": "balanced"}, SENTENCES),
    "regression": ("classify", {"problem": "regression"}, [{"text": "a red .", "label": n / 2} for n in range(4)]),
    "tag": ("tag", {}, TAGS),
    "answer": ("answer", {}, QUESTIONS),
    "embed": ("embed", {"negative_weight": 2.0, "false_negative_margin": 0.1, "dimensions": [8]}, LISTS),
    "embed, simcse": ("embed", {"loss": "simcse", "dropout": 0.1}, [{"text": "the house ."}, {"text": "red"}]),
    "embed, cosent": ("embed", {}, SIMILAR),
    "embed, cosine": ("embed", {"loss": "cosine"}, SIMILAR),
    "embed, masked_lm": ("embed", {"mlm_every": 2}, PAIRS),
    "rerank": ("rerank", {}, LISTS),
    "rerank, margin_mse": ("rerank", {}, SCORED),
    "rerank, bce": ("rerank", {"loss": "bce"}, LISTS),
    "sparse": ("sparse", {}, LISTS),
    "sparse, learned queries": ("sparse", {"queries": "learned"}, LISTS),
    "sparse, kl": ("sparse", {"loss": "kl"}, SCORED),
    "sparse, margin_mse": ("sparse", {"loss": "margin_mse"}, SCORED),
    "multi": ("multi", {}, LISTS),
    "multi, kl": ("multi", {"loss": "kl"}, SCORED),
    "multi, margin_mse": ("multi", {"loss": "margin_mse"}, SCORED),
}


@pytest.mark.parametrize("name", TASK_STEPS)
def test_a_step_of_fine_tuning_reads_nothing(name: str, base: Path, tmp_path: Path, on_h100: None) -> None:
    """Forward and backward, in two micro-batches."""
    kind, settings, rows = TASK_STEPS[name]
    file = tmp_path / ("train.conll" if isinstance(rows, str) else "train.jsonl")
    file.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    task: Any = TASKS[kind](TASKS[kind].settings_class(**settings))
    examples = task.read(file)
    task = task.for_examples(examples, False, "mean")
    start = load_starting_model(base, task)
    features = task.features(examples, TextTokenizer(start.tokenizer), 32)
    task.before_step(1, 10)
    batches = [task.collate(1, [feature]) for feature in features[:2]]
    counts = {term: sum(batch.counts[term] for batch in batches) for term in batches[0].counts}
    model = start.model.bfloat16().to(META).train()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with NoBlockingCopies():
        means = BackwardPass(task, model, World(0, 1, META), "fp32", scaler, 0, 1, counts).run(batches)
    assert means.device == META
    assert any(weight.grad is not None for weight in model.parameters())


def test_counts_of_the_host_are_summed_without_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of several processes starts with the sum of their tokens, while the GPU computes the step before."""
    groups: list[Any] = []

    def add_three(total: Tensor, group: Any = None) -> None:
        groups.append(group)
        total += 3

    monkeypatch.setattr("torch.distributed.all_reduce", add_three)
    cpus: Any = "the group on CPUs"
    assert World(0, 2, META, cpus).sum([1, 2]) == [4.0, 5.0]
    assert groups == [cpus]


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
@pytest.mark.parametrize("mask", [[[1, 1, 0], [1, 0, 0]], [[1, 1, 1], [1, 1, 1]], [[1, 0, 1], [1, 1, 1]]])
def test_a_padded_batch_is_read_once_and_a_mask_on_the_host_never(mask: Any, dtype: Any) -> None:
    OnDevice.reads = 0
    SequenceLayout.from_mask(torch.tensor(mask, dtype=dtype).as_subclass(OnDevice))
    assert OnDevice.reads == 1
    layout = SequenceLayout.from_mask(torch.tensor(mask, dtype=dtype), device=META)
    assert layout.positions.device == META


@pytest.mark.parametrize("is_flat", [True, False], ids=["flat", "padded"])
def test_models_and_layouts_run_on_fake_tensors(is_flat: bool) -> None:
    options = {"local_attention": True, "block_pos_enc_kind": "rope", "norm_pos": "pre", "attention_backend": "sdpa"}
    model = BertBlocksForMaskedLM(tiny_config(**options))
    bounds = torch.tensor([0, 20, 50])
    with FakeTensorMode(allow_non_fake_inputs=True):
        if is_flat:
            out = model(torch.zeros(50, dtype=torch.long), cu_seqlens=bounds).logits
        else:
            ids = torch.zeros(2, 25, dtype=torch.long)
            out = model(ids, attention_mask=torch.ones_like(ids)).logits
        assert out.shape == ((50, 60) if is_flat else (2, 25, 60))
        out.sum().backward()


# ---------------------------------------------------------------------- late results


def make_result(step: int, loss: float) -> StepResult:
    return StepResult(PreparedStep(step, [], {}), ["a", "b"], 7, 0.1, torch.tensor([loss, 1.0, 0.0, 3.0]))


@pytest.mark.parametrize("is_late", [False, True])
def test_results_are_read_in_order_and_those_before_a_step_alone(is_late: bool) -> None:
    results, entries = StepResults(is_late), [make_result(step, float(step)) for step in range(3)]
    for entry in entries:
        results.add(entry)
    assert list(results.read(before=entries[2])) == entries[:2]
    assert list(results.read(before=entries[2])) == []
    assert list(results.read()) == entries[2:]
    assert (entries[2].means, entries[2].loss, entries[2].norm) == ({"a": 2.0, "b": 1.0}, 3.0, 3.0)
    assert not entries[2].received_signal
