"""GLUE (Wang et al., 2018): its tasks, official metrics and published fine-tuning settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertblocks.evaluation.evaluate import evaluate
from bertblocks.evaluation.suite import SuiteResult, choose, finetune_once
from bertblocks.tasks.base import Scores
from bertblocks.text.tables import DataError

#: The name of GLUE in the `datasets` library.
DATASET = "nyu-mll/glue"


@dataclass(frozen=True)
class GlueTask:
    """A GLUE task with the settings published for ModernBERT-base."""

    #: The name in `datasets`, and the folder in the official download.
    name: str
    folder: str
    #: The columns of the official files, by role.
    columns: Mapping[str, str]
    #: The reported metrics. The task's score is their mean.
    metrics: tuple[str, ...]
    learning_rate: float
    weight_decay: float
    epochs: int
    #: The splits that are scored.
    evaluated: tuple[str, ...] = ("dev",)
    has_header: bool = True
    #: Small tasks benefit from starting with the model fine-tuned on MNLI.
    from_mnli: bool = False

    def parts(self, data: str | Path) -> dict[str, str]:
        """The training split and the evaluated splits: files in the official folder, or names for `datasets`."""
        names = ("train", *self.evaluated)
        if not Path(data).is_dir():
            return {part: f"{data}:{self.name}:{part.replace('dev', 'validation')}" for part in names}
        files = {part: Path(data) / self.folder / f"{part}.tsv" for part in names}
        for path in files.values():
            if not path.is_file():
                raise DataError(f"{path} does not exist; {data} must be the official GLUE folder or a dataset name.")
        return {part: str(path) for part, path in files.items()}

    def score(self, scores: Scores) -> float:
        """The task's score in a GLUE table, in percent."""
        return 100 * sum(scores[name] for name in self.metrics) / len(self.metrics)


_PAIR = {"text": "sentence1", "text_pair": "sentence2", "label": "label"}
TASKS = {
    task.name: task
    for task in (
        GlueTask("cola", "CoLA", {"text": "column4", "label": "column2"}, ("mcc",), 8e-5, 1e-6, 5, has_header=False),
        GlueTask("sst2", "SST-2", {"text": "sentence", "label": "label"}, ("accuracy",), 8e-5, 1e-5, 2),
        GlueTask(
            "mrpc",
            "MRPC",
            {"text": "#1 String", "text_pair": "#2 String", "label": "Quality"},
            ("accuracy", "f1"),
            5e-5,
            5e-6,
            10,
            from_mnli=True,
        ),
        GlueTask("stsb", "STS-B", _PAIR | {"label": "score"}, ("pearson", "spearman"), 8e-5, 5e-6, 10, from_mnli=True),
        GlueTask(
            "qqp",
            "QQP",
            {"text": "question1", "text_pair": "question2", "label": "is_duplicate"},
            ("accuracy", "f1"),
            5e-5,
            5e-6,
            10,
        ),
        GlueTask(
            "mnli",
            "MNLI",
            _PAIR | {"label": "gold_label"},
            ("accuracy",),
            5e-5,
            5e-6,
            1,
            evaluated=("dev_matched", "dev_mismatched"),
        ),
        GlueTask(
            "qnli",
            "QNLI",
            {"text": "question", "text_pair": "sentence", "label": "label"},
            ("accuracy",),
            8e-5,
            5e-6,
            2,
        ),
        GlueTask("rte", "RTE", _PAIR, ("accuracy",), 5e-5, 1e-5, 3, from_mnli=True),
        GlueTask("wnli", "WNLI", _PAIR, ("accuracy",), 5e-5, 5e-6, 3),
    )
}
#: The batch size and warmup share of the published settings.
BATCH_SIZE = 64
WARMUP = 0.1


def run_glue(
    model: str | Path,
    data: str | Path = DATASET,
    output: str | Path = "runs/glue",
    tasks: Sequence[str] = (),
    from_mnli: bool = True,
    progress: bool = False,
    **settings: Any,
) -> list[SuiteResult]:
    """Fine-tunes a model on GLUE tasks (default: all) and scores it on their development splits.

    MNLI comes first, and RTE, MRPC and STS-B start from its model unless `from_mnli` is False or MNLI is not selected.
    `settings` override the published settings in every task. Finished tasks are not run again.
    """
    chosen = sorted(choose("GLUE task", tasks, TASKS), key=lambda name: (name != "mnli", list(TASKS).index(name)))
    results = []
    for name in chosen:
        task, folder = TASKS[name], Path(output) / name
        parts = task.parts(data)
        columns = task.columns if Path(data).is_dir() else {}
        header = task.has_header if Path(data).is_dir() else None
        reading: dict[str, Any] = {**columns, "header": header, "problem": "regression" if name == "stsb" else None}
        start = Path(output) / "mnli" if task.from_mnli and from_mnli and "mnli" in chosen else model
        published = {
            "learning_rate": task.learning_rate,
            "weight_decay": task.weight_decay,
            "epochs": task.epochs,
            "batch_size": BATCH_SIZE,
            "warmup": WARMUP,
            "patience": None,
            "method": "full",
            "head": "random",
        }
        train, held_out = parts["train"], parts[task.evaluated[0]]
        finetune_once("classify", start, train, held_out, folder, progress, **{**published, **reading, **settings})
        scores = {part: evaluate("classify", folder, parts[part], **reading).scores for part in task.evaluated}
        results.append(SuiteResult(name, scores, sum(map(task.score, scores.values())) / len(scores)))
    return results
