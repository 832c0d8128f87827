"""How a flat `[tokens, ...]` tensor forms sequences.

There are two kinds. A *rectangular* layout has sequences of equal length, its tokens fill `rows x length` slots, and a
key mask marks padding if there is any. A *ragged* layout has sequences of any length one after the other, without
padding. Only attention backends distinguish the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Value = TypeVar("Value")


def _computed_once(compute: Callable[[SequenceLayout], Tensor]) -> property:
    """Like functools.cached_property, but without the lock that breaks torch.compile."""

    def read(layout: SequenceLayout) -> Tensor:
        return layout.memo(compute.__name__, lambda: compute(layout))

    return property(read, doc=compute.__doc__)


@dataclass
class SequenceLayout:
    """The sequences of a batch. A `from_*` constructor builds it once per forward pass, and all layers share it.

    Example:
        >>> import torch
        >>> layout = SequenceLayout.from_mask(torch.tensor([[1, 1, 1], [1, 0, 0]]))
        >>> layout.lengths, layout.gather(torch.tensor([[7, 8, 9], [5, 0, 0]])).tolist()
        ([3, 1], [7, 8, 9, 5])
    """

    #: The shape of the caller's input: `(batch, length)`, or `(tokens,)` for flat packed input.
    shape: tuple[int, ...]
    device: torch.device
    #: Index of every token within its sequence, before any offset.
    positions: Tensor  # [tokens]
    #: `(rows, length)` of a rectangular layout.
    rectangle: tuple[int, int] | None = None
    #: True for real tokens, in a rectangular layout with padding.
    key_mask: Tensor | None = None  # [rows, length]
    #: Whether what the key mask hides are tokens too, which see the others and are not seen.
    has_unseen_tokens: bool = False
    #: The length of every sequence of a ragged layout, zeros included.
    lengths: list[int] = field(default_factory=list)
    #: The index of every token in the flattened `shape`; None if tokens are in order.
    slots: Tensor | None = None  # [tokens]
    #: True for packed input, where sequences are not the rows of `shape`.
    is_packed: bool = False
    max_length: int = field(init=False)
    _memo: dict[Hashable, object] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.max_length = self.rectangle[1] if self.rectangle else max(self.lengths, default=0)

    # ------------------------------------------------------------------ constructors

    @classmethod
    def from_shape(cls, rows: int, length: int, device: torch.device) -> SequenceLayout:
        """Build a layout in which every slot is a real token."""
        positions = torch.arange(length, device=device).repeat(rows)
        return cls(shape=(rows, length), device=device, positions=positions, rectangle=(rows, length))

    @classmethod
    def from_mask(
        cls, mask: Tensor, unpad: bool = True, has_unseen_tokens: bool = False, device: torch.device | None = None
    ) -> SequenceLayout:
        """Build a layout from a `[batch, length]` mask in any form that `keep_mask` reads.

        The mask of a batch on a GPU is copied to the host, which waits for the GPU once; a mask that is on the host
        already, next to tokens on `device`, costs nothing.

        Padding on either side is dropped. A mask with holes inside a sequence keeps its padding, because distances and
        positions count the holes. So does every mask during graph capture, where shapes must not depend on data. With
        `has_unseen_tokens`, the mask hides tokens from attention, and nothing is dropped.
        """
        mask = _two_dimensional(mask)
        if has_unseen_tokens or is_data_hidden(mask):
            layout = cls._from_key_mask(keep_mask(mask).to(device or mask.device))
            layout.has_unseen_tokens = has_unseen_tokens
            return layout
        device = device or mask.device
        rows, length = mask.shape
        host = mask.cpu()  # the one read of a padded batch; everything below is computed on the host
        keep = keep_mask(host)
        if bool(keep.all()):
            return cls.from_shape(rows, length, device)
        counts = keep.sum(dim=1)
        first = keep.int().argmax(dim=1)
        last = length - 1 - keep.flip(1).int().argmax(dim=1)
        contiguous = bool(((counts == 0) | (counts == last - first + 1)).all())
        if not (unpad and contiguous):
            return cls._from_key_mask(to_device(keep, device))
        lengths = counts.tolist()
        slots = to_device(keep.flatten().nonzero().squeeze(1), device)
        return cls((rows, length), device, _positions(lengths, device), lengths=lengths, slots=slots)

    @classmethod
    def _from_key_mask(cls, keep: Tensor) -> SequenceLayout:
        """Build a rectangle whose rows are rotated so that each begins with its first real token."""
        rows, length = keep.shape
        columns = torch.arange(length, device=keep.device)
        rotated = columns + keep.int().argmax(dim=1)[:, None]
        rotated = torch.where(rotated < length, rotated, rotated - length)  # ONNX has no remainder of symbolic sizes
        slots = (rotated + torch.arange(rows, device=keep.device)[:, None] * length).flatten()
        return cls(
            (rows, length),
            keep.device,
            columns.repeat(rows),
            rectangle=(rows, length),
            key_mask=keep.gather(1, rotated),
            slots=slots,
        )

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor, shape: tuple[int, ...], device: torch.device | None = None
    ) -> SequenceLayout:
        """Build a layout from the cumulative lengths `[0, n1, n1 + n2, ...]` of flat packed tokens.

        Keep them on the host, next to tokens on `device`: lengths on a GPU have to be read back, which waits for it.
        """
        tokens, device = shape[-1], device or cu_seqlens.device
        bounds = cu_seqlens.tolist()
        is_row = cu_seqlens.dim() == 1 and bool(bounds) and not cu_seqlens.is_floating_point()
        lengths = [stop - start for start, stop in itertools.pairwise(bounds)] if is_row else []
        if not is_row or bounds[0] != 0 or bounds[-1] != tokens or min(lengths, default=0) < 0:
            raise ValueError(
                f"cu_seqlens is {bounds}; it must be a 1-d tensor of integers that starts at 0, never "
                f"decreases, and ends at the number of tokens, {tokens}."
            )
        return cls(shape, device, _positions(lengths, device), lengths=lengths, is_packed=True)

    @classmethod
    def from_packed_rows(
        cls, packed_seqlens: Tensor, shape: tuple[int, int], device: torch.device | None = None
    ) -> SequenceLayout:
        """Build a layout from the lengths `[batch, segments]` of the segments in each row, padded with zeros.

        Slots after the last segment of a row are padding. Keep the lengths on the host, as for `from_cu_seqlens`.
        """
        rows, length = shape
        table = packed_seqlens.tolist()
        if packed_seqlens.dim() != 2 or len(table) != rows:
            raise ValueError(
                f"packed_seqlens has shape {list(packed_seqlens.shape)}; it must be [{rows}, segments], one row "
                "of lengths for each row of the input."
            )
        for index, row in enumerate(table):
            if min(row, default=0) < 0 or sum(row) > length:
                raise ValueError(
                    f"packed_seqlens row {index} is {row}; lengths must not be negative and must sum to at most "
                    f"{length}, the input's length."
                )
        device = device or packed_seqlens.device
        lengths = [n for row in table for n in row if n > 0]
        starts = [torch.arange(index * length, index * length + sum(row)) for index, row in enumerate(table)]
        slots = to_device(torch.cat(starts), device)
        return cls(shape, device, _positions(lengths, device), lengths=lengths, slots=slots, is_packed=True)

    # ------------------------------------------------------------------ moving tokens

    def gather(self, x: Tensor) -> Tensor:
        """Flatten the caller's input and drop its padding: `[*shape, ...]` -> `[tokens, ...]`."""
        flat = x.flatten(0, len(self.shape) - 1)
        return flat if self.slots is None else flat[self.slots]

    def real_labels(self, labels: Tensor, ignore: int) -> Tensor:
        """Flatten labels, with `ignore` for padding: `[*shape]` -> `[tokens]`."""
        flat = self.gather(labels)
        return flat if self.key_mask is None else flat.masked_fill(~self.key_mask.flatten(), ignore)

    def scatter(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Restore the caller's shape, with `fill` at padding: `[tokens, ...]` -> `[*shape, ...]`."""
        if self.key_mask is not None:
            keep = self.key_mask.flatten().view(-1, *(1,) * (x.dim() - 1))
            x = torch.where(keep, x, x.new_full((), fill))
        if self.slots is not None:
            x = x.new_full((math.prod(self.shape), *x.shape[1:]), fill).index_put((self.slots,), x)
        return x.view(*self.shape, *x.shape[1:])

    # ------------------------------------------------------------------ sequences

    @property
    def num_sequences(self) -> int:
        return self.rectangle[0] if self.rectangle else len(self.lengths)

    @_computed_once
    def length_tensor(self) -> Tensor:
        """The number of real tokens in every sequence."""
        if self.key_mask is not None:
            return self.key_mask.sum(dim=1)
        if self.rectangle is not None:
            return torch.full((self.rectangle[0],), self.rectangle[1], device=self.device)
        return to_device(torch.tensor(self.lengths, dtype=torch.long), self.device)

    @_computed_once
    def cu_seqlens(self) -> Tensor:
        """The start of each sequence among the tokens, and the end of the last; int32, as flash-attn needs it."""
        if self.rectangle is not None:
            rows, length = self.rectangle
            return torch.arange(0, rows * length + 1, max(length, 1), device=self.device, dtype=torch.int32)
        bounds = torch.tensor([0, *self.lengths]).cumsum(0, dtype=torch.int32)
        return to_device(bounds, self.device)

    @_computed_once
    def sequence_ids(self) -> Tensor:
        """The index of every token's sequence."""
        if self.rectangle is not None:
            rows, length = self.rectangle
            return torch.arange(rows, device=self.device)[:, None].expand(rows, length).flatten()
        ids = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths, dtype=torch.long))
        return to_device(ids, self.device)

    @_computed_once
    def indices(self) -> Tensor:
        """The index of every token within its sequence, whatever positions the caller gave."""
        starts = self.cu_seqlens[:-1].long()[self.sequence_ids]
        return torch.arange(len(starts), device=self.device) - starts

    @_computed_once
    def first_tokens(self) -> Tensor:
        """The flat index of every sequence's first token; 0 for an empty sequence."""
        starts = self.cu_seqlens[:-1].long()
        return torch.where(self.length_tensor > 0, starts, torch.zeros_like(starts))

    @property
    def last_tokens(self) -> Tensor:
        """The flat index of every sequence's last token; 0 for an empty sequence."""
        if self.key_mask is None:
            ends = self.cu_seqlens[1:].long() - 1
        else:
            columns = torch.arange(self.key_mask.shape[1], device=self.device)
            rows = torch.arange(self.key_mask.shape[0], device=self.device) * self.key_mask.shape[1]
            ends = rows + (columns * self.key_mask).amax(1)
        return torch.where(self.length_tensor > 0, ends, torch.zeros_like(ends))

    def read_lengths(self) -> list[int]:
        """Return the number of real tokens in every sequence. A key mask has to be read back from its device."""
        if self.key_mask is not None:
            return self.length_tensor.tolist()
        rows, length = self.rectangle or (0, 0)
        return self.lengths or [length] * rows

    def slices(self) -> list[slice]:
        """Return the tokens of each non-empty sequence, with the padding that a key mask hides."""
        if self.rectangle is not None:
            rows, length = self.rectangle
            return [slice(start, start + length) for start in range(0, rows * length, max(length, 1))]
        ends = itertools.accumulate(self.lengths)
        return [slice(end - length, end) for length, end in zip(self.lengths, ends, strict=True) if length]

    def prepare(self, positions: Iterable[Any]) -> None:
        """Compute what layers share, so that a compiled layer finds it and its graph does not depend on lengths."""
        assert self.cu_seqlens is not None
        for position in positions:
            position.prepare(self)

    def memo(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return a value that all layers share, computed at the first request."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]  # type: ignore[return-value]


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor without waiting for the device, for which CUDA needs pinned memory."""
    if device.type == "cuda" and host.device.type == "cpu" and torch.cuda.is_available():
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def is_data_hidden(x: Tensor) -> bool:
    """True where values cannot be read: while a graph is captured, and of a tensor without values (fake or meta)."""
    return is_capturing() or x.device.type == "meta" or isinstance(x, FakeTensor)


def is_capturing() -> bool:
    """True while torch.compile, torch.export or torch.jit.trace captures a graph, which must not depend on data."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_symbolic(length: int) -> bool:
    """True for a length that torch.export leaves open. Code that branches on it makes a graph for some lengths only."""
    return isinstance(length, torch.SymInt)


def index_tokens(x: Tensor, token_indices: Tensor | None) -> Tensor:
    """Select tokens of a flat tensor; None selects all."""
    return x if token_indices is None else x.index_select(0, token_indices)


def keep_mask(mask: Tensor) -> Tensor:
    """Return True where a token is real, from booleans, 0/1 numbers, or an additive mask (0 keeps, -inf drops).

    The mask has the shape `[batch, length]` or, as transformers extends it, `[batch, 1, 1, length]`. Floats that are
    all 0 are an additive mask that keeps everything.
    """
    mask = _two_dimensional(mask)
    if mask.dtype == torch.bool:
        return mask
    if is_data_hidden(mask):
        return torch.where((mask > 0).any(), mask > 0, mask == 0) if mask.is_floating_point() else mask > 0
    if mask.is_floating_point() and bool((mask <= 0).all()):
        soft = (mask < 0) & (mask > -1e4)
        if bool(soft.any()):
            raise ValueError(
                f"attention_mask holds {mask[soft][0].item()}; an additive mask must hold 0 (keep) or very "
                "negative values such as -inf (drop), nothing in between."
            )
        return mask == 0
    if bool(((mask != 0) & (mask != 1)).any()):
        invalid = mask[(mask != 0) & (mask != 1)][0].item()
        raise ValueError(f"attention_mask holds {invalid}; use booleans, 0 and 1, or an additive mask of values <= 0.")
    return mask == 1


def _two_dimensional(mask: Tensor) -> Tensor:
    if mask.dim() == 4 and mask.shape[1] == mask.shape[2] == 1:
        mask = mask[:, 0, 0]
    if mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}; it must be [batch, length] (packed input takes "
            "cu_seqlens or packed_seqlens)."
        )
    return mask


def _positions(lengths: list[int], device: torch.device) -> Tensor:
    if not lengths:
        return torch.zeros(0, dtype=torch.long, device=device)
    return to_device(torch.cat([torch.arange(length) for length in lengths]), device)
