"""SuperGLUE (Wang et al., 2019): its tasks, files and official metrics. Each row becomes pairs of texts to label."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertblocks.evaluation.pair_tasks import (
    FALSE,
    TRUE,
    Item,
    PairTask,
    answer_set_scores,
    check_minimal_pairs,
    choice_scores,
    cloze_scores,
    get,
    get_label,
    label_scores,
    parity_scores,
    run_pair_tasks,
)
from bertblocks.evaluation.suite import SuiteResult, choose
from bertblocks.text.tables import DataError

_BOOLEAN = (FALSE, TRUE)
_ENTAILMENT = ("entailment", "not_entailment")
_Row = Mapping[str, Any]


def _pair(first: str, second: str, labels: Sequence[str]) -> Callable[[_Row, str], list[Item]]:
    """Two columns and a label."""

    def read(row: _Row, place: str) -> list[Item]:
        pair = (get(row, place, first), get(row, place, second))
        return [Item(place, [pair], [get_label(row, place, labels)])]

    return read


def _read_copa(row: _Row, place: str) -> list[Item]:
    question = get(row, place, "question")
    if question not in ("cause", "effect"):
        raise DataError(f"{place}: 'question' is {question!r}; it must be cause or effect.")
    right = get(row, place, "label", kind=int)
    if right not in (0, 1):
        raise DataError(f"{place}: the label is {right}; it must be 0 or 1.")
    asks = "What was the cause?" if question == "cause" else "What happened as a result?"
    premise = f"{get(row, place, 'premise')} {asks}"
    pairs = [(premise, get(row, place, name)) for name in ("choice1", "choice2")]
    return [Item(place, pairs, [TRUE if index == right else FALSE for index in range(2)])]


def _read_multirc(row: _Row, place: str) -> list[Item]:
    text = get(row, place, "passage", "text")
    items = []
    for number, question in enumerate(get(row, place, "passage", "questions", kind=list)):
        where = f"{place}, question {number + 1}"
        pairs, labels = [], []
        for index, answer in enumerate(get(question, where, "answers", kind=list)):
            written = get(question, where, "answers", index, "text")
            pairs.append((text, f"{get(question, where, 'question')} {written}"))
            labels.append(get_label({"label": str(answer.get("label"))}, where, ("0", "1")))
        items.append(Item(where, pairs, [TRUE if label == "1" else FALSE for label in labels]))
    return items


def _read_record(row: _Row, place: str) -> list[Item]:
    text = get(row, place, "passage", "text")
    entities = []
    for index in range(len(get(row, place, "passage", "entities", kind=list))):
        start, end = (get(row, place, "passage", "entities", index, key, kind=int) for key in ("start", "end"))
        entities.append(text[start : end + 1])  # the end is the last character
    entities = list(dict.fromkeys(entities))
    passage = text.replace("\n@highlight\n", " ")
    items = []
    for number, question in enumerate(get(row, place, "qas", kind=list)):
        where = f"{place}, query {number + 1}"
        query = get(question, where, "query")
        found = get(question, where, "answers", kind=list)
        answers = [get(question, where, "answers", index, "text") for index in range(len(found))]
        if "@placeholder" not in query or not entities or not answers:
            raise DataError(f"{where}: it needs a query with @placeholder, entities and answers.")
        pairs = [(passage, query.replace("@placeholder", entity)) for entity in entities]
        labels = [TRUE if entity in answers else FALSE for entity in entities]
        items.append(Item(where, pairs, labels, entities, answers))
    return items


def _read_wic(row: _Row, place: str) -> list[Item]:
    first = f"{get(row, place, 'word')}: {get(row, place, 'sentence1')}"
    return [Item(place, [(first, get(row, place, "sentence2"))], [get_label(row, place, _BOOLEAN)])]


def _read_wsc(row: _Row, place: str) -> list[Item]:
    """The pronoun is marked with asterisks; the second text is the noun that it may refer to."""
    words = get(row, place, "text").split()
    start = get(row, place, "target", "span2_index", kind=int)
    stop = start + len(get(row, place, "target", "span2_text").split())
    if not 0 <= start < stop <= len(words):
        raise DataError(f"{place}: span2_index is {start}; the text has {len(words)} words.")
    marked = " ".join([*words[:start], f"*{' '.join(words[start:stop])}*", *words[stop:]])
    return [Item(place, [(marked, get(row, place, "target", "span1_text"))], [get_label(row, place, _BOOLEAN)])]


def _split_of(folder: str) -> Callable[[str], str]:
    return lambda split: f"{folder}/{split}.jsonl"


def _only(folder: str) -> Callable[[str], str]:
    return lambda split: f"{folder}/{folder}.jsonl"


_CB = ("contradiction", "entailment", "neutral")
_DIAGNOSTIC: dict[str, Any] = {"model_of": "rte", "evaluated": "test"}
TASKS = {
    task.name: task
    for task in (
        PairTask("boolq", _split_of("BoolQ"), _pair("passage", "question", _BOOLEAN), label_scores, ("accuracy",)),
        PairTask("cb", _split_of("CB"), _pair("premise", "hypothesis", _CB), label_scores, ("accuracy", "f1_macro")),
        PairTask("copa", _split_of("COPA"), _read_copa, choice_scores, ("accuracy",)),
        PairTask("multirc", _split_of("MultiRC"), _read_multirc, answer_set_scores, ("f1a", "exact_match")),
        PairTask("record", _split_of("ReCoRD"), _read_record, cloze_scores, ("f1", "exact_match")),
        PairTask("rte", _split_of("RTE"), _pair("premise", "hypothesis", _ENTAILMENT), label_scores, ("accuracy",)),
        PairTask("wic", _split_of("WiC"), _read_wic, label_scores, ("accuracy",)),
        PairTask("wsc", _split_of("WSC"), _read_wsc, label_scores, ("accuracy",)),
        PairTask(
            "ax-b", _only("AX-b"), _pair("sentence1", "sentence2", _ENTAILMENT), label_scores, ("mcc",), **_DIAGNOSTIC
        ),
        PairTask(
            "ax-g",
            _only("AX-g"),
            _pair("premise", "hypothesis", _ENTAILMENT),
            parity_scores,
            ("accuracy",),
            check=check_minimal_pairs,
            **_DIAGNOSTIC,
        ),
    )
}


def run_superglue(
    model: str | Path,
    data: str | Path,
    output: str | Path = "runs/superglue",
    tasks: Sequence[str] = (),
    train: bool = True,
    progress: bool = False,
    **settings: Any,
) -> list[SuiteResult]:
    """Fine-tunes a model on SuperGLUE tasks (default: all) and scores it on their validation files.

    The diagnostic sets AX-b and AX-g are scored with the model of RTE and are not part of the mean. `settings` are
    those of fine-tuning. Finished tasks are not run again. Without `train`, the model is scored as it is.
    """
    chosen = choose("SuperGLUE task", tasks, TASKS)
    if train and "rte" not in chosen and (diagnostic := [name for name in chosen if TASKS[name].model_of]):
        raise DataError(f"tasks has {diagnostic[0]}, which is scored with the model of rte; add rte to tasks.")
    ordered = [task for name, task in TASKS.items() if name in chosen]
    return run_pair_tasks("SuperGLUE", ordered, model, data, Path(output), train, progress, **settings)
