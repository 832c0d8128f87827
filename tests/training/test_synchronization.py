"""How often a step waits for its device, counted without a GPU.

A meta tensor has a device of its own and no values, so whatever reads one raises an error: `.item()`, `.tolist()`,
`nonzero`, `if tensor`, an index of booleans and a copy to the host. A step that runs on meta therefore reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bertblocks import BertBlocksForMaskedLM, BertBlocksForSequenceClassification, SequenceLayout
from bertblocks.data.flat_batch import FlatBatch
from bertblocks.nn.backends import FlashBackend
from bertblocks.nn.ops.gpu import Gpu
from bertblocks.training.distributed import World
from bertblocks.training.prefetch import PreparedStep
from bertblocks.training.step_results import StepResult, StepResults
from tests.helpers import tiny_config
from tests.training.helpers import make_model, make_recipe, make_task, make_trainer

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
def on_a100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors take the way of an A100's, with torch's own kernel."""
    backend = FlashBackend(gpu=Gpu((8, 0)))
    monkeypatch.setattr("bertblocks.nn.encoder.get_backend", lambda *_: backend)


MODELS: dict[str, dict[str, Any]] = {
    "bert": {},
    "modernbert": {
        "block_pos_enc_kind": "rope",
        "embd_pos_enc_kind": "none",
        "local_attention": True,
        "global_attention_every_n_layers": 2,
        "norm_pos": "pre",
        "norm_fn": "rms",
        "mlp_type": "glu",
        "hidden_act": "silu",
        "num_kv_heads": 1,
    },
    "dynamic rope": {"block_pos_enc_kind": "rope", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_step_on_flat_input_reads_nothing(name: str, tmp_path: Path, on_a100: None) -> None:
    """Forward and backward in micro-batches, clipping and the optimizer, as the training loop runs them."""
    model = make_model(num_attention_heads=2, max_position_embeddings=16, **MODELS[name]).bfloat16()
    world = World(0, 1, META)
    trainer = make_trainer(tmp_path, "run.micro_batch_tokens=128", model=model, world=world)
    trainer.scaler = torch.amp.GradScaler("cpu", enabled=False)
    trainer.results = StepResults(is_late=True)
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["fused"] = False  # the fused kernel does not know meta
    task = make_task(make_recipe())
    items, position = task.next_items(0, task.initial_position())
    halves = [task.collate(0, part) for part in (items[:4], items[4:])]
    result = trainer._step(PreparedStep(0, halves, position))
    assert result.values.device == META
    assert all(weight.device == META for weight in model.parameters())


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


def test_a_classifier_on_flat_input_reads_nothing(on_a100: None) -> None:
    model = BertBlocksForSequenceClassification(tiny_config(num_attention_heads=2)).bfloat16().to(META).train()
    batch = FlatBatch.from_sequences([[5, 6, 7], [8, 9]], labels=torch.tensor([0, 1])).to(META)
    assert batch.cu_seqlens.device.type == "cpu"
    assert batch.input_ids.device == META
    model(**batch.inputs, labels=batch.labels).loss.backward()


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
