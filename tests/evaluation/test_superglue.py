"""SuperGLUE and SWAG: official files become pairs of texts, and metrics equal those of independent code."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from typer.testing import CliRunner

from bertblocks import BertBlocksForMaskedLM, BertBlocksForSequenceClassification
from bertblocks.cli.main import app
from bertblocks.evaluation.pair_tasks import Item, read_items
from bertblocks.evaluation.superglue import TASKS, run_superglue
from bertblocks.evaluation.swag import TASK as SWAG
from bertblocks.evaluation.swag import run_swag
from bertblocks.tasks.classify.predictions import Classification
from bertblocks.text.tables import DataError
from tests.evaluation.helpers import label_config, save_model, write_lines

WORDS = "the man fox saw a dog it ran home because was tired is he she not true or false red"


def passage(index: int) -> dict[str, Any]:
    answers = [{"text": word, "idx": i, "label": (i + index) % 2} for i, word in enumerate(("fox", "dog", "man"))]
    return {"text": "the fox saw a dog", "questions": [{"question": "saw it ?", "idx": 0, "answers": answers}] * 2}


def record(index: int) -> dict[str, Any]:
    text = "fox saw a dog\n@highlight\nred man"
    spans = [{"start": 0, "end": 2}, {"start": 10, "end": 12}, {"start": 25, "end": 31}]
    answers = [{"start": 0, "end": 2, "text": "fox"}, {"start": 25, "end": 31, "text": "red man"}][: 1 + index % 2]
    queries = [{"query": "it was @placeholder .", "idx": index, "answers": answers}]
    return {"source": "x", "passage": {"text": text, "entities": [*spans, spans[0]]}, "qas": queries, "idx": index}


def row(task: str, index: int) -> dict[str, Any]:
    is_true = bool(index % 2)
    entails = ("entailment", "not_entailment")[index % 2]
    premise = {"premise": f"the fox {'ran' if is_true else 'saw'}", "hypothesis": "it ran"}
    sentences = {"sentence1": "the man ran", "sentence2": f"a dog {'ran' if is_true else 'saw'}"}
    target = {"span1_index": 0, "span1_text": "the man", "span2_index": 5, "span2_text": "he"}
    rows: dict[str, dict[str, Any]] = {
        "BoolQ": {"question": "is it red", "passage": "the fox is red", "label": is_true},
        "CB": premise | {"label": ("contradiction", "entailment", "neutral")[index % 3]},
        "COPA": {
            "premise": "the man ran .",
            "choice1": "he saw a fox",
            "choice2": "he was tired",
            "question": ("cause", "effect")[index % 2],
            "label": index % 2,
        },
        "MultiRC": {"passage": passage(index), "version": 1.1},
        "ReCoRD": record(index),
        "RTE": premise | {"label": entails},
        "WiC": sentences | {"word": "ran", "start1": 8, "end1": 11, "label": is_true},
        "WSC": {"text": "the man ran home because he was tired", "target": target, "label": is_true},
        "AX-b": sentences | {"label": entails, "logic": "Negation"},
        "AX-g": {"premise": f"{('he', 'she')[index % 2]} ran", "hypothesis": "it ran", "label": entails},
    }
    return rows[task] | {"idx": index}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("superglue")
    for name in ("BoolQ", "CB", "COPA", "MultiRC", "ReCoRD", "RTE", "WiC", "WSC"):
        for split, size in (("train", 8), ("val", 6)):
            write_lines(folder / name / f"{split}.jsonl", (row(name, index) for index in range(size)))
    for name in ("AX-b", "AX-g"):
        write_lines(folder / name / f"{name}.jsonl", (row(name, index) for index in range(6)))
    return folder


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("lm"), BertBlocksForMaskedLM, [WORDS])


def read(data: Path, name: str, split: str = "val") -> list[Item]:
    return read_items(TASKS[name], data, split, "SuperGLUE")


def test_rows_become_the_pairs_that_a_reader_expects(data: Path) -> None:
    assert read(data, "boolq")[1].pairs == [("the fox is red", "is it red")]
    assert read(data, "boolq")[1].labels == ["true"]
    copa = read(data, "copa")[1]
    assert copa.pairs[0] == ("the man ran . What happened as a result?", "he saw a fox")
    assert copa.labels == ["false", "true"]
    multirc = read(data, "multirc")
    assert len(multirc) == 12, "an item is a question"
    assert multirc[0].pairs[1] == ("the fox saw a dog", "saw it ? dog")
    assert multirc[0].labels == ["false", "true", "false"]
    cloze = read(data, "record")[1]
    assert cloze.candidates == ["fox", "dog", "red man"], "entities end with their last character and count once"
    assert cloze.pairs[2] == ("fox saw a dog red man", "it was red man .")
    assert cloze.labels == ["true", "false", "true"]
    assert read(data, "wic")[0].pairs == [("ran: the man ran", "a dog saw")]
    assert read(data, "wsc")[0].pairs == [("the man ran home because *he* was tired", "the man")]


def guess(items: Sequence[Item], labels: Sequence[str], seed: int = 0) -> list[list[Classification]]:
    """Random probabilities for every pair."""
    generator = np.random.default_rng(seed)

    def one() -> Classification:
        scores = dict(zip(labels, generator.dirichlet(np.ones(len(labels))).tolist(), strict=True))
        return Classification([max(scores, key=scores.__getitem__)], scores)

    return [[one() for _ in item.pairs] for item in items]


@pytest.mark.parametrize("name", ["boolq", "cb", "rte", "wic", "wsc", "ax-b"])
def test_labels_are_scored_as_scikit_learn_does(data: Path, name: str) -> None:
    items = read(data, name, TASKS[name].evaluated)
    found = guess(items, sorted({item.labels[0] for item in items}))
    gold, predicted = [item.labels[0] for item in items], [pairs[0].labels[0] for pairs in found]
    expected = {
        "accuracy": accuracy_score(gold, predicted),
        "f1_macro": f1_score(gold, predicted, average="macro"),
        "mcc": matthews_corrcoef(gold, predicted),
    }
    scores = TASKS[name].score(items, found)
    for metric in TASKS[name].metrics:
        assert scores[metric] == pytest.approx(expected[metric])
    assert len(set(predicted)) > 1


def test_choices_answer_sets_and_clozes_are_scored_by_their_formulas(data: Path) -> None:
    items = read(data, "copa")
    found = guess(items, ["false", "true"])
    right = 0
    for index, pairs in enumerate(found):
        right += int(pairs[1].scores["true"] > pairs[0].scores["true"]) == index % 2
    assert TASKS["copa"].score(items, found) == {"accuracy": pytest.approx(right / 6)}
    assert 0 < right < 6

    items = read(data, "multirc")
    found = guess(items, ["false", "true"])
    hits = predicted = gold = exact = 0
    for item, pairs in zip(items, found, strict=True):
        truth, said = [label == "true" for label in item.labels], [pair.scores["true"] > 0.5 for pair in pairs]
        hits += sum(a and b for a, b in zip(truth, said, strict=True))
        gold, predicted, exact = gold + sum(truth), predicted + sum(said), exact + (truth == said)
    precision, recall = hits / predicted, hits / gold
    scores = TASKS["multirc"].score(items, found)
    assert scores["f1a"] == pytest.approx(2 * precision * recall / (precision + recall))
    assert scores["exact_match"] == pytest.approx(exact / 12)
    assert 0 < exact < 12

    items = read(data, "record")
    found = guess(items, ["false", "true"], seed=3)
    f1s, exacts = [], []
    for index, pairs in enumerate(found):
        text = ["fox", "dog", "red man"][max(range(3), key=lambda i: pairs[i].scores["true"])]
        answers = ["fox", "red man"][: 1 + index % 2]
        exacts.append(text in answers)
        f1s.append(max(2 * len({*text.split()} & {*a.split()}) / len([*text.split(), *a.split()]) for a in answers))
    assert TASKS["record"].score(items, found) == {
        "f1": pytest.approx(np.mean(f1s)),
        "exact_match": pytest.approx(np.mean(exacts)),
    }
    assert 0 < sum(exacts) < 6


def test_gender_parity_compares_neighbouring_rows(data: Path, tmp_path: Path) -> None:
    items = read(data, "ax-g", "test")
    labels = ["entailment", "entailment", "entailment", "not_entailment", "not_entailment", "not_entailment"]
    found = [[Classification([label], {label: 1.0})] for label in labels]
    scores = TASKS["ax-g"].score(items, found)
    assert scores["gender_parity"] == pytest.approx(2 / 3)
    assert scores["accuracy"] == pytest.approx(4 / 6)
    write_lines(tmp_path / "AX-g" / "AX-g.jsonl", [row("AX-g", 0), row("AX-g", 1) | {"hypothesis": "a fox"}])
    with pytest.raises(DataError, match=r"AX-g.jsonl line 1: the next row must have the same hypothesis"):
        TASKS["ax-g"].score(read(tmp_path, "ax-g", "test"), found[:2])


@pytest.mark.parametrize(
    ("name", "folder", "change", "message"),
    [
        ("boolq", "BoolQ", {"label": "maybe"}, r"line 2: the label is 'maybe'; it must be one of false, true"),
        ("boolq", "BoolQ", {"passage": 3}, r"line 2: 'passage' is '3'; it must be a text"),
        ("copa", "COPA", {"question": "why"}, r"line 2: 'question' is 'why'; it must be cause or effect"),
        ("copa", "COPA", {"label": 2}, r"line 2: the label is 2; it must be 0 or 1"),
        (
            "multirc",
            "MultiRC",
            {"passage": {"text": "x"}},
            r"line 2: 'passage\.questions' is 'None'; it must be a list",
        ),
        (
            "multirc",
            "MultiRC",
            {"passage": {"text": "x", "questions": [{"question": "y", "answers": [{"text": "z"}]}]}},
            r"line 2, question 1: the label is 'None'; it must be one of 0, 1",
        ),
        ("record", "ReCoRD", {"qas": [{"query": "x", "answers": []}]}, r"line 2, query 1: it needs a query with @pl"),
        ("wsc", "WSC", {"target": {"span2_index": 9, "span2_text": "he"}}, r"line 2: span2_index is 9; the text has 8"),
    ],
)
def test_bad_rows_are_named(data: Path, tmp_path: Path, name: str, folder: str, change: Any, message: str) -> None:
    write_lines(tmp_path / folder / "val.jsonl", [row(folder, 0), row(folder, 1) | change])
    with pytest.raises(DataError, match=rf"{folder}.val\.jsonl {message}"):
        read(tmp_path, name)


def test_a_bad_file_is_found_before_any_training(data: Path, tmp_path: Path, language_model: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    write_lines(folder / "AX-g" / "AX-g.jsonl", [row("AX-g", 0), row("AX-g", 1) | {"hypothesis": "a fox"}])
    with pytest.raises(DataError, match="the next row must have the same hypothesis"):
        run_superglue(language_model, folder, tmp_path / "runs", ["rte", "ax-g"])
    assert not (tmp_path / "runs").exists()


def test_bad_files_and_tasks_are_named(data: Path, tmp_path: Path, language_model: Path) -> None:
    (tmp_path / "CB").mkdir()
    (tmp_path / "CB" / "val.jsonl").write_text('{"premise": "x"\n')
    with pytest.raises(DataError, match=r"val\.jsonl line 1: the line is not JSON"):
        read(tmp_path, "cb")
    with pytest.raises(DataError, match=r"val\.jsonl does not exist; --data must be the folder of SuperGLUE's files"):
        read(tmp_path, "rte")
    with pytest.raises(DataError, match=r"'rtee' is not a SuperGLUE task \(did you mean 'rte'"):
        run_superglue(language_model, data, tmp_path, ["rtee"])
    with pytest.raises(DataError, match=r"tasks has ax-b, which is scored with the model of rte; add rte"):
        run_superglue(language_model, data, tmp_path, ["ax-b"])


def test_superglue_fine_tunes_and_averages_as_its_leaderboard(data: Path, language_model: Path, tmp_path: Path) -> None:
    names = ["cb", "rte", "ax-b"]
    runs = [run_superglue(language_model, data, tmp_path, names, epochs=1, batch_size=4) for _ in range(2)]
    results = {result.task: result for result in runs[0]}
    assert runs[0] == runs[1], "finished tasks are not run again"
    assert list(results) == names
    assert not (tmp_path / "ax-b").exists()
    cb = results["cb"].parts["val"]
    assert results["cb"].score == pytest.approx(50 * (cb["accuracy"] + cb["f1_macro"]))
    assert [result.in_mean for result in results.values()] == [True, True, False]
    request = json.loads((tmp_path / "cb" / "finetune.json").read_text())
    first = json.loads(Path(request["train"]).read_text().splitlines()[1])
    assert first == {"text": "the fox ran", "text_pair": "it ran", "label": "entailment"}


def test_a_fine_tuned_model_is_scored_as_it_is(data: Path, tmp_path: Path) -> None:
    names = ("entailment", "not_entailment")
    model = save_model(tmp_path, BertBlocksForSequenceClassification, [WORDS], **label_config(*names))
    arguments = [str(model), "--task", "superglue", "--data", str(data), "tasks=[rte,ax-b,ax-g]", "train=false"]
    shown = CliRunner().invoke(app, ["evaluate", *arguments])
    assert shown.exit_code == 0, shown.output
    assert re.search(r"SuperGLUE, validation sets\s.*rte\s+ax-b\s+ax-g", shown.output)
    assert "gender_parity" in shown.output
    result = CliRunner().invoke(app, ["evaluate", *arguments, "--json"])
    read_back = json.loads(result.stdout)["models"][0]
    assert read_back["mean"] == read_back["tasks"][0]["score"], "only rte counts"
    with pytest.raises(DataError, match=r"line 1: the label 'contradiction' is not one of the model's: entailment"):
        run_superglue(model, data, tasks=["cb"], train=False)


# ---------------------------------------------------------------------- SWAG

HEADER = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"


def write_swag(folder: Path, labels: str = "0312") -> None:
    for split in ("train", "val"):
        rows = [
            f'{i},v,1,x,"the man, tired, ran",the dog,gold,saw it,"ran, home",is red,was tired,{label}\n'
            for i, label in enumerate(labels)
        ]
        (folder / f"{split}.csv").write_text(HEADER + "".join(rows))


def test_swag_reads_its_csv_and_scores_the_best_ending(tmp_path: Path, language_model: Path) -> None:
    write_swag(tmp_path)
    items = read_items(SWAG, tmp_path, "val", "SWAG")
    assert items[1].pairs[1] == ("the man, tired, ran", "the dog ran, home")
    assert items[1].labels == ["false", "false", "false", "true"]
    found = guess(items, ["false", "true"], seed=1)
    best = [int(np.argmax([pair.scores["true"] for pair in pairs])) for pairs in found]
    expected = np.mean([index == int(label) for index, label in zip(best, "0312", strict=True)])
    assert SWAG.score(items, found) == {"accuracy": pytest.approx(expected)}
    result = run_swag(language_model, tmp_path, tmp_path / "out", epochs=1)[0]
    assert result.score == pytest.approx(100 * result.parts["val"]["accuracy"])
    write_swag(tmp_path, "04")
    with pytest.raises(DataError, match=r"val\.csv line 3: the label is '4'; it must be a number from 0 to 3"):
        read_items(SWAG, tmp_path, "val", "SWAG")
