"""Masked diffusion: an encoder that generates text by filling in masks (Sahoo et al., 2024; Nie et al., 2025)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils.generic import can_return_tuple

from bertblocks.config import BertBlocksConfig
from bertblocks.models.masked_lm import IGNORE, LanguageModel, labelled_tokens
from bertblocks.nn.layout import SequenceLayout, is_data_hidden, keep_mask
from bertblocks.nn.numerics import upcast

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertblocks.models.inputs import EncoderOptions


class BertBlocksForMaskedDiffusion(LanguageModel):
    """Restores a random share of tokens that were masked; its loss bounds the negative log-likelihood per token.

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
            raise ValueError("mask_token_id is None; masked diffusion needs the id of [MASK].")
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
        scored_tokens: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool | None = None,
        **options: Unpack[EncoderOptions],
    ) -> MaskedLMOutput:
        """Returns logits and, given `labels`, the bound.

        With `timesteps`, one per sequence, `input_ids` are already masked, and `labels` hold the original of each
        masked token and -100 elsewhere; `scored_tokens` are those of `BertBlocksForMaskedLM`. Without `timesteps` the
        noise is drawn here: `input_ids` are the original tokens, and `labels` the same tokens with -100 for those that
        are never masked, such as a prompt. The loss is divided by the number of real tokens (of labelled tokens if the
        noise is drawn here) or by `num_items_in_batch`. If the config has `timestep_embedding`, the model reads the
        times too.
        """
        if input_ids is None:
            raise ValueError("Masked diffusion needs input_ids.")
        if timesteps is not None and labels is None and not self.config.timestep_embedding:
            raise ValueError("timesteps are given without labels; they weight the loss of labelled tokens: pass both.")
        draws_noise = labels is not None and timesteps is None
        if draws_noise or timesteps is not None:
            layout = self.model.layout(
                input_ids, attention_mask, options.get("cu_seqlens"), options.get("packed_seqlens")
            )
        if draws_noise:
            input_ids, labels, timesteps, real = self._mask(input_ids, labels, layout)  # type: ignore[arg-type]
            scored_tokens = None
        if timesteps is not None:
            _check_timesteps(timesteps, layout.num_sequences)
        want_logits = return_logits if return_logits is not None else labels is None or not self.training
        encoded = self.model.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            **options,
            token_indices=None
            if labels is None or want_logits
            else partial(labelled_tokens, labels=labels, indices=scored_tokens),
            timesteps=timesteps,
        )
        layout = encoded.layout
        logits = self.logits(encoded.hidden) if want_logits else None
        loss = None
        if labels is not None and timesteps is not None:
            targets = layout.real_labels(labels, IGNORE)
            indices = encoded.token_indices
            if indices is None:
                indices = labelled_tokens(layout, labels, scored_tokens)
            token_weights = 1 / upcast(timesteps)[layout.sequence_ids[indices]]
            if logits is None:
                weighted = self.fused_loss(encoded.hidden, targets[indices], token_weights)
            else:
                losses = F.cross_entropy(upcast(logits[indices]), targets[indices], reduction="none")
                weighted = losses @ token_weights.to(losses)
            count = real if draws_noise else layout.length_tensor.sum().clamp(min=1)
            weighted = encoded.add_router_loss(weighted, count)
            loss = weighted / (count if num_items_in_batch is None else num_items_in_batch)
        return MaskedLMOutput(
            loss=cast(Any, loss),
            logits=None if logits is None else layout.scatter(logits),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )

    def _mask(self, input_ids: Tensor, labels: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Masks each labelled token with probability t, which is drawn per sequence and stratified over the batch.

        Returns the noised ids, the labels of masked tokens, the times, and the number of labelled tokens.
        """
        count = layout.num_sequences
        strata = (torch.arange(count, device=layout.device) + torch.rand((), device=layout.device)) / max(count, 1)
        low = self.config.diffusion_min_time
        times = low + (1 - low) * strata[torch.randperm(count, device=layout.device)]
        targets = layout.real_labels(labels, IGNORE)
        labelled = targets != IGNORE
        masked = labelled & (torch.rand(targets.shape, device=layout.device) < times[layout.sequence_ids])
        noised = layout.gather(input_ids).masked_fill(masked, int(self.config.mask_token_id))  # type: ignore[arg-type]
        kept = targets.masked_fill(~masked, IGNORE)
        padding = self.config.pad_token_id or 0
        return (
            layout.scatter(noised, fill=padding),
            layout.scatter(kept, fill=IGNORE),
            times,
            labelled.sum().clamp(min=1),
        )

    # ------------------------------------------------------------------ generation

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 32,
        **sampling: Any,
    ) -> Tensor:
        """Continues each prompt by `max_new_tokens` tokens; without prompts, generates one text.

        The padding of a prompt moves behind its new tokens. `sampling` holds the options of `infill`.
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

        `order` "confidence" reveals the most probable tokens first, "ancestral" random ones at the rate of the
        diffusion. `temperature` 0 takes the most probable token; above 0, `top_k` and `top_p` restrict the choice.
        With `block_length` masks are filled block by block, left to right (semi-autoregressively; Nie et al., 2025),
        each in its share of the steps, at least one. [MASK] and padding are never generated.
        `on_step` is called with the ids after each pass.
        """
        _check_sampling(steps, order, temperature, top_k, top_p, block_length)
        ids = input_ids.clone()
        is_masked = torch.eq(ids, int(self.config.mask_token_id))  # type: ignore[arg-type]
        if attention_mask is not None:
            is_masked &= keep_mask(attention_mask)
        # blocks are counted in masked tokens, so each block generates `block_length` new tokens
        rank = is_masked.cumsum(dim=1) - 1
        size = block_length or max(int(is_masked.sum(dim=1).max()), 1)
        block_of = torch.where(is_masked, rank // size, -1)
        blocks = int(block_of.max()) + 1
        share = [steps // blocks + (index < steps % blocks) for index in range(blocks)]
        was_training = self.training
        self.eval()
        for block in range(blocks):
            passes = max(share[block], 1)
            for index in range(passes):
                todo = (block_of == block) & is_masked
                if not todo.any():
                    break
                encoded = self.model.encode(ids, attention_mask, token_indices=partial(_chosen_tokens, chosen=todo))
                tokens, confidence = self._choose(encoded.hidden, temperature, top_k, top_p, generator)
                new_ids, new_confidence = ids.clone(), confidence.new_zeros(ids.shape)
                new_ids[todo], new_confidence[todo] = tokens, confidence
                chosen = _reveal(todo, new_confidence, passes - index, order, generator)
                ids = torch.where(chosen, new_ids, ids)
                is_masked = is_masked & ~chosen
                on_step(ids)
        self.train(was_training)
        return ids

    def _choose(
        self,
        hidden: Tensor,  # [masked tokens, hidden]
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, Tensor]:
        """Chooses a token for every mask and returns it with its probability."""
        logits = upcast(self.logits(hidden))
        banned = [token for token in (self.config.mask_token_id, self.config.pad_token_id) if token is not None]
        logits[:, banned] = float("-inf")
        if temperature == 0:
            confidence, tokens = logits.softmax(dim=-1).max(dim=-1)
            return tokens, confidence
        probabilities = _truncate((logits / temperature).softmax(dim=-1), top_k, top_p)
        tokens = torch.multinomial(probabilities, 1, generator=generator)
        return tokens.squeeze(1), probabilities.gather(1, tokens).squeeze(1)


def _chosen_tokens(layout: SequenceLayout, chosen: Tensor) -> Tensor:
    return layout.gather(chosen).nonzero().squeeze(1)


def _truncate(probabilities: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Keeps the `top_k` most probable tokens, and of those the fewest whose sum reaches `top_p`; at least one."""
    if top_k is None and top_p is None:
        return probabilities
    ordered, index = probabilities.sort(dim=-1, descending=True)
    if top_k is not None:
        ordered[..., top_k:] = 0.0
    if top_p is not None:
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill(before >= top_p, 0.0)
    kept = torch.zeros_like(probabilities).scatter(-1, index, ordered)
    return kept / kept.sum(dim=-1, keepdim=True)


def _reveal(
    todo: Tensor, confidence: Tensor, passes_left: int, order: str, generator: torch.Generator | None
) -> Tensor:
    """Selects the masks that this pass fills; the last pass fills all."""
    if order == "ancestral":
        draw = torch.rand(todo.shape, generator=generator, device=todo.device)
        return todo & (draw < 1 / passes_left)
    quota = -(-todo.sum(dim=1, keepdim=True) // passes_left)  # rounded up: the last pass leaves none
    ranked = confidence.masked_fill(~todo, -1.0).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return todo & (ranked < quota)


def _check_timesteps(timesteps: Tensor, num_sequences: int) -> None:
    if timesteps.shape != (num_sequences,):
        raise ValueError(f"timesteps has shape {list(timesteps.shape)}; it must be [{num_sequences}].")
    is_known = timesteps.device.type == "cpu" and not is_data_hidden(timesteps)  # reading a GPU waits for it
    if is_known and not bool(((timesteps > 0) & (timesteps <= 1)).all()):
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
