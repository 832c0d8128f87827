"""The outputs of models, with the fields of transformers, as classes that compiled code can return."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import struct
from jax import Array


class Output(struct.PyTreeNode):
    """The fields that all tasks share; None unless requested."""

    #: Fields that have an entry for every token.
    per_token: ClassVar[tuple[str, ...]] = ()

    loss: Array | None = None
    #: The embeddings and every layer's output, `[rows, length, hidden]` each.
    hidden_states: tuple[Array, ...] | None = None
    #: Every layer's weights, `[rows, heads, length, length]` each.
    attentions: tuple[Array, ...] | None = None

    def crop(self, length: int) -> Any:
        """Removes the padding that was added to fill a bucket."""
        cropped: dict[str, Any] = {name: getattr(self, name)[:, :length] for name in self.per_token}
        if self.hidden_states is not None:
            cropped["hidden_states"] = tuple(state[:, :length] for state in self.hidden_states)
        if self.attentions is not None:
            cropped["attentions"] = tuple(weights[..., :length, :length] for weights in self.attentions)
        return self.replace(**cropped)


class EncoderModelOutput(Output):
    per_token: ClassVar[tuple[str, ...]] = ("last_hidden_state",)

    last_hidden_state: Array | None = None  # [rows, length, hidden]
    #: `[rows, hidden]`, or `[rows, sequences, hidden]` of packed rows; None without a pooler.
    pooler_output: Array | None = None


class TokenOutput(Output):
    per_token: ClassVar[tuple[str, ...]] = ("logits",)

    logits: Array | None = None  # [rows, length, vocabulary or labels]


class SequenceOutput(Output):
    #: `[rows, labels]`, or `[rows, sequences, labels]` of packed rows.
    logits: Array | None = None


class SpanOutput(Output):
    per_token: ClassVar[tuple[str, ...]] = ("start_logits", "end_logits")

    start_logits: Array | None = None  # [rows, length]
    end_logits: Array | None = None
