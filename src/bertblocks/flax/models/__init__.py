"""Models by task."""

from bertblocks.flax.models.base import FlaxBertBlocksPreTrainedModel
from bertblocks.flax.models.masked_lm import FlaxBertBlocksForMaskedLM
from bertblocks.flax.models.model import FlaxBertBlocksModel
from bertblocks.flax.models.question_answering import FlaxBertBlocksForQuestionAnswering
from bertblocks.flax.models.sequence_classification import FlaxBertBlocksForSequenceClassification
from bertblocks.flax.models.token_classification import FlaxBertBlocksForTokenClassification

#: The model class of every task that exists in JAX, by the task's short name.
FLAX_TASK_MODELS: dict[str, type[FlaxBertBlocksPreTrainedModel]] = {
    model_class.task: model_class
    for model_class in (
        FlaxBertBlocksModel,
        FlaxBertBlocksForMaskedLM,
        FlaxBertBlocksForSequenceClassification,
        FlaxBertBlocksForTokenClassification,
        FlaxBertBlocksForQuestionAnswering,
    )
}

__all__ = [
    "FLAX_TASK_MODELS",
    "FlaxBertBlocksForMaskedLM",
    "FlaxBertBlocksForQuestionAnswering",
    "FlaxBertBlocksForSequenceClassification",
    "FlaxBertBlocksForTokenClassification",
    "FlaxBertBlocksModel",
    "FlaxBertBlocksPreTrainedModel",
]
