"""Classification and regression of texts and pairs of texts."""

from bertblocks.tasks.classify.examples import TextExample
from bertblocks.tasks.classify.metrics import classification_scores, multi_label_scores, regression_scores
from bertblocks.tasks.classify.predictions import Classification, ClassificationPipeline
from bertblocks.tasks.classify.task import ClassifyTask

__all__ = [
    "Classification",
    "ClassificationPipeline",
    "ClassifyTask",
    "TextExample",
    "classification_scores",
    "multi_label_scores",
    "regression_scores",
]
