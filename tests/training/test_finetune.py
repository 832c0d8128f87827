"""Fine-tuning from files to a model: quality on separable data, resuming, settings, bad input."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
)
from typer.testing import CliRunner

from bertblocks import BertBlocksConfig, BertBlocksModel, finetune, load
from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings, write_settings
from bertblocks.cli.main import app
from bertblocks.core.metrics_file import read_metrics
from bertblocks.core.settings import RecipeError
from bertblocks.core.storage import read_json_lines
from bertblocks.data.hashing import combine, permute
from bertblocks.evaluation.evaluate import evaluate
from bertblocks.nn.embedding_head import Dense
from bertblocks.tasks.predictor import Predictor
from bertblocks.tasks.settings import ClassifySettings
from bertblocks.text.tables import DataError
from bertblocks.training import starting_model
from bertblocks.training.finetune import _request, is_finished
from bertblocks.training.finetune_run import Files
from bertblocks.training.run_folder import RunFolderError
from bertblocks.training.supervised_task import split_examples
from tests.reports.cards import check
from tests.training.conftest import COLOURS, NOUNS

QUICK = {"epochs": 8, "batch_size": 16, "learning_rate": 5e-3}


@pytest.mark.parametrize(
    ("task", "file", "metric", "least"),
    [
        ("classify", "classify.csv", "accuracy", 0.95),
        ("classify", "regress.csv", "spearman", 0.9),
        ("tag", "tag.conll", "f1", 0.95),
        ("answer", "answer.jsonl", "exact_match", 90.0),
        ("embed", "embed.csv", "spearman", 0.7),
    ],
)
def test_every_task_learns_an_easy_problem(
    base: Any,
    files: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: Any,
    file: Any,
    metric: Any,
    least: Any,
) -> None:
    done = finetune(task, base, files / file, output=tmp_path / "out", **QUICK)
    assert done.scores[metric] >= least
    assert json.loads((tmp_path / "out" / "results.json").read_text())["scores"] == done.scores
    report = (tmp_path / "out" / "report.html").read_text()
    assert "Scores on the evaluation examples" in report
    assert "://" not in re.sub(r"<script type=.module.>.*?</script>", "", report, flags=re.DOTALL)
    records = read_json_lines(tmp_path / "out" / "predictions.jsonl")
    assert len(records) == (18 if task == "answer" else 24)  # questions about the same passage stay together
    assert done.confidence is not None
    low, high = done.confidence
    assert low <= done.scores[done.metric] <= high
    card = check(tmp_path / "out", monkeypatch)
    scores = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert scores == pytest.approx(done.scores, abs=1e-6)
    assert {result.dataset_name for result in card.data.eval_results} == {file}
    assert read_metrics(tmp_path / "out" / "metrics.jsonl")[0]["step"] == 0
    facts = json.loads((tmp_path / "out" / "run.json").read_text())
    assert facts["data"] == {str(files / file): hashlib.sha256((files / file).read_bytes()).hexdigest()}
    predictor = Predictor(tmp_path / "out", dtype=torch.float32)
    text = "the stone is blue ."
    if file == "classify.csv":
        assert predictor.classify([text])[0].labels == ["blue"]
    elif task == "tag":
        assert [(entity.label, entity.text) for entity in predictor.tag([text])[0]] == [("BLUE", "blue")]
    elif task == "answer":
        answer = predictor.answer([("which colour ?", text)])[0]
        assert (answer.text, text[answer.start : answer.end]) == ("blue", "blue")
    elif task == "embed":
        vectors = predictor.encode([text, "the road is blue .", "the road is red ."])
        assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]


def test_cosines_are_trained_on_the_scale_of_the_scores(base: Any, files: Any, tmp_path: Path) -> None:
    rows = (files / "embed.csv").read_text().splitlines()
    stars = [f"{row.rpartition(',')[0]},{1 + 4 * float(row.rpartition(',')[2])}" for row in rows[1:]]
    path = tmp_path / "stars.csv"
    path.write_text("\n".join([rows[0], *stars]))
    plain = finetune("embed", base, files / "embed.csv", output=tmp_path / "plain", loss="cosine", **QUICK)
    scaled = finetune("embed", base, path, output=tmp_path / "scaled", loss="cosine", **QUICK)
    assert scaled.scores["spearman"] == pytest.approx(plain.scores["spearman"], abs=1e-6)
    path.write_text("text,text_pair,score\na,b,3.5\nb,c,3.5\n")
    with pytest.raises(DataError, match=r"stars\.csv: all scores are 3\.5; loss=cosine needs"):
        finetune("embed", base, path, path, tmp_path / "same", loss="cosine")


def test_simcse_trains_on_single_texts_and_is_scored_on_pairs(base: Any, files: Any, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    sentences = [f"the {noun} is {colour} ." for noun in NOUNS for colour in COLOURS]
    texts.write_text("".join(json.dumps({"text": sentence}) + "\n" for sentence in sentences))
    settings = {"epochs": 8, "batch_size": 6, "learning_rate": 1e-3, "loss": "simcse", "temperature": 0.1}
    done = finetune("embed", base, texts, files / "embed.csv", tmp_path / "out", dropout=0.2, **settings)
    assert done.metric == "spearman"
    assert done.scores["spearman"] >= done.baselines["untouched"]["spearman"]
    losses = [line["loss"] for line in read_metrics(tmp_path / "out" / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < losses[0]
    assert load(tmp_path / "out")[0].config.embedding_dropout == load(base)[0].config.embedding_dropout
    with pytest.raises(DataError, match=r"texts\.jsonl line \d+: a single text cannot be scored; loss=simcse needs"):
        finetune("embed", base, texts, output=tmp_path / "alone", dropout=0.2, **settings)
    with pytest.raises(ValueError, match=r"loss is 'simcse', which needs dropout, but the model has none; set dropout"):
        finetune("embed", base, texts, files / "embed.csv", tmp_path / "none", **settings)


def test_pairs_are_scored_by_retrieval_and_sentence_transformers_loads_the_model(
    base: Any, files: Any, tmp_path: Path
) -> None:
    import sentence_transformers

    rng = random.Random(1)
    pairs = [(f"the {noun} is {colour} .", f"which {noun} is {colour} ?") for noun in NOUNS for colour in COLOURS]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"query": a, "positive": b}) + "\n" for a, b in rng.sample(pairs, len(pairs))))
    done = finetune(
        "embed", base, path, path, tmp_path / "out", epochs=30, batch_size=6, learning_rate=5e-3, dimensions=[8, 16]
    )
    assert done.metric == "ndcg@10"
    assert done.scores["recall@10"] > 0.9
    texts = [text for pair in pairs for text in pair]
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(texts)
    ours = Predictor(tmp_path / "out", dtype=torch.float32).encode(texts)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_settings_change_the_trained_weights(base: Any, files: Any, tmp_path: Path) -> None:
    before = load_file(base / "model.safetensors")

    def trained(name: Any, **settings: Any) -> Any:
        options = {"epochs": 0.5, "head": "random", **settings}  # a probe might be the best model
        finetune("classify", base, files / "classify.csv", output=tmp_path / name, **options)
        return load(tmp_path / name, "sequence-classification")[0].state_dict()

    frozen = trained("frozen", freeze_layers=1)
    for name, values in before.items():
        is_frozen = "embedding" in name or ".layers.0." in name
        assert torch.equal(frozen[f"model.{name}"], values) == is_frozen, name
    lora = trained("lora", lora_rank=2, learning_rate=1e-2)
    assert not any("lora" in name for name in lora)
    changed = {name for name, values in before.items() if not torch.equal(lora[f"model.{name}"], values)}
    assert changed
    assert all(
        "layers" in name and name.endswith(("qkv.weight", "out.weight", "up.weight", "down.weight")) for name in changed
    )
    decayed = trained("decayed", layer_decay=0.1)
    moved = {name: (decayed[f"model.{name}"] - values).abs().mean() for name, values in before.items()}
    assert moved["encoder.layers.0.mlp.up.weight"] < 0.3 * moved["encoder.layers.1.mlp.up.weight"]


@pytest.mark.parametrize(
    ("task", "auto_class"),
    [("classify", AutoModelForSequenceClassification), ("tag", AutoModelForTokenClassification)],
)
def test_transformers_loads_a_fine_tuned_bert_without_bertblocks(
    base: Any, files: Any, tmp_path: Path, task: Any, auto_class: Any
) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = BertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, **sizes
    )
    BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    finetune(task, tmp_path / "bert", files / ALL_TASKS[task], output=tmp_path / "out", epochs=0.5, precision="fp32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "bert"
    theirs = auto_class.from_pretrained(tmp_path / "out").eval()
    ours = load(tmp_path / "out")[0].eval()
    inputs = tokenizer(["the stone is blue ."], return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(ours(inputs["input_ids"]).logits, theirs(**inputs).logits, atol=1e-5, rtol=1e-4)
    assert theirs.config.id2label == ours.config.id2label


def test_several_seeds_give_a_mean_and_a_confidence_interval(base: Any, files: Any, tmp_path: Path) -> None:
    done = finetune("classify", base, files / "classify.csv", output=tmp_path / "out", epochs=1, seeds=3)
    values = [run["accuracy"] for run in done.runs]
    assert len(values) == 3
    assert done.scores["accuracy"] == pytest.approx(np.mean(values))
    assert done.intervals["accuracy"] == pytest.approx(4.302653 * np.std(values, ddof=1) / np.sqrt(3), rel=1e-5)
    assert (tmp_path / "out" / "seed-2" / "model.safetensors").is_file()
    code, text = run_cli(
        *("classify", "--model", base, "--train", files / "classify.csv", "epochs=0.2", "seeds=2"),
        *("--output", tmp_path / "two"),
    )
    assert code == 0
    assert f"{tmp_path / 'two' / 'seed-*'}, one folder per seed" in " ".join(text.split()).replace("/ ", "/")


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    share=st.floats(0.05, 0.5),
    seed=st.integers(0, 5),
)
def test_held_out_examples_are_stratified(sizes: Any, share: Any, seed: Any) -> None:
    labels = [str(label) for label, size in enumerate(sizes) for _ in range(size)]
    assume(len(labels) > 1)
    examples = list(range(len(labels)))
    train, held_out = split_examples(examples, [str(number) for number in examples], labels, share, seed)
    assert sorted(train + held_out) == examples
    for label, size in enumerate(sizes):
        count = sum(labels[number] == str(label) for number in held_out)
        assert abs(count - len(held_out) * size / len(labels)) < 1


def test_results_record_the_chosen_settings(base: Any, files: Any, tmp_path: Path) -> None:
    """The base model has fewer than 15 million parameters inside its layers."""
    options = {"epochs": 0.5, "precision": "fp32", "head": "random", "batch_size": 32}
    finetune("classify", base, files / "classify.csv", output=tmp_path / "out", **options)
    chosen = json.loads((tmp_path / "out" / "results.json").read_text())["chosen"]
    assert (chosen["method"], chosen["epochs"], chosen["batch_size"]) == ("full", 0.5, 32)
    assert chosen["learning_rate"] == 5e-5
    assert (chosen["precision"], chosen["device"], chosen["processes"]) == ("fp32", "cpu", 1)
    assert chosen["threads"] == torch.get_num_threads()
    assert chosen["steps"] == chosen["best_step"] == 4  # half of 216 examples in batches of 32


@pytest.mark.parametrize(("names", "positive"), [(("match", "not_match"), "match"), (("0", "1"), "1")])
def test_f1_is_computed_for_the_positive_label(base: Any, tmp_path: Path, names: Any, positive: Any) -> None:
    path = tmp_path / "pairs.csv"
    gold = [*names, names[0]]
    rows = "".join(f"a {word},{name}\n" for word, name in zip(COLOURS, gold, strict=True))
    path.write_text("text,label\n" + rows * 6)
    args = ("classify", "--model", base, "--train", path, "--eval", path, "epochs=0.2")
    code, text = run_cli(*args, "--output", tmp_path / "out")
    assert code == 0
    assert f"f1 is that of '{positive}'" in " ".join(text.split())
    predicted = [
        prediction.labels[0] for prediction in Predictor(tmp_path / "out").classify([f"a {w}" for w in COLOURS])
    ]
    both = sum(a == b == positive for a, b in zip(gold, predicted, strict=True))
    expected = 2 * both / max(gold.count(positive) + predicted.count(positive), 1)
    scores = json.loads((tmp_path / "out" / "results.json").read_text())["scores"]
    assert scores["f1"] == pytest.approx(expected)


def test_early_stopping_keeps_the_best_model(base: Any, files: Any, tmp_path: Path) -> None:
    done = finetune(
        *("classify", base, files / "classify.csv"),
        output=tmp_path / "out",
        **{**QUICK, "epochs": 40},
        patience=2,
        head="random",
    )
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    scores = [line["accuracy"] for line in metrics if "accuracy" in line]
    assert len(scores) < 40
    assert done.scores["accuracy"] == max(scores)
    assert scores[-2:] != sorted(scores)[-2:] or scores[-1] <= max(scores[:-2])


@pytest.mark.parametrize(
    ("task", "package", "settings", "message"),
    [
        ("classify", "sklearn", {}, r"finetune classify needs scikit-learn, .*pip install 'bertblocks\[training\]'"),
        ("tag", "seqeval", {}, r"finetune tag needs seqeval"),
        ("embed", "scipy", {}, r"finetune embed needs scipy"),
        ("answer", "peft", {"lora_rank": 2}, r"finetune answer needs peft, .*'bertblocks\[peft\]'"),
        ("answer", "scipy", {"seeds": 2}, r"finetune answer needs scipy"),
    ],
)
def test_a_missing_package_is_reported_before_anything_is_written(
    base: Any,
    files: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: Any,
    package: Any,
    settings: Any,
    message: Any,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=message):
        finetune(task, base, files / ALL_TASKS[task], output=tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_finetune_works_outside_the_main_thread(base: Any, files: Any, tmp_path: Path) -> None:
    """Python allows signal handlers in the main thread only."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(finetune, "classify", base, files / "classify.csv", output=tmp_path / "out", epochs=0.5)
        assert done.result().scores.keys() >= {"accuracy"}
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights(base: Any, files: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bertblocks", "finetune", "classify", "--model", str(base), "--train"]
    command += [str(files / "classify.csv"), "epochs=12", "batch_size=8", "evaluations_per_epoch=3", "--output"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(tmp_path / "whole")], check=True, env=environment, capture_output=True)
    out = tmp_path / "killed"
    with subprocess.Popen([*command, str(out)], env=environment, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not list(out.glob("checkpoints/step-*/complete.json")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert not (out / "results.json").exists(), "the run was over before it could be killed"
    subprocess.run([*command, str(out)], check=True, env=environment, capture_output=True)
    whole, resumed = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", out))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_words_that_no_text_uses_keep_their_embedding_and_a_run_resumes(
    base: Any, files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting_model, "LARGE_TABLE", 8)
    options = {**QUICK, "epochs": 1, "batch_size": 8, "head": "random", "keep_checkpoints": True, "precision": "fp32"}
    options |= {"evaluations_per_epoch": 3, "patience": None}
    finetune("classify", base, files / "classify.csv", output=tmp_path / "whole", **options)
    before, after = (load(folder)[0].get_input_embeddings().weight for folder in (base, tmp_path / "whole"))
    used = torch.ne(before, after).any(1)
    assert 0 < used.sum() < len(used)
    steps = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    state = load_file(steps[-1] / "optimizer.safetensors")
    assert any(key.startswith("rows/") and len(rows) == used.sum() for key, rows in state.items())
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in steps[1:]:
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / step.name)
    for file in ("results.json", "model.safetensors"):
        (tmp_path / "cut" / file).unlink()
    finetune("classify", base, files / "classify.csv", output=tmp_path / "cut", **options)
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


ALL_TASKS = {"classify": "classify.csv", "tag": "tag.conll", "answer": "answer.jsonl", "embed": "embed.csv"}


def train_all(base: Path, files: Path, out: Path, parallel: str) -> None:
    for task, file in ALL_TASKS.items():
        # one example is left for the last step, which two processes must share
        options = {**QUICK, "epochs": (20 * 16 + 1) / 216, "parallel": parallel, "precision": "fp32"}
        model = base.with_name("projected") if task == "embed" else base
        finetune(task, model, files / file, output=out / task, **options)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_the_same_weights_as_one(base: Any, files: Any, tmp_path: Path, parallel: Any) -> None:
    """Every task, launched by torchrun; embeddings use a module behind the pooling, and not the pooler."""
    pooled = tmp_path / "pooled"
    shutil.copytree(base, pooled)
    BertBlocksModel(BertBlocksConfig.from_pretrained(base, pooler=True)).save_pretrained(pooled)
    shutil.copytree(pooled, tmp_path / "projected")
    write_settings(tmp_path / "projected", EmbeddingSettings(layers=(Dense(32, 24, True, "Tanh"),)), 32)
    train_all(pooled, files, tmp_path / "one", parallel)
    program = f"import tests.training.test_finetune as t; t.train_all(t.Path({str(pooled)!r}), t.Path({str(files)!r}), "
    program += f"t.Path({str(tmp_path / 'two')!r}), {parallel!r})"
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([*command, tmp_path / "train.py"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for task in ALL_TASKS:
        one, two = (tmp_path / count / task for count in ("one", "two"))
        losses = [
            [line["loss"] for line in map(json.loads, (folder / "metrics.jsonl").open()) if "loss" in line]
            for folder in (one, two)
        ]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3), task
        scores = [json.loads((folder / "results.json").read_text())["scores"] for folder in (one, two)]
        assert scores[1] == pytest.approx(scores[0], abs=0.05 * max(map(abs, scores[0].values()))), task
    folders = ("projected", "one/embed", "two/embed")
    start, alone, shared = (load_file(tmp_path / folder / "2_Dense" / "model.safetensors") for folder in folders)
    for name, tensor in start.items():
        assert not torch.equal(alone[name], tensor)
        torch.testing.assert_close(shared[name], alone[name], atol=1e-2, rtol=1e-2)


def run_cli(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["finetune", *map(str, arguments)])
    return result.exit_code, result.output + result.stderr


def test_the_command_prints_scores_and_does_not_overwrite(base: Any, files: Any, tmp_path: Path) -> None:
    arguments = [
        "classify",
        "--model",
        base,
        "--train",
        files / "classify.csv",
        "--output",
        tmp_path / "out",
        "epochs=1",
    ]
    code, text = run_cli(*arguments)
    assert code == 0
    assert "accuracy (chosen by)" in text
    assert "text=text, label=label" in text
    assert "24 of the examples (seed 0) are held out" in text
    assert "Removed 1 training checkpoint (" in text
    assert not (tmp_path / "out" / "checkpoints").exists()
    code, text = run_cli(*arguments)
    assert code == 1
    assert "holds a finished run" in text
    with pytest.raises(RunFolderError, match="holds a run with epochs = 1"):
        is_finished(tmp_path / "out", "classify", str(base), str(files / "classify.csv"), None, epochs=2)
    card = tmp_path / "out" / "README.md"
    card.write_text(card.read_text() + "A word of mine.\n")
    code, text = run_cli(*arguments, "--overwrite", "--json", "keep_checkpoints=true")
    assert code == 0
    assert "A word of mine." in card.read_text()
    assert list((tmp_path / "out" / "checkpoints").glob("step-*/complete.json"))
    events = [json.loads(line) for line in text[text.index("{") :].splitlines()]
    assert [event["event"] for event in events][:2] == ["start", "evaluation"]
    assert {event["event"] for event in events} == {"start", "step", "evaluation", "result"}
    assert (events[1]["step"], events[-1]["event"], events[-1]["metric"]) == (0, "result", "accuracy")
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]
    streamed = [event for event in events if event["event"] in ("step", "evaluation")]
    assert [{key: value for key, value in event.items() if key != "event"} for event in streamed] == lines


def test_nothing_is_replaced_before_everything_is_read(base: Any, files: Any, tmp_path: Path) -> None:
    out, train = tmp_path / "out", files / "classify.csv"
    options = {"epochs": 0.5, "overwrite": True}
    finetune("classify", base, train, output=out, **options)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(DataError, match=r"missing\.csv: no such file"):
        finetune("classify", base, tmp_path / "missing.csv", output=out, **options)
    with pytest.raises(RunFolderError, match=r"model is .* inside .*: it would be overwritten"):
        finetune("classify", out, train, output=out, **options)
    assert (out / "model.safetensors").read_bytes() == before
    # after a failed start, the right command works
    with pytest.raises(DataError, match="no column 'lable'"):
        finetune("classify", base, train, output=tmp_path / "new", label="lable", epochs=0.5)
    finetune("classify", base, train, output=tmp_path / "new", label="label", epochs=0.5)
    with pytest.raises(ValueError, match="max_length is 5000; the model reads at most"):
        finetune("classify", base, train, output=tmp_path / "long", max_length=5000)


@pytest.mark.parametrize("content", ["{", "[1]", '{"files": 3}'])
def test_damaged_results_are_one_sentence_before_training(base: Any, files: Any, tmp_path: Path, content: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "finetune.json").write_text("{}")
    (out / "results.json").write_text(content)
    code, text = run_cli("classify", "--model", base, "--train", files / "classify.csv", "--output", out, "--overwrite")
    assert code == 1
    assert re.fullmatch(r"bertblocks: .*results\.json( |:).*\.", text.splitlines()[-1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("name", ["finetune.json", "report.html", "results.json"])
def test_a_full_disk_is_one_sentence_and_the_run_resumes(
    base: Any, files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = os.fsync

    def fail(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.startswith(f".{name}-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    out = tmp_path / "out"
    arguments = ("classify", "--model", base, "--train", files / "classify.csv", "--output", out, "epochs=0.2")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        code, text = run_cli(*arguments)
    assert code == 1
    assert text.splitlines()[-1] == (
        f"bertblocks: {out}: the disk is full; free some space and run the same command again."
    )
    assert not (out / "results.json").exists()
    assert run_cli(*arguments)[0] == 0


def test_a_different_request_in_a_run_folder_raises_an_error_that_names_the_key(
    base: Any, files: Any, tmp_path: Path
) -> None:
    out, train = tmp_path / "out", files / "classify.csv"
    finetune("classify", base, train, output=out, epochs=0.5, keep_checkpoints=True)
    (out / "results.json").unlink()
    with pytest.raises(RunFolderError, match=r"holds a run with epochs = 0\.5, but epochs is now 1\.0"):
        finetune("classify", base, train, output=out, epochs=1)


def test_entities_are_compared_by_type_in_every_tag_scheme(base: Any, files: Any, tmp_path: Path) -> None:
    """Covers an inside tag that is missing in training, and a model that predicts BIOES."""
    path = tmp_path / "eval.conll"
    path.write_text("the O\nriver O\nis O\nred B-RED\nred I-RED\n")
    finetune("tag", base, files / "tag.conll", path, tmp_path / "out", **QUICK)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["id2label"] = {key: name.replace("B-", "S-") for key, name in config["id2label"].items()}
    config["label2id"] = {name: int(key) for key, name in config["id2label"].items()}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    scores = evaluate("tag", tmp_path / "out", files / "tag.conll").scores
    assert scores["f1"] > 0.95
    assert scores["accuracy"] > 0.95


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("text,label\na,x\nb,y\n", ["label=lable"], "no column 'lable' for label"),
        ("text,label\na,x\nb,x\n", [], "the only label is 'x'"),
        ("text,label\na,x\nb,\n", [], "line 3: the label is ''"),
        ("text,label\na,1.5\nb,nan\n", [], "line 3"),
        ("", [], "the file is empty"),
        ("text,label\na,x\nb\n", [], "line 3: the row has 1 columns"),
        ("text,label\na,x\nb,y\n", ["epocs=3"], "no key 'epocs'"),
        ("text,label\na,x\nb,y\n", ["epochs"], "is not a setting"),
    ],
)
def test_bad_input_gives_one_sentence(base: Any, tmp_path: Path, content: Any, settings: Any, message: Any) -> None:
    path = tmp_path / "train.csv"
    path.write_text(content)
    code, text = run_cli("classify", "--model", base, "--train", path, "--output", tmp_path / "out", *settings)
    assert code == 1
    assert message in text
    assert "Traceback" not in text
    assert not list((tmp_path / "out").glob("*.safetensors"))


def squad(answer: str, start: object) -> str:
    question = {"id": "q7", "question": "who ?", "answers": [{"text": answer, "answer_start": start}]}
    return json.dumps({"data": [{"paragraphs": [{"context": "the tree is red .", "qas": [question]}]}]})


@pytest.mark.parametrize(
    ("task", "name", "content", "message"),
    [
        ("tag", "t.conll", "the O\nriver\n", "t.conll line 2: the row has 1 columns, not 2"),
        ("tag", "t.conll", b"the O\nriv\xe9r O\n", "t.conll line 2: byte 0xe9 is not UTF-8"),
        ("tag", "t.conll", "", "t.conll: the file has no sentences"),
        ("tag", "t.conll", "the O\nriver O\n", "t.conll line 1: from here to the end, the only tag is 'O'"),
        ("tag", "t.jsonl", '{"words": ["a", "b"], "tags": ["O"]}\n', "t.jsonl line 1: there are 2 words and 1 tags"),
        (
            "tag",
            "t.jsonl",
            '{"text": "a b", "spans": [{"start": 0, "end": 9, "label": "X"}]}\n',
            "line 1: the span 0-9",
        ),
        ("answer", "t.json", squad("river", 4), "question 'q7': the answer 'river' is not at answer_start 4"),
        ("answer", "t.json", squad("tree", "4"), "must have a text and a whole number answer_start"),
        ("answer", "t.json", "", "the file is empty"),
        ("answer", "t.json", b'{"data": "caf\xe9"}', "line 1: byte 0xe9 is not UTF-8"),
        ("answer", "t.jsonl", '{"question": "who ?", "answers": []}\n', "t.jsonl: no column looks like context"),
        ("embed", "t.csv", "text,text_pair,score\nx,y,1\nx,z,nan\n", "t.csv line 3: the score is 'nan'"),
        ("embed", "t.csv", "text,text_pair,score\nx,y,1\nx,z,high\n", "t.csv line 3: the score is 'high'"),
        ("embed", "t.csv", "text\nx\ny\n", "t.csv: no column looks like text_pair"),
        ("embed", "t.csv", "a,b\nx,y\nx\n", "t.csv line 3: the row has 1 columns"),
        ("embed", "t.csv", "", "the file is empty"),
    ],
)
def test_bad_input_of_the_other_tasks_gives_one_sentence(
    base: Any, tmp_path: Path, task: Any, name: Any, content: Any, message: Any
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, text = run_cli(task, "--model", base, "--train", path, "--output", tmp_path / "out")
    text = " ".join(text.split())  # as it is before the terminal's width breaks it
    assert code == 1
    assert message in text
    assert "Traceback" not in text
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_unknown_labels_in_evaluation_files_raise_an_error_that_names_them(
    base: Any, files: Any, tmp_path: Path
) -> None:
    path = tmp_path / "eval.csv"
    path.write_text("text,label\nthe tree is red .,rde\n")
    with pytest.raises(DataError, match=r"eval\.csv line 2: the label 'rde' .*did you mean 'red'"):
        finetune("classify", base, files / "classify.csv", path, tmp_path / "out")
    with pytest.raises(RecipeError, match=r"no key 'learnin_rate' .*learning_rate"):
        finetune("classify", base, files / "classify.csv", path, tmp_path / "out", learnin_rate=1)
    with pytest.raises(ValueError, match=r"'clasify'; it must be one of .*did you mean 'classify'"):
        finetune("clasify", base, files / "classify.csv")


def test_a_run_of_version_0_1_0_keeps_its_random_held_out_examples() -> None:
    arguments = ("classify", Files("model", "train.csv"), ClassifySettings())
    assert _request(*arguments, {})["held_out"] == "stratified"
    assert _request(*arguments, {"task": "classify"})["held_out"] is None
    names = [f"line {number}" for number in range(20)]
    order = permute(np.arange(20), 20, combine("split", 3)).tolist()
    _, held_out = split_examples(names, names, [None] * 20, 0.25, seed=3)
    assert held_out == [name for index, name in enumerate(names) if index in order[:5]]
