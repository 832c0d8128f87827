"""Models with parts that only pretraining needs, such as a generator or a decoder."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from bertblocks.models.base import BertBlocksPreTrainedModel
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.nn.attention import ForwardContext
from bertblocks.nn.backends.eager import RandomBackend
from bertblocks.nn.block import Block, get_block
from bertblocks.nn.initialization import init_module
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.linear import Linear


class TrainingModel(BertBlocksPreTrainedModel):
    """A model that is trained as a whole and written in parts."""

    @property
    def language_model(self) -> LanguageModel:
        """The part that predicts masked tokens, which held-out texts are scored with."""
        raise NotImplementedError

    def written(self) -> dict[str, BertBlocksPreTrainedModel]:
        return {"model": self.language_model}

    def set_rope_theta(self, theta: float) -> None:
        for part in self.written().values():
            part.set_rope_theta(theta)
        self.config.rope_theta = theta

    def set_causal(self, causal: bool) -> None:
        for part in self.written().values():
            part.set_causal(causal)
        self.config.causal = causal


class RandomAttentionLayer(nn.Module):
    """One more encoder layer, in which each query sees a random share of the other tokens and never its own."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        config = model.config
        index = config.layer_types.index("global") if "global" in config.layer_types else 0
        #: The encoder layer that it is a copy of, with weights of its own.
        self.model_layer = model.model.encoder.order[index]
        self.block = get_block(config, index, model.model.encoder.position)
        for module in self.block.modules():
            if isinstance(module, Linear):
                module.layer = index
            init_module(module, config)

    def forward(
        self,
        x: Tensor,
        token_ids: Tensor,
        layout: SequenceLayout,
        seeds: Sequence[int],
        hidden_share: float,
        memory: Tensor | None = None,
    ) -> Tensor:
        """`[tokens, hidden]` -> `[tokens, hidden]`. Keys and values come from `memory`, whose first token all see."""
        sees_first = memory is not None
        if memory is not None and isinstance(self.block, Block):  # nGPT's block has no norms
            memory = self.block.attention_residual.enter(memory)
        backend = RandomBackend(seeds, hidden_share, sees_first)
        return self.block(x, ForwardContext(layout, backend, token_ids=token_ids, start=x, memory=memory))[0]
