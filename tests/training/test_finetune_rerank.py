"""Fine-tuning of rerankers: an easy problem in every form of data, resuming, groups of queries, and comparisons."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from bertblocks import finetune
from bertblocks.checkpoints.sentence_transformers.cross_encoder import read_cross_encoder
from bertblocks.cli.main import app
from bertblocks.core.storage import read_json_lines
from bertblocks.evaluation.evaluate import compare, evaluate
from bertblocks.tasks.predictor import Predictor
from bertblocks.tasks.retrieval.metrics import score_ranking
from bertblocks.text.tables import DataError
from tests.reports.cards import check
from tests.training.conftest import COLOURS, NOUNS

QUICK: dict[str, Any] = {"epochs": 10, "batch_size": 16, "learning_rate": 5e-3, "evaluations_per_epoch": 1}
LISTS: dict[str, Any] = {**QUICK, "epochs": 5, "batch_size": 6}


def rows(shape: str) -> list[dict[str, Any]]:
    """Which sentence names the colour that the query asks for."""
    rng = random.Random(0)
    found: list[dict[str, Any]] = []
    for noun in NOUNS:
        for other in NOUNS:
            for colour in COLOURS:
                query = f"which {noun} {other} is {colour} ?"
                right = f"the {rng.choice(NOUNS)} is {colour} ."
                wrong = [f"the {rng.choice(NOUNS)} is {name} ." for name in COLOURS if name != colour]
                if shape == "labels":
                    found += [{"query": query, "document": right, "label": 1}]
                    found += [{"query": query, "document": text, "label": 0} for text in wrong]
                elif shape == "lists":
                    found.append({"query": query, "positive": right, "negatives": wrong})
                elif shape == "pairs":
                    found.append({"query": query, "positive": right})
                else:
                    found.append(
                        {"query": query, "pos": [right], "neg": wrong, "pos_scores": [3], "neg_scores": [0, -1]}
                    )
    return found


def write(path: Path, values: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.mark.parametrize(
    ("shape", "activation"), [("labels", "Sigmoid"), ("lists", "Identity"), ("teacher", "Identity")]
)
def test_every_form_of_data_teaches_an_easy_problem(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, activation: str
) -> None:
    data, out = write(tmp_path / "rows.jsonl", rows(shape)), tmp_path / "out"
    done = finetune("rerank", base, data, output=out, **(QUICK if shape == "labels" else LISTS))
    assert done.metric == "ndcg@10"
    assert done.scores["mrr@10"] >= (0.95 if shape == "lists" else 0.8)  # 0.61 by chance
    assert set(done.baselines) == {"bm25", "cosine"}
    assert read_cross_encoder(out).activation == activation
    records = read_json_lines(out / "predictions.jsonl")
    assert len(records) == len({record["query"] for record in records}) == 11  # a tenth of the queries
    assert done.confidence is not None
    card = check(out, monkeypatch)
    assert card.data.pipeline_tag == "text-ranking"
    assert "Score of the right text" in (out / "report.html").read_text()
    ranking = Predictor(out, dtype=torch.float32).rerank(
        "which tree road is blue ?", ["the road is red .", "the road is blue ."]
    )
    if shape == "lists":
        assert [ranked.index for ranked in ranking] == [1, 0]
    assert (0 <= ranking[0].score <= 1) or activation == "Identity"


def test_queries_are_scored_by_rank_and_models_are_compared_query_by_query(base: Path, tmp_path: Path) -> None:
    values = rows("labels")
    train, held_out = write(tmp_path / "train.jsonl", values[:-90]), write(tmp_path / "test.jsonl", values[-90:])
    first = finetune("rerank", base, train, held_out, tmp_path / "first", **{**QUICK, "epochs": 0.1})
    second = finetune("rerank", base, train, held_out, tmp_path / "second", **{**QUICK, "epochs": 4})
    done = [evaluate("rerank", folder.folder, held_out) for folder in (first, second)]
    assert [result.scores for result in done] == [pytest.approx(first.scores), pytest.approx(second.scores)]
    assert done[0].examples == 30  # queries
    predictor = Predictor(second.folder, dtype=torch.float32)
    by_query: dict[str, dict[str, float]] = {}
    for value in values[-90:]:
        by_query.setdefault(value["query"], {})[value["document"]] = value["label"]
    expected = []
    for query, gains in by_query.items():
        ranking = predictor.rerank(query, list(gains))
        expected.append(score_ranking([ranked.text for ranked in ranking], gains, ["mrr@10"])["mrr@10"])
    assert done[1].scores["mrr@10"] == pytest.approx(sum(expected) / 30)
    (difference,) = compare(done)
    assert difference.low <= difference.difference <= difference.high
    arguments = ["evaluate", str(first.folder), str(second.folder), "--task", "rerank", "--data", str(held_out)]
    printed = CliRunner().invoke(app, arguments)
    assert printed.exit_code == 0, printed.output
    assert "ndcg@10 against" in printed.output


def test_a_reranker_goes_on_from_its_head_and_a_killed_run_resumes(base: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", rows("lists"))
    settings = {**LISTS, "epochs": 2, "negatives": 1, "max_length": 24}
    whole = finetune("rerank", base, data, output=tmp_path / "whole", **settings)

    class Killed(Exception):
        pass

    def kill(event: dict[str, Any]) -> None:
        if event.get("event") == "evaluation" or "ndcg@10" in str(event):
            events.append(event)
            if len(events) == 2:
                raise Killed

    events: list[dict[str, Any]] = []
    with pytest.raises(Killed):
        finetune("rerank", base, data, output=tmp_path / "resumed", on_event=kill, **settings)
    again = finetune("rerank", base, data, output=tmp_path / "resumed", **settings)
    assert again.scores == whole.scores
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    more = finetune("rerank", whole.folder, data, output=tmp_path / "more", **{**settings, "epochs": 0.2})
    assert more.baselines["untouched"] == pytest.approx(whole.scores)
    chosen = finetune("rerank", whole.folder, data, output=tmp_path / "gentle", epochs=0.1, max_length=24).chosen
    assert chosen["learning_rate"] == 2e-5


def test_bad_data_is_one_sentence_and_writes_nothing(base: Path, tmp_path: Path) -> None:
    single = write(tmp_path / "single.jsonl", [{"query": f"q{n}", "document": "a", "label": n % 2} for n in range(9)])
    with pytest.raises(DataError, match=r"no query of the evaluation examples has a relevant document and another one"):
        finetune("rerank", base, single, output=tmp_path / "out")
    with pytest.raises(DataError, match=r"No query has a relevant document and another one, which loss=cross_entropy"):
        finetune("rerank", base, single, output=tmp_path / "out", loss="cross_entropy")
    assert not (tmp_path / "out").exists()


def test_pairs_say_that_negatives_are_drawn_at_random(base: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", rows("pairs"))
    done = CliRunner().invoke(
        app,
        [
            "finetune",
            "rerank",
            "epochs=0.1",
            "--model",
            str(base),
            "--train",
            str(data),
            "--output",
            str(tmp_path / "out"),
        ],
    )
    assert done.exit_code == 0, done.output
    printed = re.sub(r"\s+", " ", done.output)
    assert "documents of other queries, drawn at random, are the negatives" in printed
    assert "ndcg@10 (chosen by)" in printed
