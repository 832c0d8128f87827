"""Gradients of a batch that is encoded in parts equal those of the whole batch, on one process and two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bertblocks.data.hashing import combine
from bertblocks.training.distributed import World
from bertblocks.training.precision import autocast
from bertblocks.training.prefetch import split_micro_batches
from tests.training.gradients import CASES, Case, compute, make

ALONE = World(0, 1, torch.device("cpu"))
DROPOUT = {"embedding_dropout": 0.3, "attention_dropout": 0.2, "mlp_output_dropout": 0.2}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert set(found) == set(expected)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert scale > 0
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 5])
def test_gradients_of_parts_equal_those_of_the_whole_batch(name: str, size: int) -> None:
    losses, expected = compute(CASES[name], ALONE, None)
    found_losses, found = compute(CASES[name], ALONE, size)
    assert found_losses == pytest.approx(losses, rel=1e-5)
    assert_equal(found, expected)


@pytest.mark.parametrize("kind", ["negatives", "single"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.03), ("fp16", 0.03)])
def test_the_second_pass_has_the_dropout_of_the_first(kind: str, precision: str, tolerance: float) -> None:
    """The reference keeps the graphs of all parts, with the seeds that the loop gives them."""
    case = Case({"loss": "simcse"} if kind == "single" else {}, kind, rates=DROPOUT)
    task, model, features = make(case)
    batches = [task.collate(0, part) for part in split_micro_batches(features, ALONE, 5)]
    outputs = []
    for number, batch in enumerate(batches):
        torch.manual_seed(int(combine("dropout", 0, 0, 0, number)[0] >> 1))
        with autocast(precision, torch.device("cpu")):
            outputs.append(task.encode(model, batch))
    assert not torch.equal(outputs[0][0], outputs[0][len(outputs[0]) // 2]), "dropout is on"
    loss = task.compare(outputs, batches)["loss"] / len(features)
    loss.backward()
    losses, found = compute(case, ALONE, 5, precision)
    assert losses["loss"] == pytest.approx(loss.item(), rel=1e-5 if precision == "fp32" else 0.02)
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert_equal(found, expected, tolerance)


def test_a_batch_of_many_queries_is_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["negatives with a weight and a margin"]
    _, expected = compute(case, ALONE, None)
    monkeypatch.setattr("bertblocks.tasks.embed.losses.QUERIES", 5)
    assert_equal(compute(case, ALONE, 4)[1], expected)


def test_two_processes_compute_the_gradients_of_one(tmp_path: Path, warm_python: list[str]) -> None:
    """In parts of two examples; processes have different numbers of negatives."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    done = subprocess.run(
        [*command, *warm_python, "-m", "tests.training.gradients", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, case in CASES.items():
        found: dict[str, Any] = load_file(tmp_path / f"{name}.safetensors")
        losses, expected = compute(case, ALONE, None)
        assert found.pop("loss").item() == pytest.approx(sum(losses.values()), rel=1e-5), name
        assert_equal(found, expected)


@pytest.mark.slow
def test_a_large_batch_needs_little_more_memory_than_a_part() -> None:
    def measure(*arguments: int) -> int:
        command = [sys.executable, "-m", "tests.training.gradients", "memory", *map(str, arguments)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    part, cached, plain = measure(64), measure(1024, 64), measure(1024)
    assert cached < plain / 4
    assert cached < 2 * part
