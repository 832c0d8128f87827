"""Rankings and their metrics against pytrec_eval, which wraps trec_eval's own code."""

from __future__ import annotations

import re

import pytest
import pytrec_eval
from hypothesis import given, settings
from hypothesis import strategies as st

from bertblocks.tasks.retrieval.metrics import rank_documents, score_ranking

DEPTHS = (1, 3, 10)
KINDS = {"ndcg": "ndcg_cut", "map": "map_cut", "recall": "recall", "precision": "P"}
WHOLE = {"ndcg": "ndcg", "map": "map", "mrr": "recip_rank"}
MEASURES = {*WHOLE.values(), *(f"{name}.{','.join(map(str, DEPTHS))}" for name in KINDS.values())}
#: Ids whose order differs between numbers, text and bytes.
IDS = [*map(str, range(12)), "a", "B", "é", "z10", "z9", "\U0001f600", "\uffff"]
#: Scores with ties, some of them only in single precision.
SCORES = [0.0, -1.0, 1.0, 1.0 + 1e-9, 1.0 - 1e-9, 0.3, 0.1 + 0.2, 1e-3, 7.25]


def reference(run: dict[str, float], judged: dict[str, int]) -> dict[str, float]:
    """pytrec_eval's values under our names. It has no cut for reciprocal ranks, which follow from the whole."""
    found = pytrec_eval.RelevanceEvaluator({"q": judged}, MEASURES).evaluate({"q": run})["q"]
    values = {f"{ours}@{k}": found[f"{theirs}_{k}"] for ours, theirs in KINDS.items() for k in DEPTHS}
    values |= {ours: found[theirs] for ours, theirs in WHOLE.items()}
    return values | {f"mrr@{k}": found["recip_rank"] * (found["recip_rank"] >= 1 / k - 1e-9) for k in DEPTHS}


@given(
    st.dictionaries(st.sampled_from(IDS), st.sampled_from(SCORES), max_size=len(IDS)),
    st.dictionaries(st.sampled_from(IDS), st.integers(-1, 4), min_size=1, max_size=len(IDS)).filter(
        lambda judged: max(judged.values()) > 0
    ),
)
@settings(max_examples=300, deadline=None)
def test_metrics_equal_trec_eval_with_grades_and_ties(run: dict[str, float], judged: dict[str, int]) -> None:
    expected = reference(run, judged)
    assert score_ranking(rank_documents(run), judged, list(expected)) == pytest.approx(expected, abs=1e-12)


def test_ties_are_ranked_by_bytes_descending_in_single_precision() -> None:
    assert rank_documents({"10": 1.0, "9": 1.0 - 1e-9, "a": 1.0, "é": 1.0, "A": 2.0}) == ["A", "é", "a", "9", "10"]


def test_an_unknown_metric_is_an_error() -> None:
    for name in ("ndgc@10", "ndcg@0", "mrr@"):
        with pytest.raises(ValueError, match=re.escape(f"metric is {name!r}")):
            score_ranking(["a"], {"a": 1}, [name])
