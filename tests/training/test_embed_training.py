"""Training of embedding models: several data sets, steps of masked language modeling, and large batches in parts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from bertblocks import Predictor, finetune, load
from bertblocks.cli.main import app
from bertblocks.core.metrics_file import read_metrics
from bertblocks.core.settings import RecipeError
from bertblocks.training.data_sets import DataSets, name_sources
from bertblocks.training.loop import Trainer
from tests.training.conftest import COLOURS, NOUNS

QUICK: dict[str, Any] = {"epochs": 4, "batch_size": 6, "learning_rate": 3e-3, "precision": "fp32"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions with the sentences that answer them, some with negatives."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = []
    for n, noun in enumerate(NOUNS):
        for colour in COLOURS:
            others = [f"the {noun} is {other} ." for other in COLOURS if other != colour]
            texts = {"query": f"which {noun} is {colour} ?", "positive": f"the {noun} is {colour} ."}
            rows.append({**texts, "negatives": others[: n % 3]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def stop_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Raises an error when training reaches a step."""
    step = Trainer._step

    def run(self: Trainer, prepared: Any) -> Any:
        if prepared.step == number:
            raise KeyboardInterrupt
        return step(self, prepared)

    monkeypatch.setattr(Trainer, "_step", run)


# ---------------------------------------------------------------------- several data sets


def test_data_sets_are_drawn_by_their_sizes_and_a_temperature() -> None:
    sets = DataSets.join({"a": range(900), "b": range(90), "c": range(10)})
    for temperature in (1.0, 2.0, 1000.0):
        counts = Counter(sets.choose(step, 0, temperature) for step in range(4000))
        expected = np.array(sets.sizes, dtype=float) ** (1 / temperature)
        shares = np.array([counts[n] for n in range(3)]) / 4000
        np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.03)
    assert [sets.choose(step, 1, 2.0) for step in range(50)] != [sets.choose(step, 0, 2.0) for step in range(50)]


def test_data_sets_have_names() -> None:
    assert name_sources(["a/x.csv", "b/x.csv"]) == {"a/x.csv": "a/x.csv", "b/x.csv": "b/x.csv"}
    assert name_sources({"nli": Path("a/x.csv")}) == {"nli": "a/x.csv"}
    with pytest.raises(ValueError, match=r"x\.csv is given twice"):
        name_sources(["x.csv", "x.csv"])
    with pytest.raises(ValueError, match="The list of files is empty"):
        name_sources([])


def test_each_batch_comes_from_one_data_set_and_each_set_is_scored(
    base: Any, files: Any, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs with negatives and scored pairs; the run is then stopped and continued."""
    seen: list[set[bool]] = []
    step = Trainer._step

    def watch(self: Trainer, prepared: Any) -> Any:
        seen.append({batch.labels is None for batch in prepared.batches})
        return step(self, prepared)

    monkeypatch.setattr(Trainer, "_step", watch)
    train = {"questions": pairs, "colours": files / "embed.csv"}
    settings = {**QUICK, "epochs": 1, "batch_size": 16, "dataset_temperature": 3.0, "evaluations_per_epoch": 4}
    done = finetune("embed", base, train, output=tmp_path / "whole", **settings)
    assert {frozenset(kinds) for kinds in seen} == {frozenset({True}), frozenset({False})}
    assert done.metric == "mean"
    assert done.scores["mean"] == pytest.approx(
        (done.scores["questions/ndcg@10"] + done.scores["colours/spearman"]) / 2
    )
    records = [json.loads(line) for line in (tmp_path / "whole" / "predictions.jsonl").open()]
    assert {record["dataset"] for record in records} == set(train)
    report = (tmp_path / "whole" / "report.html").read_text()
    assert "questions" in report
    assert "colours" in report
    assert json.loads((tmp_path / "whole" / "finetune.json").read_text())["train"] == {
        name: str(path) for name, path in train.items()
    }
    stop_at(monkeypatch, len(seen) - 2)
    with pytest.raises(KeyboardInterrupt):
        finetune("embed", base, train, output=tmp_path / "stopped", **settings)
    monkeypatch.undo()
    finetune("embed", base, train, output=tmp_path / "stopped", **settings)
    stopped, whole = weights(tmp_path / "stopped"), weights(tmp_path / "whole")
    assert all(torch.equal(stopped[name], whole[name]) for name in whole)


def test_the_command_takes_several_files(base: Any, files: Any, pairs: Path, tmp_path: Path) -> None:
    given = ["--train", str(pairs), "--train", str(files / "embed.csv"), "--eval", str(files / "embed.csv")]
    options = ["epochs=0.1", "batch_size=6", "--output", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(app, ["finetune", "embed", "--model", str(base), *given, *options])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["metric"] == "spearman"
    given[1] = str(files / "classify.csv")
    done = CliRunner().invoke(app, ["finetune", "classify", "--model", str(base), *given])
    assert done.exit_code == 1
    assert "classify trains on one data set" in done.output + done.stderr


# ---------------------------------------------------------------------- masked language modeling


def test_masked_language_modeling_is_mixed_in(base: Any, pairs: Path, tmp_path: Path) -> None:
    settings = {**QUICK, "epochs": 20, "patience": None}
    done = finetune("embed", base, pairs, pairs, tmp_path / "out", mlm_every=3, mlm_rate=0.2, **settings)
    assert done.scores["ndcg@10"] > done.baselines["untouched"]["ndcg@10"]
    lines = [line for line in read_metrics(tmp_path / "out" / "metrics.jsonl") if "loss_masked_lm" in line]
    assert lines[-1]["loss_masked_lm"] < lines[0]["loss_masked_lm"]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert not [name for name in weights(tmp_path / "out") if name.startswith(("decoder", "head", "cls"))]
    model, _ = load(tmp_path / "out")
    assert type(model).__name__ == "BertBlocksModel"
    assert Predictor(tmp_path / "out").encode(["the stone is blue ."]).shape == (1, 32)
    with pytest.raises(RecipeError, match=r"mlm_every.* is 3; .* lora_rank must be unset"):
        finetune("embed", base, pairs, pairs, tmp_path / "adapters", mlm_every=3, lora_rank=2)


# ---------------------------------------------------------------------- large batches in parts


@pytest.mark.parametrize("options", [{}, {"mlm_every": 2, "dimensions": [8]}], ids=["plain", "mixed"])
def test_a_batch_in_parts_trains_the_same_weights(base: Any, pairs: Path, tmp_path: Path, options: Any) -> None:
    settings = {**QUICK, "epochs": 1, "batch_size": 9, "patience": None, "learning_rate": 1e-3, **options}
    trained = []
    for name, size in (("whole", None), ("parts", 2)):
        finetune("embed", base, pairs, pairs, tmp_path / name, micro_batch_size=size, keep_checkpoints=True, **settings)
        last = max((tmp_path / name / "checkpoints").glob("step-*"))
        trained.append(load_file(last / "model.safetensors"))
    before = load_file(base / "model.safetensors")
    prefix = "encoder.model." if options else ""
    assert any(not torch.equal(trained[0][prefix + name], before[name]) for name in before)
    for name, weight in trained[0].items():
        torch.testing.assert_close(trained[1][name], weight, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_few_shot_classifiers_train_in_parts_too(base: Any, files: Any, tmp_path: Path) -> None:
    settings = {**QUICK, "epochs": 0.2, "method": "few-shot", "patience": None}
    losses = []
    for name, size in (("whole", None), ("parts", 2)):
        finetune("classify", base, files / "classify.csv", output=tmp_path / name, micro_batch_size=size, **settings)
        losses.append([line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
