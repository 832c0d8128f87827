"""Distillation from files to a student: every method learns, resumes to the same weights, and rejects bad input."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, BertConfig
from typer.testing import CliRunner

from bertblocks import (
    BertBlocksConfig,
    BertBlocksForMaskedLM,
    BertBlocksForSequenceClassification,
    BertBlocksModel,
    Predictor,
    distill,
    load,
)
from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings, read_settings, write_settings
from bertblocks.checkpoints.sentence_transformers.cross_encoder import (
    CrossEncoderSettings,
    read_cross_encoder,
    save_cross_encoder,
)
from bertblocks.cli.main import app
from bertblocks.core.storage import read_json
from bertblocks.nn.embedding_head import Dense, EmbeddingHead
from bertblocks.training.distillation import run as distill_run
from bertblocks.training.distillation.models import load_teacher, make_student
from tests.small_tokenizers import wrap
from tests.training.conftest import COLOURS, NOUNS

QUICK: dict[str, Any] = {"batch_size": 16, "learning_rate": 5e-3, "held_out": 0.2, "precision": "fp32"}
TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "initializer_range": 0.2,
}


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill_run, "SPEED_TEXTS", 8)
    monkeypatch.setattr(distill_run, "SPEED_ROUNDS", 1)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    lines = [f"the {noun} is {colour} . which {other} ?" for noun in NOUNS for colour in COLOURS for other in NOUNS[:4]]
    path.write_text("".join(f"{line}\n" for line in [*lines, lines[0], ""]))
    return path


@pytest.fixture(scope="module")
def teachers(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of each kind, with 4 layers and the tokenizer of whole words."""
    root = tmp_path_factory.mktemp("teachers")
    torch.manual_seed(3)
    models = {
        "embedder": BertBlocksModel(BertBlocksConfig(**TINY, pooler=False)),
        "masked-lm": BertBlocksForMaskedLM(BertBlocksConfig(**TINY)),
        "reranker": BertBlocksForSequenceClassification(BertBlocksConfig(**TINY, num_labels=1)),
        "classifier": BertBlocksForSequenceClassification(
            BertBlocksConfig(**TINY, id2label=dict(enumerate(COLOURS)), problem_type="single_label_classification")
        ),
    }
    for name, model in models.items():
        shutil.copytree(base, root / name, ignore=lambda *_: ["config.json", "model.safetensors"])
        model.save_pretrained(root / name)
    layers = (Dense(32, 24, True, "Tanh"),)
    prompts = {"query": "which ", "document": "the "}
    write_settings(root / "embedder", EmbeddingSettings("mean", 64, prompts, None, layers), 32)
    return root


@pytest.fixture(scope="module")
def rankings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rankings") / "queries.jsonl"
    rows = [
        {
            "query": f"which {noun} ?",
            "positive": f"the {noun} is {colour} .",
            "negatives": [f"the {o} ." for o in NOUNS],
        }
        for noun in NOUNS
        for colour in COLOURS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------------- learning


METHODS = {"embeddings": "embedder", "relations": "embedder", "hidden": "masked-lm"}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_lowers_its_loss_and_writes_a_checkpoint(
    method: str, teachers: Path, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = distill(teachers / METHODS[method], layers=2, train=texts, method=method, output=out, epochs=4, **QUICK)
    assert done.scores["held_out_loss"] < 0.8 * done.start["held_out_loss"]
    assert done.parameters["student"] < done.parameters["teacher"]
    assert not done.remarks
    model, tokenizer = load(out)
    assert model.config.num_hidden_layers == 2
    assert tokenizer is not None
    recorded = read_json(out / "results.json")
    assert recorded["scores"] == done.scores
    assert {"report.html", "README.md", "metrics.jsonl", "distill.json"} <= set(recorded["files"])
    assert not (out / "checkpoints").exists()
    assert (out / "modules.json").is_file() == (METHODS[method] == "embedder")


def test_a_student_of_another_size_and_tokenizer_makes_vectors_of_the_teachers_size(
    teachers: Path, texts: Path, tmp_path: Path
) -> None:
    student = tmp_path / "student"
    options = {**TINY, "vocab_size": 120, "hidden_size": 16, "num_hidden_layers": 1}
    BertBlocksModel(BertBlocksConfig(**options)).save_pretrained(student)
    wrap("wordpiece").save_pretrained(student)
    out = tmp_path / "out"
    done = distill(teachers / "embedder", student, train=texts, output=out, epochs=6, **QUICK)
    assert done.scores["cosine"] > done.start["cosine"]
    lines = [line for line in texts.read_text().splitlines() if line]
    settings = read_settings(out)
    assert [type(layer).__name__ for layer in settings.layers] == ["Dense"]
    assert settings.prompts == {"query": "which ", "document": "the "}  # the student takes the teacher's place
    vectors, targets = (Predictor(folder).encode(lines) for folder in (out, teachers / "embedder"))
    assert vectors.shape == targets.shape == (len(lines), 24)
    assert (vectors * targets).sum(1).mean() == pytest.approx(done.scores["cosine"], abs=0.1)


@pytest.mark.slow
def test_sentence_transformers_opens_a_student_with_a_projection(teachers: Path, texts: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    config = tmp_path / "student.json"
    BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2).to_json_file(config)
    out = tmp_path / "out"
    distill(teachers / "embedder", config, train=texts, output=out, epochs=0.5, **QUICK)
    lines = texts.read_text().splitlines()[:5]
    theirs = SentenceTransformer(str(out), device="cpu").encode(lines)
    assert np.allclose(Predictor(out, dtype=torch.float32).encode(lines), theirs, atol=1e-5)


@pytest.mark.slow
def test_sentence_transformers_opens_a_distilled_reranker(teachers: Path, rankings: Path, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    config = tmp_path / "student.json"
    BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2).to_json_file(config)
    out = tmp_path / "out"
    distill(teachers / "reranker", config, train=rankings, method="scores", output=out, epochs=0.5, **QUICK)
    documents = ["the house is red .", "the tree ."]
    found = Predictor(out, dtype=torch.float32).rerank("which house ?", documents)
    theirs = CrossEncoder(str(out), device="cpu").predict([("which house ?", text) for text in documents])
    assert [one.score for one in sorted(found, key=lambda one: one.index)] == pytest.approx(theirs.tolist(), abs=1e-5)


def test_each_text_is_learned_with_each_prompt(teachers: Path, tmp_path: Path, texts: Path) -> None:
    out = tmp_path / "out"
    roles = ["query", "document"]
    done = distill(teachers / "embedder", layers=1, train=texts, output=out, prompt_names=roles, epochs=0.5, **QUICK)
    count = len({line for line in texts.read_text().splitlines() if line})
    notes = read_json(out / "run.json")["notes"]
    assert f"0 embeddings of the teacher were cached, {2 * count} were computed" in notes
    assert done.chosen["steps"] == -(-(2 * (count - round(0.2 * count))) // 2 // 16)


def test_a_reranker_learns_scores_and_margins(teachers: Path, rankings: Path, tmp_path: Path) -> None:
    options = {**QUICK, "epochs": 8, "batch_size": 3, "cache": tmp_path / "cache", "eval": rankings}
    settings: dict[str, Any] = {"train": rankings, "method": "scores", "layers": 2}
    for loss in ("mse", "margin-mse"):
        out = tmp_path / loss
        done = distill(teachers / "reranker", **settings, output=out, loss=loss, max_documents=4, **options)
        assert done.scores["held_out_loss"] < 0.8 * done.start["held_out_loss"]
        assert set(done.teacher) == {"ndcg@10", "mrr@10", "map"} == set(done.scores) - {"held_out_loss"}
    assert "0 were computed" in str(read_json(tmp_path / "margin-mse" / "run.json")["notes"])
    opened = AutoModelForSequenceClassification.from_pretrained(tmp_path / "mse")
    assert opened.config.num_labels == 1


@pytest.mark.parametrize("student", [{"layers": 1}, {"student": "mini"}], ids=["cut", "preset"])
def test_modules_behind_a_teachers_encoder_make_its_scores(
    student: dict[str, Any], teachers: Path, rankings: Path, tmp_path: Path
) -> None:
    model, tokenizer = load(teachers / "embedder", "base")
    settings = CrossEncoderSettings("cls", 64, layers=(Dense(32, 1, True, "Identity"),), activation="Tanh")
    assert isinstance(model, BertBlocksModel)
    assert tokenizer is not None
    model.embedding_head = EmbeddingHead("cls", 32, settings.layers)
    save_cross_encoder(model, tmp_path / "teacher", tokenizer, settings)
    out = tmp_path / "out"
    options = {**QUICK, "epochs": 4, "batch_size": 3}
    done = distill(tmp_path / "teacher", train=rankings, method="scores", output=out, **student, **options)
    assert done.scores["held_out_loss"] < done.start["held_out_loss"]
    written = read_cross_encoder(out)
    assert written.activation == "Tanh"
    assert len(written.layers) == ("layers" in student)
    assert len(Predictor(out).rerank("which house ?", ["the house", "the tree"])) == 2


def test_cached_scores_are_the_logits_of_pairs(teachers: Path, rankings: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    distill(
        teachers / "reranker",
        layers=1,
        train=rankings,
        method="scores",
        output=tmp_path / "out",
        cache=cache,
        epochs=0.2,
        **QUICK,
    )
    parts = [load_file(path)["values"] for path in cache.rglob("part-*.safetensors")]
    model, tokenizer = load(teachers / "reranker")
    rows = [json.loads(line) for line in rankings.read_text().splitlines()]
    pairs = {(row["query"], text) for row in rows for text in (row["positive"], *row["negatives"])}
    inputs = [tokenizer(*pair, return_tensors="pt") for pair in pairs]  # type: ignore[misc]
    expected = sorted(model(encoded["input_ids"]).logits.item() for encoded in inputs)
    found = sorted(torch.cat(parts).flatten().tolist())
    assert found == pytest.approx(expected, abs=0.05)  # the teacher may run in bf16


def test_a_classifier_is_scored_on_labels_next_to_its_teacher(
    teachers: Path, texts: Path, files: Path, tmp_path: Path
) -> None:
    done = distill(
        teachers / "classifier",
        layers=2,
        train=texts,
        method="hidden",
        eval=files / "classify.csv",
        output=tmp_path / "out",
        epochs=1,
        **QUICK,
    )
    assert set(done.teacher) == set(done.scores) - {"held_out_loss", "held_out_hidden", "held_out_logits"}
    assert "accuracy" in done.teacher
    assert load(tmp_path / "out")[0].config.id2label == dict(enumerate(COLOURS))


# ---------------------------------------------------------------------- cache and resume


def test_a_second_run_does_not_run_the_teacher(
    teachers: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    stream = Predictor.stream

    def count(self: Predictor, method: str, inputs: Any, **options: Any) -> Any:
        if options.get("prompt") == "":  # only the cache asks without a prompt
            asked.extend(inputs)
        return stream(self, method, inputs, **options)

    monkeypatch.setattr(Predictor, "stream", count)
    for number, seen in enumerate([72, 72]):
        distill(
            teachers / "embedder",
            layers=1,
            train=texts,
            output=tmp_path / str(number),
            epochs=0.2,
            seed=number,
            **QUICK,
        )
        assert len(asked) == seen


class Crash(Exception):
    """Stands for a process that is killed between two steps."""


@pytest.mark.parametrize(("method", "ending"), [("embeddings", "crash"), ("hidden", "signal"), ("relations", "crash")])
def test_a_stopped_run_resumes_to_the_same_weights(
    method: str, ending: str, teachers: Path, texts: Path, tmp_path: Path
) -> None:
    def run(name: str, on_event: Any = None) -> Any:
        settings = {**QUICK, "epochs": 7, "evaluations": 3, "dropout": 0.1, "cache": tmp_path / "cache"}
        if method == "hidden":  # an odd width, so that the projections are resumed too
            settings["student"] = "mini"
        else:
            settings["layers"] = 2
        return distill(
            teachers / METHODS[method],
            train=texts,
            method=method,
            output=tmp_path / name,
            on_event=on_event,
            **settings,
        )

    def stop(event: dict[str, Any]) -> None:
        if event.get("step", 0) >= 20:
            if ending == "crash":
                raise Crash
            signal.raise_signal(signal.SIGTERM)

    run("whole")
    if ending == "crash":
        with pytest.raises(Crash):
            run("stopped", stop)
    else:
        assert run("stopped", stop).signal == signal.SIGTERM
    assert not (tmp_path / "stopped" / "results.json").exists()
    done = run("stopped")
    assert done.signal is None
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


# ---------------------------------------------------------------------- students


def test_a_preset_gets_the_teachers_tokenizer_and_its_vocabulary(teachers: Path) -> None:
    teacher = load_teacher(teachers / "embedder", "base")
    student = make_student("mini", None, teacher)
    assert student.model.config.vocab_size == len(teacher.tokenizer)
    assert student.model.config.mask_token_id == teacher.tokenizer.mask_token_id
    assert student.tokenizer is teacher.tokenizer


def test_cutting_does_not_change_the_teacher(teachers: Path) -> None:
    teacher = load_teacher(teachers / "embedder", "base")
    student = make_student(None, 2, teacher)
    theirs = {weight.data_ptr() for weight in teacher.model.parameters()}
    assert not theirs & {weight.data_ptr() for weight in student.model.parameters()}
    assert student.embedding.layers[0] is not teacher.embedding.layers[0]
    assert all(weight.requires_grad for weight in student.model.parameters())


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": "no/such/teacher"}, "no/such/teacher is not a checkpoint folder: it does not exist"),
        ({"layers": 9}, "layers is 9; the model has 4 layers, so it must be between 1 and 4"),
        ({"layers": None}, "student and layers: neither is given"),
        ({"student": "mini"}, "student and layers: both are given"),
        ({"layers": None, "student": "minni"}, "student is 'minni'; it must be .* a preset.*mini"),
        ({"method": "embedding"}, "method is 'embedding'.*did you mean"),
        ({"train": "empty.txt"}, "there are 0 different texts; at least 2 are needed"),
        ({"train": "missing.txt"}, "missing.txt"),
        ({"max_length": 999}, "max_length is 999; the two models read at most 64 tokens"),
        ({"prompt_names": ["querry"]}, "prompt_names has 'querry'.*query"),
        ({"relation_heads": 4}, "has no key 'relation_heads'"),
        ({"method": "relations", "teacher_layer": 5}, "teacher_layer is 5; the teacher has 4 layers"),
        ({"method": "relations", "relation_heads": 5}, "relation_heads is 5, which does not divide 32.*; 4 would"),
        ({"method": "scores"}, "has no trained sequence-classification head"),
        ({"method": "hidden", "teacher": "masked-lm", "eval": "texts.txt"}, "is evaluated by its loss alone"),
        ({"method": "relations", "layers": None, "student": "other"}, "vocabularies differ, such as in"),
    ],
)
def test_bad_input_gives_one_sentence_and_writes_nothing(
    changes: dict[str, Any],
    message: str,
    teachers: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "texts.txt").write_text(texts.read_text())
    options: dict[str, Any] = {
        "teacher": "embedder",
        "layers": 2,
        "train": texts,
        "output": tmp_path / "out",
        **changes,
    }
    if changes.get("student") == "other":
        options["student"] = tmp_path / "other"
        BertBlocksModel(BertBlocksConfig(**{**TINY, "vocab_size": 120})).save_pretrained(options["student"])
        wrap("wordpiece").save_pretrained(options["student"])
    if (teachers / options["teacher"]).is_dir():
        options["teacher"] = teachers / options["teacher"]
    with pytest.raises((OSError, ValueError), match=message) as caught:
        distill(**options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_reranker_must_have_one_label_and_margins_need_two_documents(
    teachers: Path, rankings: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="The teacher has 3 labels; method scores needs a reranker"):
        distill(teachers / "classifier", layers=1, train=rankings, method="scores", output=tmp_path / "out")
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("query,document\nwhich house ?,the house\nwhich tree ?,the tree\n")
    with pytest.raises(ValueError, match="2 queries have one document; use loss=mse"):
        distill(
            teachers / "reranker", layers=1, train=pairs, method="scores", loss="margin-mse", output=tmp_path / "out"
        )


def test_a_folder_holds_one_run(teachers: Path, texts: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"train": texts, "output": tmp_path / "out", **QUICK}
    distill(teachers / "embedder", layers=1, epochs=0.2, **options)
    with pytest.raises(ValueError, match="holds a finished run; choose another output"):
        distill(teachers / "embedder", layers=1, epochs=0.2, **options)


# ---------------------------------------------------------------------- command


def test_the_command_prints_a_table_and_events(teachers: Path, texts: Path, files: Path, tmp_path: Path) -> None:
    command = ["distill", "--teacher", str(teachers / "embedder"), "--layers", "2", "--train", str(texts)]
    command += ["--epochs", "1", "batch_size=16", "--eval", str(files / "embed.csv"), "--output"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "table")])
    assert done.exit_code == 0, done.output
    for shown in ("teacher", "start", "student", "held out loss", "cosine", "spearman", "texts/s", "times as fast"):
        assert shown in done.output
    done = CliRunner().invoke(app, [*command, str(tmp_path / "json"), "--json"])
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[-1]["event"] == "result"
    assert set(events[-1]["speeds"]) == {"teacher", "student"}
    again = CliRunner().invoke(app, ["runs", str(tmp_path), "--json"])
    assert {row["task"] for row in json.loads(again.stdout)} == {"distill"}


def test_the_command_lists_settings_and_says_what_is_missing(texts: Path) -> None:
    listed = CliRunner().invoke(app, ["distill", "--method", "relations", "list"])
    assert "relation_heads" in listed.output
    helped = CliRunner().invoke(app, ["distill", "--method=hidden", "--help"])
    assert "temperature" in helped.output
    missing = CliRunner().invoke(app, ["distill", "--train", str(texts)])
    assert missing.exit_code == 1
    assert "--teacher is missing" in missing.output
