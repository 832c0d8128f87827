"""Masked diffusion: an encoder that writes text by filling in masks (Sahoo et al., 2024; Nie et al., 2025)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils.generic import can_return_tuple

from bertblocks.config import BertBlocksConfig
from bertblocks.models.masked_lm import IGNORE, LanguageModel, labelled_rows
from bertblocks.nn.layout import SequenceLayout, keep_mask
from bertblocks.nn.numerics import upcast


class BertBlocksForMaskedDiffusion(LanguageModel):
    """Restores tokens of which a random share was hidden; its loss bounds the negative log-likelihood per token.

    Example:
        >>> import torch
        >>> model = BertBlocksForMaskedDiffusion(BertBlocksConfig.from_preset("mini")).eval()
        >>> ids = torch.tensor([[5, 3, 7]])  # 3 is [MASK] here
        >>> filled = model.infill(ids)
        >>> filled[0, 0].item(), filled[0, 2].item(), (filled == 3).any().item()
        (5, 7, False)
    """

    def __init__(self, config: BertBlocksConfig) -> None:
        if config.mask_token_id is None:
            raise ValueError("mask_token_id is None; masked diffusion needs the id of the token that it fills in.")
        super().__init__(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        timesteps: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        packed_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool | None = None,
    ) -> MaskedLMOutput:
        """Logits and, given `labels`, the bound.

        With `timesteps`, one per sequence, `input_ids` are hidden already and `labels` hold the original of each hidden
        token, -100 elsewhere. Without them the noise is drawn here: `labels` are the original tokens, -100 for those
        that are never hidden (a prompt), and `input_ids` those same tokens. The loss is divided by the number of real
        tokens, or of labelled ones where the noise is drawn here, or by `num_items_in_batch`.
        """
        if input_ids is None:
            raise ValueError("Masked diffusion needs input_ids.")
        if timesteps is not None and labels is None:
            raise ValueError("timesteps are given without labels; they weigh the loss of labelled tokens.")
        drawn = labels is not None and timesteps is None
        if drawn:
            layout = self.model.layout(input_ids, attention_mask, cu_seqlens, packed_seqlens)
            input_ids, labels, timesteps, real = self._hide(input_ids, labels, layout)  # type: ignore[arg-type]
        want_logits = return_logits if return_logits is not None else labels is None or not self.training
        encoded = self.model.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            None,
            cu_seqlens,
            packed_seqlens,
            output_hidden_states,
            output_attentions,
            rows=None if labels is None or want_logits else partial(labelled_rows, labels=labels),
        )
        layout = encoded.layout
        logits = self.logits(encoded.hidden) if want_logits else None
        loss = None
        if labels is not None and timesteps is not None:
            _check_timesteps(timesteps, layout.num_sequences)
            targets = layout.real_labels(labels, IGNORE)
            rows = labelled_rows(layout, labels) if encoded.rows is None else encoded.rows
            row_weights = 1 / upcast(timesteps)[layout.sequence_ids[rows]]
            if logits is None:
                weighted = self.summed_loss(encoded.hidden, targets[rows], row_weights)
            else:
                losses = F.cross_entropy(upcast(logits[rows]), targets[rows], reduction="none")
                weighted = losses @ row_weights.to(losses)
            if num_items_in_batch is None:
                num_items_in_batch = real if drawn else layout.length_tensor.sum().clamp(min=1)
            loss = weighted / num_items_in_batch
        return MaskedLMOutput(
            loss=loss,
            logits=None if logits is None else layout.scatter(logits),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )

    def _hide(self, input_ids: Tensor, labels: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hides each labelled token with probability t, t being drawn per sequence and stratified over the batch."""
        count = layout.num_sequences
        strata = (torch.arange(count, device=layout.device) + torch.rand((), device=layout.device)) / max(count, 1)
        low = self.config.diffusion_min_time
        times = low + (1 - low) * strata[torch.randperm(count, device=layout.device)]
        targets = layout.real_labels(labels, IGNORE)
        open_ = targets != IGNORE
        hidden = open_ & (torch.rand(targets.shape, device=layout.device) < times[layout.sequence_ids])
        noised = layout.gather(input_ids).masked_fill(hidden, int(self.config.mask_token_id))  # type: ignore[arg-type]
        kept = targets.masked_fill(~hidden, IGNORE)
        padding = self.config.pad_token_id or 0
        return (
            layout.scatter(noised, fill=padding),
            layout.scatter(kept, fill=IGNORE),
            times,
            open_.sum().clamp(min=1),
        )

    # ------------------------------------------------------------------ writing

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 32,
        **sampling,
    ) -> Tensor:
        """Continues each prompt by `max_new_tokens` tokens; without prompts, writes one text from nothing.

        A prompt's padding moves behind its new tokens. `sampling` is as in `infill`.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
        if input_ids is None:
            input_ids = torch.zeros(1, 0, dtype=torch.long, device=self.device)
        mask_id, padding = int(self.config.mask_token_id), self.config.pad_token_id or 0  # type: ignore[arg-type]
        keep = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else keep_mask(attention_mask)
        width = input_ids.shape[1] + max_new_tokens
        canvas = input_ids.new_full((input_ids.shape[0], width), padding)
        real = torch.zeros_like(canvas, dtype=torch.bool)
        for row, (ids, kept) in enumerate(zip(input_ids, keep, strict=True)):
            prompt = ids[kept]
            end = len(prompt) + max_new_tokens
            canvas[row, : len(prompt)] = prompt
            canvas[row, len(prompt) : end] = mask_id
            real[row, :end] = True
        return self.infill(canvas, real, **sampling)

    @torch.no_grad()
    def infill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        steps: int = 32,
        order: str = "confidence",
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        block_length: int | None = None,
        generator: torch.Generator | None = None,
        on_step: Callable[[Tensor], None] = lambda ids: None,
    ) -> Tensor:
        """Fills every [MASK] of `input_ids` over `steps` forward passes, without dropout, and keeps all other tokens.

        `order` "confidence" reveals the surest tokens first, "ancestral" random ones at the rate of the diffusion.
        `temperature` 0 takes the likeliest token; `top_k` and `top_p` narrow the choice above 0. With `block_length`
        masks are filled block by block from left to right. [MASK] and padding are never written. `on_step` is shown the
        ids after each pass.
        """
        _check_sampling(steps, order, temperature, top_k, top_p, block_length)
        ids = input_ids.clone()
        open_ = torch.eq(ids, int(self.config.mask_token_id))  # type: ignore[arg-type]
        if attention_mask is not None:
            open_ &= keep_mask(attention_mask)
        # the block of every open slot, counted in open slots, so that a block is that many new tokens
        rank = open_.cumsum(dim=1) - 1
        size = block_length or max(int(open_.sum(dim=1).max()), 1)
        block_of = torch.where(open_, rank // size, -1)
        blocks = int(block_of.max()) + 1
        share = [steps // blocks + (index < steps % blocks) for index in range(blocks)]
        was_training = self.training
        self.eval()
        for block in range(blocks):
            passes = max(share[block], 1)
            for index in range(passes):
                todo = (block_of == block) & open_
                if not todo.any():
                    break
                open_rows = partial(_rows, chosen=todo)
                encoded = self.model.encode(ids, attention_mask, rows=open_rows)
                tokens, sureness = self._choose(encoded.hidden, temperature, top_k, top_p, generator)
                ids_now, sureness_now = ids.clone(), torch.zeros(ids.shape, device=ids.device)
                ids_now[todo], sureness_now[todo] = tokens, sureness
                chosen = _reveal(todo, sureness_now, passes - index, order, generator)
                ids = torch.where(chosen, ids_now, ids)
                open_ = open_ & ~chosen
                on_step(ids)
        self.train(was_training)
        return ids

    def _choose(
        self,
        hidden: Tensor,  # [open slots, hidden]
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, Tensor]:
        """A token for every open slot, and its probability."""
        logits = upcast(self.logits(hidden))
        banned = [token for token in (self.config.mask_token_id, self.config.pad_token_id) if token is not None]
        logits[:, banned] = float("-inf")
        if temperature == 0:
            sureness, tokens = logits.softmax(dim=-1).max(dim=-1)
            return tokens, sureness
        probabilities = _narrow((logits / temperature).softmax(dim=-1), top_k, top_p)
        tokens = torch.multinomial(probabilities, 1, generator=generator)
        return tokens.squeeze(1), probabilities.gather(1, tokens).squeeze(1)


def _rows(layout: SequenceLayout, chosen: Tensor) -> Tensor:
    return layout.gather(chosen).nonzero().squeeze(1)


def _narrow(probabilities: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Only the `top_k` likeliest tokens, and of those the fewest that reach `top_p` together; at least one."""
    if top_k is None and top_p is None:
        return probabilities
    ordered, index = probabilities.sort(dim=-1, descending=True)
    if top_k is not None:
        ordered[..., top_k:] = 0.0
    if top_p is not None:
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill(before >= top_p, 0.0)
    narrowed = torch.zeros_like(probabilities).scatter(-1, index, ordered)
    return narrowed / narrowed.sum(dim=-1, keepdim=True)


def _reveal(todo: Tensor, sureness: Tensor, passes_left: int, order: str, generator: torch.Generator | None) -> Tensor:
    """Which of the open slots are written in this pass: all of them in the last one."""
    if order == "ancestral":
        draw = torch.rand(todo.shape, generator=generator, device=todo.device)
        return todo & (draw < 1 / passes_left)
    quota = -(-todo.sum(dim=1, keepdim=True) // passes_left)  # rounded up, so that none is left at the end
    ranked = sureness.masked_fill(~todo, -1.0).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return todo & (ranked < quota)


def _check_timesteps(timesteps: Tensor, num_sequences: int) -> None:
    if timesteps.shape != (num_sequences,):
        raise ValueError(f"timesteps has shape {list(timesteps.shape)}; it must be [{num_sequences}].")
    if not torch.compiler.is_compiling() and not bool(((timesteps > 0) & (timesteps <= 1)).all()):
        raise ValueError(f"timesteps holds {timesteps.tolist()}; each must be greater than 0 and at most 1.")


def _check_sampling(
    steps: int, order: str, temperature: float, top_k: int | None, top_p: float | None, block_length: int | None
) -> None:
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be at least 1.")
    if order not in ("confidence", "ancestral"):
        raise ValueError(f"order is {order!r}; it must be 'confidence' or 'ancestral'.")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must not be negative.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be greater than 0 and at most 1.")
    if block_length is not None and block_length < 1:
        raise ValueError(f"block_length is {block_length}; it must be at least 1.")
