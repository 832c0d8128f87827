"""Makes the pipeline of each of `Predictor`'s methods, or says why the model cannot have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings
from bertblocks.checkpoints.sentence_transformers.cross_encoder import CrossEncoderSettings, make_activation
from bertblocks.checkpoints.sentence_transformers.modules import check_role
from bertblocks.checkpoints.sentence_transformers.multi_vector import MultiVectorSettings
from bertblocks.checkpoints.sentence_transformers.sparse_encoder import SparseEncoderSettings
from bertblocks.core.registry import nearest
from bertblocks.inference.pipeline import Pipeline
from bertblocks.inference.splitting import SequenceSplitter, TooLong
from bertblocks.models import (
    BertBlocksForQuestionAnswering,
    BertBlocksForSequenceClassification,
    BertBlocksForTokenClassification,
    BertBlocksPreTrainedModel,
)
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.nn.token_head import TokenHead
from bertblocks.tasks.answer.predictions import QuestionAnsweringPipeline
from bertblocks.tasks.classify.predictions import ClassificationPipeline
from bertblocks.tasks.embed.predictions import EmbeddingPipeline, TokenVectorsPipeline
from bertblocks.tasks.fill_mask import FillMaskPipeline
from bertblocks.tasks.multi.predictions import LateInteractionPipeline, MultiVectorPipeline
from bertblocks.tasks.multi.sequences import RoleTokenizer
from bertblocks.tasks.rerank.predictions import Ranked, RerankPipeline
from bertblocks.tasks.sparse.predictions import QueryWeightsPipeline, SparsePipeline
from bertblocks.tasks.tag.predictions import TaggingPipeline
from bertblocks.text.encoding import TextTokenizer

#: By method: the model class it needs, the name of the head, and the pipeline.
_HEADS: dict[str, tuple[type[BertBlocksPreTrainedModel], str, type[Pipeline[Any]]]] = {
    "fill_mask": (LanguageModel, "masked-lm", FillMaskPipeline),
    "classify": (BertBlocksForSequenceClassification, "sequence-classification", ClassificationPipeline),
    "tag": (BertBlocksForTokenClassification, "token-classification", TaggingPipeline),
    "answer": (BertBlocksForQuestionAnswering, "question-answering", QuestionAnsweringPipeline),
}
METHODS = ("encode", "encode_tokens", "encode_sparse", "encode_multi", "rerank", *_HEADS)


@dataclass(frozen=True)
class PipelineFactory:
    """A model, its tokenizer and settings, and what pipelines do with long texts; None leaves that to the task."""

    model: BertBlocksPreTrainedModel
    #: An `EmbeddingHead`, a `TokenHead`, or a user's module with the same methods.
    head: Any
    settings: EmbeddingSettings
    tokenizer: TextTokenizer
    max_length: int
    too_long: TooLong | None
    overlap: int | None

    def make(self, method: str, options: dict[str, Any]) -> Pipeline[Any]:
        """The pipeline of a method, with the method's options."""
        own: dict[str, Callable[..., Pipeline[Any]]] = {
            "encode": self._encode,
            "encode_tokens": self._encode_tokens,
            "encode_sparse": self._encode_sparse,
            "encode_multi": self._encode_multi,
            "rerank": self._rerank,
        }
        if method in own:
            return own[method](**options)
        if method not in _HEADS:
            raise ValueError(f"method is {method!r}; it must be one of {', '.join(METHODS)}{nearest(method, METHODS)}.")
        model_class, head, pipeline_class = _HEADS[method]
        if not isinstance(self.model, model_class):
            remedy = "pretrain" if method == "fill_mask" else f"finetune {method}"
            raise ValueError(
                f"{method} needs a model with a {head} head; this model is a {self._model_name}. "
                f"`bertblocks {remedy}` trains one."
            )
        return pipeline_class(cast(Any, self.model), self.splitter("window"), **options)

    def splitter(self, default: TooLong) -> SequenceSplitter:
        """What fits texts to the model; `default` applies if nothing says what to do with long ones."""
        return SequenceSplitter(self.tokenizer, self.max_length, self.too_long or default, self.overlap)

    @property
    def _model_name(self) -> str:
        return type(self.model).__name__

    def _encode(self, prompt: str | None = None, prompt_name: str | None = None, **options: Any) -> Pipeline[Any]:
        if self._is_scored_by_layers:
            raise ValueError("encode needs a model that makes embeddings; this one scores pairs. Use rerank.")
        if isinstance(self.head, TokenHead):
            raise ValueError("encode needs a model with one vector per text; this one has many. Use encode_multi.")
        found = self.settings.find_prompt(prompt, prompt_name)
        return EmbeddingPipeline(self.model, self.splitter("window"), self.head, found, **options)

    def _encode_tokens(self, prompt: str | None = None, prompt_name: str | None = None) -> Pipeline[Any]:
        found = self.settings.find_prompt(prompt, prompt_name)
        return TokenVectorsPipeline(self.model, self.splitter("truncate"), found)

    def _rerank(self, **options: Any) -> Pipeline[list[Ranked]]:
        if isinstance(self.settings, MultiVectorSettings):
            tokenizers = {role: self.role_tokenizer(role) for role in ("query", "document")}
            return LateInteractionPipeline(self.model, self.head, self.settings, tokenizers, **options)
        head = self.head if self._is_scored_by_layers else None
        if head is None and not isinstance(self.model, BertBlocksForSequenceClassification):
            raise ValueError(
                f"rerank needs a model with a sequence-classification head; this model is a {self._model_name}. "
                "`bertblocks finetune rerank` trains one."
            )
        labels = self.model.config.num_labels if head is None else head.size
        if labels != 1:
            raise ValueError(f"rerank needs a model with one label; this model has {labels}. Use classify on pairs.")
        activation = make_activation(self.settings, labels)
        prompt = self.settings.find_prompt(None, None)
        splitter = self.splitter("truncate")  # as sentence-transformers' CrossEncoder does
        return RerankPipeline(self.model, splitter, head, activation, prompt, **options)

    @property
    def _is_scored_by_layers(self) -> bool:
        """Whether modules behind the encoder make the score of a pair, instead of a classifier's head."""
        return isinstance(self.settings, CrossEncoderSettings) and bool(self.settings.layers)

    def _encode_sparse(self, role: str | None = None, top_k: int | None = None) -> Pipeline[Any]:
        if not isinstance(self.model, LanguageModel):
            raise ValueError(
                f"encode_sparse needs a model with a masked-lm head; this model is a {self._model_name}. "
                "`bertblocks finetune sparse` trains one."
            )
        settings = self.settings if isinstance(self.settings, SparseEncoderSettings) else SparseEncoderSettings()
        head = self.model.sparse_head or settings.make_head()
        prompt = self.settings.find_prompt(None, check_role(role))
        kind = QueryWeightsPipeline if role == "query" and head.query_weights is not None else SparsePipeline
        kept = settings.max_active_dims if top_k is None else top_k
        return kind(self.model, self.splitter("window"), head, prompt, kept)

    def _encode_multi(self, role: str | None = None, pool_factor: float | None = None) -> Pipeline[Any]:
        role = check_role(role) or "document"
        settings = cast(MultiVectorSettings, self.settings)
        return MultiVectorPipeline(self.model, self.head, settings, {role: self.role_tokenizer(role)}, pool_factor)

    def role_tokenizer(self, role: str | None = None) -> RoleTokenizer:
        """What turns texts of a role into the tokens that `encode_multi` gives vectors to."""
        if not isinstance(self.settings, MultiVectorSettings):
            raise ValueError(
                "encode_multi needs a multi-vector model, with one vector per token. `bertblocks finetune multi` "
                "trains one."
            )
        too_long = self.too_long or "truncate"
        role = check_role(role) or "document"
        return RoleTokenizer(self.tokenizer, self.settings, role, self.max_length, too_long, self.overlap)
