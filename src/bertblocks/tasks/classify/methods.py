"""The choice between the two methods that train a classifier."""

from __future__ import annotations

from collections.abc import Sequence

from bertblocks.tasks.classify.examples import TextExample
from bertblocks.tasks.classify.few_shot import FewShotTask
from bertblocks.tasks.classify.task import ClassifyTask
from bertblocks.text.tables import DataError

#: With at most this many examples per label, `method=auto` trains a sentence encoder by the few-shot method.
FEW_SHOT_EXAMPLES = 32


class AnyMethodTask(ClassifyTask):
    """A classifier whose method depends on the settings, the examples and the model."""

    def for_examples(self, examples: Sequence[TextExample], is_sentence_encoder: bool, pooling: str) -> ClassifyTask:
        settings, labels = self.settings, self._known_labels
        obstacles = {
            "it needs one label for each text": labels.problem != "single_label_classification",
            "it needs single texts, not pairs": any(example.pair is not None for example in examples),
            "it does not work with parallel=fsdp": settings.parallel == "fsdp",
            f"it pools by cls, last, mean or max, not by {pooling}": pooling not in ("cls", "last", "mean", "max"),
        }
        reasons = [reason for reason, is_given in obstacles.items() if is_given]
        if settings.method == "few-shot":
            if reasons:
                raise DataError(f"method is 'few-shot': {reasons[0]}; use method=full.")
            return FewShotTask.from_task(self, pooling)
        is_small = len(examples) <= FEW_SHOT_EXAMPLES * labels.size
        is_chosen = settings.method == "auto" and settings.head == "probe" and is_sentence_encoder and is_small
        return FewShotTask.from_task(self, pooling) if is_chosen and not reasons else self
