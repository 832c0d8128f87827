"""The batch that every model takes: sequences laid end to end, without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class FlatBatch:
    """Flat sequences, their targets, and the counts by which the sum of each loss is divided to give its mean.

    `labels` has one entry per token, sequence or example, as the loss requires; `order_labels` and `timesteps` belong
    to sentence order prediction and masked diffusion. `bags` lists the different tokens of each sequence, and
    `decoder_labels` and `seeds` are for decoders that hide tokens at random.

    Example:
        >>> batch = FlatBatch.from_sequences([[5, 6], [7]], types=[[0, 0], [0]])
        >>> batch.input_ids.tolist(), batch.cu_seqlens.tolist(), batch.token_type_ids
        ([5, 6, 7], [0, 2, 3], None)
    """

    #: What models read as numbers.
    on_host: ClassVar[frozenset[str]] = frozenset({"cu_seqlens", "seeds", "list_lengths"})

    input_ids: Tensor  # [tokens]
    cu_seqlens: Tensor  # [sequences + 1]
    token_type_ids: Tensor | None = None  # [tokens]
    labels: Tensor | None = None
    order_labels: Tensor | None = None  # [sequences]
    timesteps: Tensor | None = None  # [sequences]
    bags: Tensor | None = None  # [2, entries]: the sequence and the token of each entry
    decoder_labels: Tensor | None = None  # [tokens]
    decoder_tokens: Tensor | None = None  # the tokens with one of these labels
    seeds: Tensor | None = None  # [sequences]
    list_lengths: Tensor | None = None  # [queries], the number of documents, or of negatives, of each
    #: The tokens with a label. A model without them looks for them in `labels`, which waits for a GPU.
    scored_tokens: Tensor | None = None
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_sequences(
        cls,
        ids: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None = None,
        labels: Tensor | None = None,
        counts: dict[str, int] | None = None,
    ) -> FlatBatch:
        """Joins sequences. Token types that are all 0 are left out."""
        flat_types = [kind for sequence in types or () for kind in sequence]
        lengths = torch.tensor([0, *map(len, ids)], dtype=torch.int32)
        return cls(
            input_ids=torch.tensor([token for sequence in ids for token in sequence], dtype=torch.long),
            cu_seqlens=lengths.cumsum(0, dtype=torch.int32),
            token_type_ids=torch.tensor(flat_types, dtype=torch.long) if any(flat_types) else None,
            labels=labels,
            counts=counts or {},
        )

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The arguments of a model's forward pass, without targets."""
        inputs = {"input_ids": self.input_ids, "cu_seqlens": self.cu_seqlens}
        return inputs if self.token_type_ids is None else inputs | {"token_type_ids": self.token_type_ids}

    def to(self, device: torch.device | str) -> FlatBatch:
        """The batch on a device. What models read stays on the host, where they do not wait for a GPU."""
        return self._map(lambda name, value: value if name in self.on_host else value.to(device, non_blocking=True))

    def pin(self) -> FlatBatch:
        """The batch in memory from which a GPU copies in the background."""
        return self._map(lambda _, value: value.pin_memory())

    def _map(self, change: Callable[[str, Tensor], Tensor]) -> FlatBatch:
        values: dict[str, Any] = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        tensors = {name: change(name, value) for name, value in values.items() if isinstance(value, Tensor)}
        return type(self)(**(values | tensors))
