"""Models by task, registered with transformers' Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from bertblocks.config import BertBlocksConfig
from bertblocks.models.base import BertBlocksPreTrainedModel
from bertblocks.models.generator_and_discriminator import GeneratorAndDiscriminator
from bertblocks.models.masked_diffusion import BertBlocksForMaskedDiffusion
from bertblocks.models.masked_lm import BertBlocksForMaskedLM
from bertblocks.models.masked_lm_decoders import EnhancedMaskedLM, RetroMAE
from bertblocks.models.masked_lm_pooled import MaskedLMWithPooledTerms
from bertblocks.models.model import BertBlocksModel
from bertblocks.models.pretraining import BertBlocksForPreTraining
from bertblocks.models.question_answering import BertBlocksForQuestionAnswering
from bertblocks.models.replaced_token_detection import BertBlocksForReplacedTokenDetection
from bertblocks.models.sequence_classification import BertBlocksForSequenceClassification
from bertblocks.models.token_classification import BertBlocksForTokenClassification
from bertblocks.models.training_model import TrainingModel

AutoConfig.register("bertblocks", BertBlocksConfig, exist_ok=True)
for auto_class, model_class in (
    (AutoModel, BertBlocksModel),
    (AutoModelForMaskedLM, BertBlocksForMaskedLM),
    (AutoModelForPreTraining, BertBlocksForPreTraining),
    (AutoModelForSequenceClassification, BertBlocksForSequenceClassification),
    (AutoModelForTokenClassification, BertBlocksForTokenClassification),
    (AutoModelForQuestionAnswering, BertBlocksForQuestionAnswering),
):
    auto_class.register(BertBlocksConfig, model_class, exist_ok=True)

#: The model class of every task, by the task's short name.
TASK_MODELS: dict[str, type[BertBlocksPreTrainedModel]] = {
    "base": BertBlocksModel,
    "masked-lm": BertBlocksForMaskedLM,
    "pretraining": BertBlocksForPreTraining,
    "replaced-token-detection": BertBlocksForReplacedTokenDetection,
    "sequence-classification": BertBlocksForSequenceClassification,
    "token-classification": BertBlocksForTokenClassification,
    "question-answering": BertBlocksForQuestionAnswering,
    "masked-diffusion": BertBlocksForMaskedDiffusion,
}

__all__ = [
    "TASK_MODELS",
    "BertBlocksForMaskedDiffusion",
    "BertBlocksForMaskedLM",
    "BertBlocksForPreTraining",
    "BertBlocksForQuestionAnswering",
    "BertBlocksForReplacedTokenDetection",
    "BertBlocksForSequenceClassification",
    "BertBlocksForTokenClassification",
    "BertBlocksModel",
    "BertBlocksPreTrainedModel",
    "EnhancedMaskedLM",
    "GeneratorAndDiscriminator",
    "MaskedLMWithPooledTerms",
    "RetroMAE",
    "TrainingModel",
]
