"""What the tasks of retrieval share: reading queries and documents, metrics of rankings, losses of scores."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bertblocks.tasks.retrieval import losses
from bertblocks.tasks.retrieval.examples import judge, read_retrieval_data
from bertblocks.tasks.retrieval.metrics import mean_scores, score_ranking
from bertblocks.text.tables import DataError

# ---------------------------------------------------------------------- examples


def write(folder: Path, rows: Any) -> Path:
    if isinstance(rows, str):
        (folder / "rows.csv").write_text(rows)
        return folder / "rows.csv"
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


@pytest.mark.parametrize(
    ("rows", "shape", "documents", "targets", "gains"),
    [
        ("query,document\na?,b\n", "pairs", ("b",), (1,), (1,)),
        ("question,passage,label\na?,b,1\nc?,d,0\n", "labels", ("b",), (1,), (1,)),
        ("query,document,score\na?,b,2.5\n", "scores", ("b",), (2.5,), (2.5,)),
        ("query,document,score\na?,b,-2.5\n", "scores", ("b",), (-2.5,), (0,)),
        ("anchor,positive,negative\na?,b,c\n", "lists", ("b", "c"), (1, 0), (1, 0)),
        ("negative_10,query,negative_2,positive\nx,a?,y,b\n", "lists", ("b", "y", "x"), (1, 0, 0), (1, 0, 0)),
        ("query,positive,negative_1,negative_2\na?,b,c,\n", "lists", ("b", "c"), (1, 0), (1, 0)),
        ("query,positive,negative,margin\na?,b,c,3.5\n", "teacher", ("b", "c"), (3.5, 0), (1, 0)),
        ("is it warm?,a warm day,a cold day\nis it late?,it is late,it is early\n", "lists", None, (1, 0), (1, 0)),
        ([{"query": "a?", "pos": ["b", "c"], "neg": ["d"]}], "lists", ("b", "c", "d"), (1, 1, 0), (1, 1, 0)),
        (
            [{"query": "a?", "pos": ["b"], "neg": ["d"], "pos_scores": [9], "neg_scores": [4]}],
            "teacher",
            ("b", "d"),
            (9, 4),
            (1, 0),
        ),
        (
            [{"query": "a?", "positive": "b", "negatives": ["c", "d"], "scores": [3, 2, 1]}],
            "teacher",
            ("b", "c", "d"),
            (3, 2, 1),
            (1, 0, 0),
        ),
        ([{"query": "a?", "documents": ["b", "c"], "labels": [0, 2]}], "teacher", ("b", "c"), (0, 2), (0, 2)),
    ],
)
def test_files_of_every_shape_are_read(
    tmp_path: Path, rows: Any, shape: str, documents: Any, targets: Any, gains: Any
) -> None:
    data = read_retrieval_data(write(tmp_path, rows))
    example = data.examples[0]
    assert (data.shape, example.targets, example.gains) == (shape, targets, gains)
    assert documents is None or example.documents == documents
    assert shape in data.note


def test_given_columns_take_precedence(tmp_path: Path) -> None:
    path = write(tmp_path, "query,frage,document,absatz,falsch\nno,a?,no,b,c\n")
    example = read_retrieval_data(path, given={"query": "frage", "document": "absatz", "negative": "falsch"}).examples[
        0
    ]
    assert (example.query, example.documents) == ("a?", ("b", "c"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("query,document\n  ,b\n", "line 2: the query is '  '; it must be a text that is not empty."),
        ("query,document,label\na?,b,yes\n", "the label is 'yes'; it must be a number"),
        ("topic,note,score\na,b,1\n", "no column looks like query"),
        ([{"query": "a?", "pos": [], "neg": ["d"]}], "the document is an empty list"),
        ([{"query": "a?", "pos": "b", "neg": [1]}], "the neg is 1; it must be a text"),
        ([{"query": "a?", "positive": "b", "negatives": ["c"], "scores": [1, 2, 3]}], "3 scores for 2 documents"),
        ([{"query": ["a?", "b?"], "positive": "b"}], "the query is ['a?', 'b?']"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        read_retrieval_data(write(tmp_path, rows))
    assert message in str(error.value)


def test_judgements_of_a_query_are_joined(tmp_path: Path) -> None:
    rows = "query,document,label\na?,b,0\na?,b,1\na?,c,0\nd?,b,1\n"
    data = read_retrieval_data(write(tmp_path, rows))
    assert judge(data.examples) == {"a?": {"b": 1, "c": 0}, "d?": {"b": 1}}


# ---------------------------------------------------------------------- metrics


def test_metrics_follow_their_formulas() -> None:
    gains = {"a": 3.0, "b": 1.0, "c": 0.0, "lost": 2.0}
    names = ["ndcg@3", "ndcg", "mrr", "mrr@1", "map", "map@2", "recall@3", "precision@2"]
    scores = score_ranking(["c", "b", "x", "a"], gains, names)
    ideal = 3 + 2 / math.log2(3) + 1 / math.log2(4)
    assert scores == {
        "ndcg@3": pytest.approx((1 / math.log2(3)) / ideal),
        "ndcg": pytest.approx((1 / math.log2(3) + 3 / math.log2(5)) / ideal),
        "mrr": 0.5,
        "mrr@1": 0.0,
        "map": pytest.approx((1 / 2 + 2 / 4) / 3),
        "map@2": pytest.approx((1 / 2) / 3),
        "recall@3": pytest.approx(1 / 3),
        "precision@2": 0.5,
    }
    assert mean_scores([{"map": 0.0}, {"map": 1.0}]) == {"map": 0.5}


def test_unknown_metrics_and_queries_without_relevant_documents_raise() -> None:
    with pytest.raises(ValueError, match="metric is 'ndgc@10'; it must be ndcg"):
        score_ranking(["a"], {"a": 1}, ["ndgc@10"])
    with pytest.raises(ValueError, match="without relevant documents"):
        score_ranking(["a"], {"a": 0})


# ---------------------------------------------------------------------- losses

LENGTHS = [3, 1, 2]
SCORES = torch.tensor([0.3, -1.0, 2.0, 0.5, 1.5, -0.5], dtype=torch.float64)
TARGETS = torch.tensor([2.0, 1.0, -1.0, 0.3, 0.5, 0.7], dtype=torch.float64)
POSITIVE = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)


def by_list(term: Callable[[Tensor, Tensor], Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of a loss over lists, one at a time, and its gradient."""
    scores = SCORES.clone().requires_grad_()
    pairs = zip(scores.split(LENGTHS), targets.split(LENGTHS), strict=True)
    total = torch.stack([term(own, target) for own, target in pairs]).sum()
    return total.detach(), torch.autograd.grad(total, scores)[0]


@pytest.mark.parametrize(
    ("loss", "targets", "term"),
    [
        (losses.list_cross_entropy, POSITIVE, lambda s, t: F.cross_entropy(s[None], torch.tensor([0]))),
        (
            losses.margin_mse,
            TARGETS,
            lambda s, t: ((s[0] - s[1:]) - (t[0] - t[1:])).square().mean() if len(s) > 1 else 0 * s.sum(),
        ),
        (
            losses.kl_divergence,
            TARGETS,
            lambda s, t: F.kl_div(s.log_softmax(0), t.softmax(0), reduction="sum"),
        ),
    ],
)
def test_list_losses_equal_one_list_at_a_time(loss: Any, targets: Tensor, term: Any) -> None:
    scores = SCORES.clone().requires_grad_()
    total = loss(scores, targets, LENGTHS)
    expected, gradient = by_list(term, targets)
    torch.testing.assert_close(total.detach(), expected)
    torch.testing.assert_close(torch.autograd.grad(total, scores)[0], gradient)


def test_list_cross_entropy_shares_its_target_among_relevant_documents() -> None:
    scores, targets = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([3.0, 1.0, 0.0])
    expected = -(0.75 * scores.log_softmax(0)[0] + 0.25 * scores.log_softmax(0)[1])
    torch.testing.assert_close(losses.list_cross_entropy(scores, targets, [3]), expected)
    assert losses.list_cross_entropy(scores, torch.zeros(3), [3]).item() == 0
