"""The start of fine-tuning: its scores, its defaults, and what is returned if training does not improve it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from bertblocks import BertBlocksForSequenceClassification, Predictor, finetune, load
from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings, read_settings, write_settings
from bertblocks.cli.main import app
from bertblocks.evaluation.evaluate import evaluate
from bertblocks.nn.embedding_head import Dense, EmbeddingNorm
from bertblocks.tasks.classify.task import ClassifyTask
from bertblocks.tasks.embed.examples import EmbeddingExample
from bertblocks.tasks.embed.task import EmbedTask
from bertblocks.tasks.settings import ClassifySettings, EmbedSettings
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError
from bertblocks.text.tokenizers import load_tokenizer_if_any
from bertblocks.training.data_sets import DataSets
from bertblocks.training.finetune import OLD_DEFAULTS, _request
from bertblocks.training.finetune_defaults import choose
from bertblocks.training.finetune_run import Files, compare_with_start
from bertblocks.training.starting_model import add_lora
from bertblocks.training.supervised_task import SupervisedTask
from tests.helpers import tiny_config
from tests.training.conftest import COLOURS, NOUNS


@pytest.fixture(scope="module")
def encoder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny encoder with the files of a sentence encoder."""
    folder = tmp_path_factory.mktemp("encoder") / "model"
    shutil.copytree(base, folder)
    write_settings(folder, EmbeddingSettings("mean", 64), 32)
    return folder


@pytest.fixture(scope="module")
def projected(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny encoder with the last token, two modules behind it, and a prompt for each role."""
    folder = tmp_path_factory.mktemp("projected") / "model"
    shutil.copytree(base, folder)
    torch.manual_seed(1)
    layers = (Dense(32, 24, True, "Tanh"), EmbeddingNorm(24))
    prompts = {"query": "which ", "document": "the "}
    write_settings(folder, EmbeddingSettings("last", 64, prompts, None, layers), 32)
    return folder


def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def write_pairs(path: Path) -> Path:
    pairs = [(f"the {noun} is {colour} .", f"{noun} {colour} ?") for noun in NOUNS for colour in COLOURS]
    path.write_text("".join(json.dumps({"query": a, "positive": b}) + "\n" for a, b in pairs))
    return path


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}], ids=["full", "lora"])
def test_modules_behind_the_pooling_are_trained_and_written(projected: Path, tmp_path: Path, settings: Any) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    options = {"epochs": 12, "batch_size": 6, "learning_rate": 1e-2, "precision": "fp32", **settings}
    done = finetune("embed", projected, pairs, pairs, tmp_path / "out", **options)
    assert done.chosen["best_step"] > 0
    before, after = read_settings(projected), read_settings(tmp_path / "out")
    assert (after.pooling, after.prompts) == (before.pooling, before.prompts)
    assert not any("embedding_head" in name for name in weights(tmp_path / "out"))
    for layer, trained in zip(before.layers, after.layers, strict=True):
        for name, tensor in layer.state_dict().items():
            assert not torch.equal(trained.state_dict()[name], tensor), name
    again = evaluate("embed", tmp_path / "out", pairs)
    assert again.scores[done.metric] == pytest.approx(done.scores[done.metric], abs=1e-4)


def test_sentence_transformers_opens_trained_modules(projected: Path, tmp_path: Path) -> None:
    import sentence_transformers

    pairs = write_pairs(tmp_path / "pairs.jsonl")
    finetune("embed", projected, pairs, pairs, tmp_path / "out", epochs=1, batch_size=6, learning_rate=1e-2)
    texts = ["the ball is red .", "which colour ?"]
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    ours = Predictor(tmp_path / "out", dtype=torch.float32).encode(texts, prompt_name="document")
    np.testing.assert_allclose(ours, theirs.encode_document(texts), atol=1e-5)


def test_a_start_that_is_kept_keeps_its_modules(projected: Path, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    finetune("embed", projected, pairs, pairs, tmp_path / "out", epochs=1, batch_size=6, learning_rate=1e-12)
    texts = ["the ball is red .", "which colour ?"]
    found, expected = (Predictor(path, dtype=torch.float32).encode(texts) for path in (tmp_path / "out", projected))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_prompts_of_both_roles_are_part_of_training(projected: Path) -> None:
    """First texts are queries and the others documents; texts with scores, and single ones, have the default prompt."""
    tokenizer = load_tokenizer_if_any(projected)
    task = EmbedTask(EmbedSettings())
    task.use_model(load(projected)[0], read_settings(projected))
    pair = EmbeddingExample(["is", "is"], None, "here")
    assert tokenizer is not None
    texts = [tokenizer.decode(feature.ids) for feature in task.features([pair], TextTokenizer(tokenizer), 16)[0]]
    assert texts == ["[CLS] which is [SEP]", "[CLS] the is [SEP]"]
    scored = EmbeddingExample(["is", "is"], 0.5, "here")
    texts = [tokenizer.decode(feature.ids) for feature in task.features([scored], TextTokenizer(tokenizer), 16)[0]]
    assert texts == ["[CLS] is [SEP]", "[CLS] is [SEP]"]
    alone = EmbedTask(EmbedSettings(loss="simcse", dropout=0.1))
    alone.use_model(load(projected)[0], read_settings(projected))
    single = EmbeddingExample(["is"], None, "here")
    texts = [tokenizer.decode(feature.ids) for feature in alone.features([single], TextTokenizer(tokenizer), 16)[0]]
    assert texts == ["[CLS] is [SEP]", "[CLS] is [SEP]"]


def test_few_shot_classifiers_name_the_poolings_that_they_have(projected: Path, files: Path, tmp_path: Path) -> None:
    shutil.copytree(projected, tmp_path / "copy")
    (tmp_path / "copy" / "1_Pooling" / "config.json").write_text('{"pooling_mode": "weightedmean"}')
    with pytest.raises(DataError, match="it pools by cls, last, mean or max, not by weighted_mean; use method=full"):
        finetune("classify", tmp_path / "copy", files / "classify.csv", output=tmp_path / "out", method="few-shot")


def test_training_that_harms_embeddings_returns_the_start(base: Path, files: Path, tmp_path: Path) -> None:
    """The scores are the untouched model's cosines, so it has a correlation of 1."""
    rows = [line.split(",") for line in (files / "embed.csv").read_text().splitlines()[1:]]
    predictor = Predictor(base, dtype=torch.float32)
    first, second = (predictor.encode([row[side] for row in rows]) for side in (0, 1))
    cosines = (first * second).sum(axis=1)
    path = tmp_path / "own.csv"
    lines = [f"{row[0]},{row[1]},{cosine:.7f}\n" for row, cosine in zip(rows, cosines, strict=True)]
    path.write_text("text,text_pair,score\n" + "".join(lines))
    done = finetune("embed", base, path, output=tmp_path / "out", epochs=1, learning_rate=0.05, precision="fp32")
    assert done.baselines["untouched"] == done.scores
    assert done.scores["spearman"] > 0.999
    assert done.chosen["best_step"] == 0
    assert done.remarks[0].startswith("Training did not improve the spearman of")
    assert results(tmp_path / "out")["remarks"] == done.remarks
    assert "Training did not improve" in (tmp_path / "out" / "report.html").read_text()
    saved = Predictor(tmp_path / "out", dtype=torch.float32).encode([rows[0][0]])
    np.testing.assert_allclose(saved, predictor.encode([rows[0][0]]), atol=1e-6)


def test_a_classifier_starts_as_its_probe_and_is_returned_if_training_harms(
    base: Path, files: Path, tmp_path: Path
) -> None:
    arguments = ("classify", base, files / "classify.csv", files / "classify.csv")
    # one step that destroys everything: the probe is the best model
    done = finetune(*arguments, tmp_path / "out", epochs=0.1, learning_rate=50.0, clip=None, precision="fp32")
    assert done.chosen["best_step"] == 0
    assert done.scores["accuracy"] > 0.9
    before = weights(base)
    after = load(tmp_path / "out", "sequence-classification")[0].state_dict()
    assert all(torch.equal(after[f"model.{name}"], value) for name, value in before.items())
    assert evaluate("classify", tmp_path / "out", files / "classify.csv").scores == done.scores


def test_a_random_head_is_never_returned_untrained(base: Path, files: Path, tmp_path: Path) -> None:
    done = finetune("classify", base, files / "classify.csv", output=tmp_path / "out", head="random", epochs=0.1)
    assert done.chosen["best_step"] > 0
    assert set(done.baselines) == {"majority", "linear probe"}


def test_a_result_below_a_baseline_says_so() -> None:
    baselines = {"majority": {"accuracy": 0.73}, "linear probe": {"accuracy": 0.74}}
    assert compare_with_start("accuracy", {"accuracy": 0.75}, baselines) == []
    (remark,) = compare_with_start("accuracy", {"accuracy": 0.735}, baselines)
    assert remark.startswith("The accuracy of 0.735 is below that of linear probe (0.74): try ")
    (remark,) = compare_with_start("accuracy", {"accuracy": 0.59}, baselines)
    assert "below that of majority (0.73) and linear probe (0.74)" in remark
    both = compare_with_start("accuracy", {"accuracy": 0.7}, baselines, is_start=True)
    assert [remark.partition(" ")[0] for remark in both] == ["Training", "The"]


def test_a_trained_head_with_the_same_labels_is_the_start(base: Path, files: Path, tmp_path: Path) -> None:
    finetune("tag", base, files / "tag.conll", output=tmp_path / "first", epochs=4, learning_rate=5e-3)
    done = finetune("tag", tmp_path / "first", files / "tag.conll", output=tmp_path / "again", epochs=0.2)
    assert list(done.baselines) == ["untouched", "majority", "by word"]
    assert done.scores["f1"] >= done.baselines["untouched"]["f1"]


def test_the_test_file_is_scored_once_and_chooses_nothing(
    base: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test.csv"
    path.write_text("text,label\n" + "the tree is red .,red\n" * 3 + "the stone is blue .,green\n" * 7)
    seen: list[int] = []
    evaluate_task = ClassifyTask.evaluate

    def count(self: Any, predictor: Any, examples: Any) -> Any:
        seen.append(len(examples))
        return evaluate_task(self, predictor, examples)

    options: dict[str, Any] = {"epochs": 2, "precision": "fp32"}
    finetune("classify", base, files / "classify.csv", output=tmp_path / "without", **options)
    monkeypatch.setattr(ClassifyTask, "evaluate", count)
    done = finetune("classify", base, files / "classify.csv", output=tmp_path / "with", test=path, **options)
    assert seen.count(10) == 1
    assert seen[-1] == 10
    assert done.test == evaluate("classify", tmp_path / "with", path).scores
    assert results(tmp_path / "with")["test"] == done.test
    one, two = weights(tmp_path / "without"), weights(tmp_path / "with")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert done.scores == results(tmp_path / "without")["scores"]


def test_the_command_shows_the_start_next_to_the_result(base: Path, files: Path, tmp_path: Path) -> None:
    arguments = ["finetune", "classify", "--model", base, "--train", files / "classify.csv", "--output", tmp_path / "o"]
    text = CliRunner().invoke(app, [*map(str, arguments), "--test", str(files / "classify.csv"), "epochs=0.5"]).output
    assert "Training: full, 0.5 epochs of 216 examples in batches of 16, learning rate 5e-05" in text
    header = next(line for line in text.splitlines() if "majority" in line)
    assert header.split() == ["score", "majority", "linear", "probe", "result", "test"]


# ---------------------------------------------------------------------- defaults


@pytest.mark.parametrize(
    ("settings", "examples", "parameters", "is_gentle", "expected"),
    [
        (ClassifySettings(), 300, 10e6, False, (11, 16, 5e-5)),
        (ClassifySettings(), 100, 85e6, False, (20, 16, 5e-5)),
        (ClassifySettings(), 4_000, 10e6, False, (10, 32, 2.5e-4)),
        (ClassifySettings(), 10_000, 10e6, False, (4, 32, 2.5e-4)),
        (ClassifySettings(epochs=2, batch_size=8, learning_rate=1e-3), 300, 10e6, False, (2, 8, 1e-3)),
        (ClassifySettings(), 5, 10e6, False, (20, 5, 5e-5)),
        (EmbedSettings(), 800, 10e6, True, (3, 32, 2e-5)),
        (EmbedSettings(), 800, 10e6, False, (10, 16, 5e-5)),
    ],
)
def test_defaults_follow_from_task_model_and_examples(
    settings: Any, examples: int, parameters: float, is_gentle: bool, expected: Any
) -> None:
    found = choose(settings, "full", examples, int(parameters), is_gentle)
    assert (found.epochs, found.batch_size, found.learning_rate) == pytest.approx(expected)
    gentle = settings.learning_rate or 2e-5
    assert choose(settings, "few-shot", examples, int(parameters), is_gentle).learning_rate == gentle


def test_the_defaults_of_0_1_0_are_kept_for_its_runs() -> None:
    settings = ClassifySettings(batch_size=32, patience=None)
    found = choose(settings, "full", 300, int(10e6), False, version=None)
    assert (found.epochs, found.batch_size, found.learning_rate, found.patience) == (10, 32, 2.5e-4, None)


def test_a_run_keeps_the_defaults_that_it_began_with() -> None:
    sentence_encoder = {"settings": ClassifySettings(), "method": "full", "is_sentence_encoder": True}
    rates = [
        choose(**sentence_encoder, examples=examples, parameters=int(10e6), version=version).learning_rate
        for version, examples in ((2, 4000), (3, 4000), (3, 5000))
    ]
    assert rates == [2.5e-4, 8e-5, 2.5e-4]
    known = {"defaults": 2}
    assert _request("classify", Files("model", "train.csv", None), ClassifySettings(), known)["defaults"] == 2
    assert _request("classify", Files("model", "train.csv", None), ClassifySettings(), {})["defaults"] == 3


def test_a_run_of_version_0_1_0_continues_with_its_defaults(base: Path, files: Path, tmp_path: Path) -> None:
    """The explicit settings in the second run are what 0.1.0 did by default."""
    arguments = ("classify", base, files / "classify.csv", files / "classify.csv")
    old = {**OLD_DEFAULTS, "learning_rate": 2.5e-4}
    finetune(*arguments, tmp_path / "explicit", epochs=1, precision="fp32", **old)
    out = tmp_path / "old"
    out.mkdir()
    request = json.loads((tmp_path / "explicit" / "finetune.json").read_text())
    for key in ("defaults", "test", "method", "head", "held_out"):
        del request[key]
    (out / "finetune.json").write_text(json.dumps({**request, "learning_rate": None}))
    (out / "checkpoints" / "step-00000000").mkdir(parents=True)
    (out / "checkpoints" / "step-00000000" / "complete.json").write_text("{")  # the run has begun
    done = finetune(*arguments, out, epochs=1, precision="fp32")
    assert (done.chosen["batch_size"], done.chosen["learning_rate"], done.chosen["patience"]) == (32, 2.5e-4, None)
    one, two = weights(tmp_path / "explicit"), weights(out)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("settings", "examples", "steps"),
    [
        ({"epochs": 4}, 320, 20),  # once per epoch
        ({"epochs": 20}, 160, 20),  # 200 steps, ten times
        ({"epochs": 20, "evaluations_per_epoch": 2}, 160, 5),
        ({"epochs": 20}, 16, 2),
    ],
)
def test_evaluations_are_at_most_ten_by_default(settings: Any, examples: int, steps: int) -> None:
    chosen = ClassifySettings(**settings)
    choices = choose(chosen, "full", examples, int(10e6))
    sets = DataSets.join({"x": [None] * examples})
    task = SupervisedTask(ClassifyTask(chosen), chosen, sets, sets, None, choices, 64)  # type: ignore[arg-type]
    assert task.steps_per_evaluation == steps


# ---------------------------------------------------------------------- few-shot


def test_few_shot_learns_and_resumes_to_the_same_weights(
    encoder: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (files / "classify.csv").read_text().splitlines()[:31]
    path = tmp_path / "few.csv"
    path.write_text("\n".join(lines) + "\n")
    options: dict[str, Any] = {"epochs": 4, "batch_size": 8, "learning_rate": 5e-3, "precision": "fp32"}
    arguments = ("classify", encoder, path, files / "classify.csv")
    done = finetune(*arguments, tmp_path / "whole", **options)
    assert done.chosen["method"] == "few-shot"
    assert done.scores["accuracy"] >= max(scores["accuracy"] for scores in done.baselines.values())
    assert Predictor(tmp_path / "whole").classify(["the stone is blue ."])[0].labels == ["blue"]
    stop_at_third_evaluation(monkeypatch)
    with pytest.raises(RuntimeError, match="stopped"):
        finetune(*arguments, tmp_path / "stopped", **options)
    monkeypatch.undo()
    resumed = finetune(*arguments, tmp_path / "stopped", **options)
    assert resumed.scores == done.scores
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(one[name], two[name]) for name in one)


def stop_at_third_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first evaluation is the start's, the second is followed by a checkpoint."""
    calls: list[None] = []
    evaluate_task = ClassifyTask.evaluate

    def stop(self: Any, predictor: Any, examples: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("stopped")
        return evaluate_task(self, predictor, examples)

    monkeypatch.setattr(ClassifyTask, "evaluate", stop)


def test_a_run_that_starts_as_a_probe_resumes_to_the_same_weights(
    base: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("classify", base, files / "classify.csv")
    done = finetune(*arguments, output=tmp_path / "whole", epochs=3, precision="fp32")
    stop_at_third_evaluation(monkeypatch)
    with pytest.raises(RuntimeError, match="stopped"):
        finetune(*arguments, output=tmp_path / "stopped", epochs=3, precision="fp32")
    monkeypatch.undo()
    resumed = finetune(*arguments, output=tmp_path / "stopped", epochs=3, precision="fp32")
    assert (resumed.scores, resumed.chosen) == (done.scores, done.chosen)
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(("head", "has_adapter"), [("pooler", True), ("none", False)])
def test_lora_adapts_the_pooler_that_a_classifier_reads(head: str, has_adapter: bool) -> None:
    """A sentence encoder's pooler was trained for nothing: STS-B stays at 0.2 if it is frozen, and reaches 0.76."""
    model = BertBlocksForSequenceClassification(tiny_config(classifier_head=head))
    trained = {name for name, parameter in add_lora(model, 2).named_parameters() if parameter.requires_grad}
    assert any("pooler.dense.lora_A" in name for name in trained) == has_adapter
    assert any("layers.0.attention.qkv.lora_A" in name for name in trained)
    assert all("lora_" in name or "classifier" in name for name in trained)
