"""An encoder that is trained to make embeddings and to predict masked tokens, in turns."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from bertblocks.models.masked_lm import BertBlocksForMaskedLM, LanguageModel
from bertblocks.models.model import BertBlocksModel
from bertblocks.models.training_model import TrainingModel


class EmbedderAndLanguageModel(TrainingModel):
    """A masked language model whose encoder has an embedding head; with labels it predicts tokens, else it embeds."""

    def __init__(self, encoder: BertBlocksForMaskedLM) -> None:
        super().__init__(copy.deepcopy(encoder.config))
        self.encoder = encoder

    @property
    def language_model(self) -> LanguageModel:
        return self.encoder

    @property
    def model(self) -> BertBlocksModel:
        return self.encoder.model

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        if labels is None:
            return self.encoder.model(input_ids, **options)
        return self.encoder(input_ids, labels=labels, **options)
