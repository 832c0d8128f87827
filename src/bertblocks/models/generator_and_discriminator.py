"""A generator and the discriminator that it trains (ELECTRA; Clark et al., 2020)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils.generic import ModelOutput

from bertblocks.models.base import BertBlocksPreTrainedModel
from bertblocks.models.masked_lm import IGNORE, BertBlocksForMaskedLM, LanguageModel, labelled_tokens
from bertblocks.models.replaced_token_detection import BertBlocksForReplacedTokenDetection
from bertblocks.models.training_model import TrainingModel
from bertblocks.nn.numerics import upcast

#: How discriminator and generator share token embeddings.
Sharing = Literal["none", "tied", "gradient_disentangled"]


@dataclass
class ReplacedTokenOutput(ModelOutput):
    """The summed loss of each model, the discriminator's logits, and which tokens were replaced."""

    generator_total: Tensor | None = None
    discriminator_total: Tensor | None = None
    logits: Tensor | None = None  # [tokens]
    replaced: Tensor | None = None  # [tokens]


class GeneratorAndDiscriminator(TrainingModel):
    """A generator that fills masks and a discriminator that finds what it filled in, trained together.

    With `sharing` "tied" both have one table of token embeddings. With "gradient_disentangled" (He et al., 2021) the
    discriminator's table is the generator's plus one of its own, and its loss does not reach the generator's. Until
    `merged_embeddings` adds them up, `discriminator` holds only its own part.
    """

    def __init__(
        self,
        generator: BertBlocksForMaskedLM,
        discriminator: BertBlocksForReplacedTokenDetection,
        sharing: Sharing = "gradient_disentangled",
    ) -> None:
        super().__init__(copy.deepcopy(discriminator.config))
        self.generator, self.discriminator, self.sharing = generator, discriminator, sharing
        if sharing == "none":
            return
        ours, theirs = self._tables()
        if ours.shape != theirs.shape:
            raise ValueError(
                f"sharing is {sharing!r}, but token embeddings have shape {list(ours.shape)} in the discriminator and "
                f"{list(theirs.shape)} in the generator; give both the same embedding_size."
            )
        with torch.no_grad():
            theirs.copy_(ours)
        if sharing == "tied":
            discriminator.set_input_embeddings(generator.get_input_embeddings())
        else:
            ours.data.zero_()

    def _tables(self) -> tuple[Tensor, Tensor]:
        """The token embeddings of the discriminator and of the generator."""
        return self.discriminator.model.embedding.token.weight, self.generator.model.embedding.token.weight

    def merged_embeddings(self) -> Tensor:
        """The token embeddings with which the discriminator works without the generator."""
        ours, theirs = self._tables()
        return ours + theirs if self.sharing == "gradient_disentangled" else ours

    @property
    def language_model(self) -> LanguageModel:
        return self.generator

    def written(self) -> dict[str, BertBlocksPreTrainedModel]:
        return {"model": self.discriminator, "generator": self.generator}

    def written_weights(self, name: str) -> dict[str, Tensor]:
        return {"model.embedding.token.weight": self.merged_embeddings()} if name == "model" else {}

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        labels: Tensor,
        random: torch.Generator | None = None,
        scored_tokens: Tensor | None = None,
    ) -> ReplacedTokenOutput:
        """Fills the tokens that have a label with samples of the generator, and scores both models.

        A sample that equals the original token does not count as replaced. `scored_tokens` are the flat indices of the
        tokens with a label, if the caller knows them.
        """
        encoded = self.generator.model.encode(
            input_ids,
            cu_seqlens=cu_seqlens,
            token_indices=partial(labelled_tokens, labels=labels, indices=scored_tokens),
        )
        indices = encoded.token_indices
        assert indices is not None
        logits, targets = upcast(self.generator.logits(encoded.hidden)), labels[indices]
        generator_total = F.cross_entropy(logits, targets, reduction="sum")
        generator_total = encoded.add_router_loss(generator_total, len(targets))
        with torch.no_grad():
            noise = torch.empty_like(logits).exponential_(generator=random)
            samples = (logits - noise.log()).argmax(dim=1)  # the Gumbel trick
            original = torch.where(labels == IGNORE, input_ids, labels)
            filled = original.index_copy(0, indices, samples)
            replaced = filled != original
        inputs: dict[str, Tensor] = {"input_ids": filled}
        if self.sharing == "gradient_disentangled":
            ours, theirs = self._tables()
            inputs = {"inputs_embeds": F.embedding(filled, ours) + F.embedding(filled, theirs.detach())}
        out = self.discriminator(**inputs, cu_seqlens=cu_seqlens, labels=replaced.long(), num_items_in_batch=1)
        return ReplacedTokenOutput(generator_total, out.loss, out.logits, replaced)
