"""Evaluation: pseudo-perplexity against brute force, files with known answers, paired comparison, needle, GLUE."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM, BertBlocksForSequenceClassification
from bertblocks.cli.main import app
from bertblocks.evaluation.evaluate import Evaluation, compare, evaluate, needle, pseudo_perplexity
from bertblocks.evaluation.glue import TASKS, run_glue
from bertblocks.evaluation.needle import FACT, FILLER, PLACES, WORDS, make_samples
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    texts = [*FILLER, FACT.format(place="London", word="river"), *PLACES, *WORDS]
    words = sorted({word for text in texts for word in text.replace(".", " .").split()})
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *words])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm")
    make_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2}
    config = BertBlocksConfig.from_preset("mini", vocab_size=128, mask_token_id=4, **size)
    BertBlocksForMaskedLM(config).save_pretrained(folder)
    return folder


def test_pseudo_perplexity_equals_masking_one_token_at_a_time(language_model: Any, tmp_path: Path) -> None:
    texts = ["They talked about the weather", "the river is silver ."]
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(texts))
    model = BertBlocksForMaskedLM.from_pretrained(language_model).eval()
    tokenizer = make_tokenizer()
    losses = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        for place in range(1, ids.shape[1] - 1):
            hidden = ids.clone()
            hidden[0, place] = 4
            with torch.no_grad():
                logits = model(hidden).logits[0, place]
            losses.append(-torch.log_softmax(logits, -1)[ids[0, place]].item())
    done = pseudo_perplexity(language_model, path)
    assert done.scores["pseudo_perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    assert done.scores["tokens"] == len(losses)


def test_needle_places_the_fact_at_the_stated_depth() -> None:
    tokenizer = TextTokenizer(make_tokenizer())
    words = {word: tokenizer.tokenize([word])[0].ids[0] for word in WORDS}
    for depth in (0.0, 0.5, 1.0):
        for sample in make_samples(tokenizer, words, 4, 60, depth, 5):
            assert len(sample.ids) == 60
            text = tokenizer.tokenizer.decode(sample.ids)
            fact = sample.facts[0].replace(".", " .")
            assert text.count(fact) == 1
            assert sample.ids[sample.mask] == 4
            assert text.endswith(f"{fact.rsplit(' ', 2)[0]} [MASK] . [SEP]")
            assert list(words)[sample.answer] in sample.facts[0]
            share = text.index(fact) / text.index(f"{fact.rsplit(' ', 2)[0]} [MASK]")
            assert abs(share - depth) < 0.35


def test_an_untrained_model_finds_the_needle_by_chance(language_model: Any) -> None:
    done = needle(language_model, [40, 60], [0.0, 1.0], samples=20)
    assert done.accuracy.shape == (2, 2)
    assert done.chance == pytest.approx(1 / len(WORDS))
    assert done.accuracy.mean() < 0.35
    with pytest.raises(DataError, match=r"lengths has 999; .* reads at most 64"):
        needle(language_model, [999], [0.0])


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    make_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    labels = {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}}
    config = BertBlocksConfig.from_preset("mini", vocab_size=128, num_hidden_layers=1, **labels)
    BertBlocksForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_files_are_scored_with_the_models_own_labels(classifier: Any, tmp_path: Path) -> None:
    path = tmp_path / "test.csv"
    path.write_text("text,label\nthe river,a\nthe house,a\nMadrid,a\n")
    done = evaluate("classify", classifier, path)
    assert done.scores["accuracy"] in (0.0, 1 / 3, 2 / 3, 1.0)
    assert done.resample(np.arange(3)) == pytest.approx(done.scores["accuracy"])
    path.write_text("text,label\nthe river,c\n")
    with pytest.raises(DataError, match=r"line 2: the label 'c' is not one of the model's 2"):
        evaluate("classify", classifier, path)


def test_evaluate_compares_models_with_a_paired_test() -> None:
    right = np.random.default_rng(0).random(400) < 0.5
    better = right | (np.arange(400) % 10 == 0)
    first, second = (
        Evaluation(name, {"accuracy": float(x.mean())}, "accuracy", 400, lambda i, x=x: float(x[i].mean()))  # type: ignore[misc]
        for name, x in (("one", right), ("two", better))
    )
    result = compare([first, second])[0]
    assert result.difference == pytest.approx(better.mean() - right.mean())
    assert 0 < result.low < result.difference < result.high
    assert result.high - result.low < 0.08, "pairing takes out the spread that both models share"


def test_evaluate_writes_a_report_of_scores_and_predictions(
    classifier: Any, language_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertblocks.reports.page.javascript", lambda: "")
    path, folder = tmp_path / "test.csv", tmp_path / "report"
    path.write_text("text,label\nthe river,a\nthe house,b\n")

    def run(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
        return result.exit_code, result.output + result.stderr

    code, text = run(classifier, classifier, "--task", "classify", "--data", path, "--report", folder)
    assert code == 0, text
    record = json.loads((folder / "evaluation.json").read_text())
    lines = [json.loads(line) for line in (folder / "predictions-2.jsonl").open()]
    assert [line["gold"] for line in lines] == ["a", "b"]
    accuracy = sum(line["gold"] == line["predicted"] for line in lines) / 2
    assert record["models"][1]["scores"]["accuracy"] == accuracy
    page = (folder / "report.html").read_text()
    assert f"Predictions of {classifier}" in page
    assert "2 examples" in page
    code, text = run(
        language_model, "--task", "needle", "lengths=[40]", "depths=[0, 1]", "samples=2", "--report", folder
    )
    assert code == 0, text
    assert "depth 1" in (folder / "report.html").read_text()
    code, text = run(classifier, "--task", "classify", "--data", path, "--report", tmp_path)
    assert code == 1
    assert "holds files that are not of an evaluation; choose another folder." in text
    code, text = run(classifier, "--task", "classify", "--data", path, "--report", path)
    assert code == 1
    assert "which is a file; give a folder." in text


def test_evaluate_prints_scores_as_text_and_json(classifier: Any, language_model: Any, tmp_path: Path) -> None:
    path = tmp_path / "test.csv"
    path.write_text("text,label\nthe river,a\nthe house,b\n")

    def run(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
        return result.exit_code, result.output + result.stderr

    code, text = run(classifier, classifier, "--task", "classify", "--data", path, "--json")
    assert code == 0
    assert json.loads(text[text.index("{") :])["differences"][0]["difference"] == 0
    code, text = run(language_model, "--task", "needle", "lengths=[40]", "depths=[0, 1]", "samples=2")
    assert code == 0
    assert "by chance 0.05" in text
    code, text = run(language_model, "--task", "classify", "--data", path)
    assert code == 1
    assert "no trained sequence-classification head" in text
    code, text = run(classifier, "--task", "pppl", "--data", path)
    assert code == 1
    assert "does not have a masked-lm head" in text


def test_glue_runs_on_its_published_files(language_model: Any, tmp_path: Path) -> None:
    data = tmp_path / "glue"
    for task, header, row in (
        ("CoLA", "", "x\t{label}\t\tthe river is stone ."),
        ("RTE", "index\tsentence1\tsentence2\tlabel\n", "0\tthe river\tthe house\t{name}"),
        ("MNLI", "index\tsentence1\tsentence2\tgold_label\n", "0\tthe river\tthe house\t{three}"),
    ):
        (data / task).mkdir(parents=True)
        lines = [
            row.format(label=i % 2, name=("entailment", "not_entailment")[i % 2], three="enc"[i % 3]) for i in range(12)
        ]
        for part in ("train", *TASKS[{"CoLA": "cola", "RTE": "rte", "MNLI": "mnli"}[task]].evaluated):
            (data / task / f"{part}.tsv").write_text(header + "\n".join(lines) + "\n")
    results = run_glue(language_model, data, tmp_path / "out", ["cola", "rte", "mnli"], epochs=1)
    assert [result.task for result in results] == ["mnli", "cola", "rte"]
    assert set(results[0].parts) == {"dev_matched", "dev_mismatched"}
    assert results[1].score == pytest.approx(100 * results[1].parts["dev"]["mcc"])
    start = json.loads((tmp_path / "out" / "rte" / "finetune.json").read_text())
    assert Path(start["model"]) == tmp_path / "out" / "mnli"
    with pytest.raises(DataError, match=r"SST-2.train\.tsv does not exist"):
        run_glue(language_model, data, tmp_path / "out", ["sst2"])
    with pytest.raises(DataError, match=r"'colla' is not a GLUE task \(did you mean 'cola'"):
        run_glue(language_model, data, tmp_path / "out", ["colla"])
