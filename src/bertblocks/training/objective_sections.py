"""The objectives that a recipe can name, with their keys. `objectives/` holds what they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from bertblocks.core.settings import Positive, Section, SectionRegistry, Share

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig
    from bertblocks.objectives import MaskedLanguageModeling, Objective
    from bertblocks.text.vocabulary import Vocabulary

#: Objectives by the name that `objective.kind` can hold.
OBJECTIVES = SectionRegistry("objective.kind", default="masked_lm")
register_objective = OBJECTIVES.register

Rate = Annotated[float, Field(gt=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
#: Config keys that follow from others, so a generator with its own sizes does not inherit them.
IMPLIED = {
    frozenset({"num_hidden_layers"}): {"layer_types", "num_hidden_groups"},
    frozenset({"num_attention_heads", "hidden_size"}): {"head_dim", "num_kv_heads", "embedding_projection"},
}


class ObjectiveSection(Section):
    """What every objective defines. Subclass it for one of your own."""

    kind: str = ""  # the name under which a subclass is registered

    @property
    def model_task(self) -> str:
        """The task model that the objective trains, as a key of `TASK_MODELS`."""
        return "masked-lm"

    @property
    def added_parts(self) -> str:
        """What `prepare_model` adds to the task model, in words. All phases of a run train the same parts."""
        return ""

    @property
    def labelled_share(self) -> float:
        """The share of tokens that reaches the prediction head, to estimate costs."""
        return 1.0

    def build(self, vocabulary: Vocabulary, config: BertBlocksConfig) -> Objective:
        """The objective of a phase."""
        raise NotImplementedError

    def prepare_model(self, model: Any) -> Any:
        """The model that is trained, given the task model: the same, with parts frozen, or a larger one around it."""
        return model


class MaskRateSchedule(Section):
    """A mask rate that moves from one value to another over a phase."""

    start: Rate
    end: Rate
    kind: Literal["linear", "cosine"] = "linear"


class MaskingSection(ObjectiveSection):
    """The keys of objectives that mask tokens."""

    rate: Rate | MaskRateSchedule = 0.3
    """The share of tokens that is masked and predicted, constant or scheduled over each phase."""
    mask_share: Share = 0.8
    """The share of selected tokens that is replaced by [MASK]."""
    random_share: Share = 0.1
    """The share of selected tokens that is replaced by a random token. The rest stays unchanged."""
    masking: str = "token"
    """What is selected together: token, word, span (of tokens), word_span, or a registered masking."""
    masking_options: dict[str, Any] = {}
    """Keyword arguments of a registered masking."""

    @model_validator(mode="before")
    @classmethod
    def _read_former_keys(cls, values: Any) -> Any:
        """`whole_word` and `spans` are the keys of 0.1.0."""
        if not isinstance(values, Mapping) or not {"whole_word", "spans"} & set(values):
            return values
        values = dict(values)
        units = [name for key, name in (("whole_word", "word"), ("spans", "span")) if values.pop(key, False)]
        return values if not units else {"masking": "_".join(units), **values}

    @field_validator("masking")
    @classmethod
    def _is_registered(cls, name: str) -> str:
        from bertblocks.objectives.maskings import MASKINGS

        if name not in MASKINGS:
            raise ValueError(MASKINGS.describe_unknown(name))
        return name

    @model_validator(mode="after")
    def _check(self) -> MaskingSection:
        if self.mask_share + self.random_share > 1 + 1e-9:
            shares = f"mask_share {self.mask_share} and random_share {self.random_share}"
            raise ValueError(f"has {shares}; their sum must be at most 1")
        if self.masking_options:
            from bertblocks.objectives.maskings import check_options

            check_options(self.masking, self.masking_options)
        return self

    @property
    def labelled_share(self) -> float:
        return (self.rate.start + self.rate.end) / 2 if isinstance(self.rate, MaskRateSchedule) else self.rate

    def build_masking(self, vocabulary: Vocabulary, z_loss: float = 0.0) -> MaskedLanguageModeling:
        from bertblocks import objectives
        from bertblocks.objectives.maskings import get_masking

        rate = self.rate
        return objectives.MaskedLanguageModeling(
            vocabulary,
            objectives.RateSchedule(rate.start, rate.end, rate.kind) if isinstance(rate, MaskRateSchedule) else rate,
            self.mask_share,
            self.random_share,
            get_masking(self.masking, self.masking_options),
            z_loss,
        )


@register_objective("masked_lm")
class MaskedLM(MaskingSection):
    sentence_order: bool = False
    """Adds sentence-order prediction (Lan et al., 2020)."""
    z_loss: NotNegative = 0.0
    """The weight of the squared log of the softmax's denominator, which keeps logits from drifting; 1e-4 is usual."""
    bag_of_subwords: NotNegative = 0.0
    """The weight of predicting which tokens occur in a text from its mean vector."""
    isotropy: NotNegative = 0.0
    """The weight of the squared cosines of the mean vectors of different texts."""

    @model_validator(mode="after")
    def _check_terms(self) -> MaskedLM:
        if self.sentence_order and (self.bag_of_subwords or self.isotropy):
            raise ValueError("has sentence_order, which cannot be combined with bag_of_subwords or isotropy")
        return self

    @property
    def model_task(self) -> str:
        return "pretraining" if self.sentence_order else "masked-lm"

    @property
    def added_parts(self) -> str:
        return "a bag of subwords" if self.bag_of_subwords else "isotropy" if self.isotropy else ""

    def build(self, vocabulary: Vocabulary, config: BertBlocksConfig) -> Objective:
        from bertblocks import objectives

        masking = self.build_masking(vocabulary, self.z_loss)
        if self.added_parts:
            return objectives.MaskedLMWithPooledTerms(masking, self.bag_of_subwords, self.isotropy)
        if not self.sentence_order:
            return masking
        return objectives.SentenceOrder(vocabulary, masking, config.type_vocab_size >= 2)

    def prepare_model(self, model: Any) -> Any:
        from bertblocks.models import MaskedLMWithPooledTerms

        return MaskedLMWithPooledTerms(model, self.bag_of_subwords > 0) if self.added_parts else model


@register_objective("retromae")
class RetroMAE(MaskingSection):
    """A decoder of one layer reconstructs the text from the vector of its first token (Xiao et al., 2022)."""

    decoder_rate: Rate = 0.5
    """The share of the other tokens that the decoder hides when it predicts a token."""

    @property
    def added_parts(self) -> str:
        return "a decoder"

    def build(self, vocabulary: Vocabulary, config: BertBlocksConfig) -> Objective:
        from bertblocks import objectives

        return objectives.RetroMAE(self.build_masking(vocabulary), self.decoder_rate)

    def prepare_model(self, model: Any) -> Any:
        from bertblocks import models

        return models.RetroMAE(model)


@register_objective("enhanced_masked_lm")
class EnhancedMaskedLM(ObjectiveSection):
    """Predicts every token in one more layer, from a random share of the states of the other tokens."""

    decoder_rate: Rate = 0.5
    """The share of the other tokens that this layer hides when it predicts a token."""

    @property
    def added_parts(self) -> str:
        return "one more layer"

    def build(self, vocabulary: Vocabulary, config: BertBlocksConfig) -> Objective:
        from bertblocks import objectives

        return objectives.EnhancedMaskedLM(vocabulary, self.decoder_rate)

    def prepare_model(self, model: Any) -> Any:
        from bertblocks import models

        return models.EnhancedMaskedLM(model)


@register_objective("replaced_tokens")
class ReplacedTokens(MaskingSection):
    """Replaced token detection (Clark et al., 2020): a small generator fills masks, the model finds its fillings."""

    rate: Rate | MaskRateSchedule = 0.15
    mask_share: Share = 1.0
    random_share: Share = 0.0
    generator: dict[str, Any] | None = None
    """Config keys of the generator that differ from the model's. Default: a quarter of its heads and width."""
    sharing: Literal["none", "tied", "gradient_disentangled"] = "gradient_disentangled"
    """Token embeddings: separate, one table for both, or the generator's plus a table of differences (DeBERTaV3)."""
    weight: Positive = 50.0
    """The weight of the discriminator's loss."""

    @property
    def model_task(self) -> str:
        return "replaced-token-detection"

    @property
    def added_parts(self) -> str:
        return "a generator"

    def build(self, vocabulary: Vocabulary, config: BertBlocksConfig) -> Objective:
        from bertblocks import objectives

        return objectives.ReplacedTokens(self.build_masking(vocabulary), self.weight)

    def prepare_model(self, model: Any) -> Any:
        """Adds the generator."""
        from bertblocks.models import BertBlocksForMaskedLM, GeneratorAndDiscriminator

        generator = BertBlocksForMaskedLM(self.generator_config(model.config))
        return GeneratorAndDiscriminator(generator, model, self.sharing)

    def generator_config(self, config: BertBlocksConfig) -> BertBlocksConfig:
        """The generator's config: the model's, with the keys of `generator` and without what they imply."""
        own = self.generator
        if own is None:
            heads = max(config.num_attention_heads // 4, 1)
            width = {"num_attention_heads": heads, "hidden_size": heads * config.head_dim}
            # a head with a dense layer leads from this width to that of the embeddings
            own = {**width, "intermediate_size": max(config.intermediate_size // 4, 1), "mlm_head_dense": True}
        values = {"embedding_size": config.embedding_size, **config.to_dict()}
        for keys, implied in IMPLIED.items():
            if keys & set(own):
                values = {key: value for key, value in values.items() if key not in implied}
        return type(config).from_dict({**values, **own})


@register_objective("causal_lm")
class CausalLM(ObjectiveSection):
    """Predicts every token from those before it, with causal attention. A later phase may continue as masked_lm."""

    z_loss: NotNegative = 0.0
    """As for masked_lm."""

    def build(self, vocabulary: Vocabulary, config: BertBlocksConfig) -> Objective:
        from bertblocks import objectives

        return objectives.CausalLanguageModeling(vocabulary, self.z_loss)


@register_objective("sentence_order")
class SentenceOrder(ObjectiveSection):
    @property
    def model_task(self) -> str:
        return "pretraining"

    @property
    def labelled_share(self) -> float:
        return 0.0

    def build(self, vocabulary: Vocabulary, config: BertBlocksConfig) -> Objective:
        from bertblocks import objectives

        return objectives.SentenceOrder(vocabulary, token_types=config.type_vocab_size >= 2)

    def prepare_model(self, model: Any) -> Any:
        """Freezes the masked-LM head and the decoder's bias, which sentence order alone does not train."""
        head = [*([] if model.head is None else model.head.parameters()), *model.decoder.parameters()]
        shared = {id(parameter) for parameter in model.base_model.parameters()}
        for parameter in head:
            if id(parameter) not in shared:
                parameter.requires_grad_(False)
        return model


@register_objective("masked_diffusion")
class MaskedDiffusion(ObjectiveSection):
    @property
    def model_task(self) -> str:
        return "masked-diffusion"

    @property
    def labelled_share(self) -> float:
        return 0.5

    def build(self, vocabulary: Vocabulary, config: BertBlocksConfig) -> Objective:
        from bertblocks import objectives

        return objectives.MaskedDiffusion(vocabulary, config.diffusion_min_time)
