"""A start for the masked-LM head of a checkpoint that has none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.tasks.features import Feature

STEPS, TOKENS, RATE = 200, 1024, 2e-3
#: Tokens whose logits over the whole vocabulary are in memory at once.
SAMPLE = 128


def fit_to_own_tokens(model: LanguageModel, sequences: Sequence[Feature]) -> None:
    """Trains a new head to predict every token from its own hidden state; the encoder and its embeddings stay.

    The vectors of texts then have the words of the texts, so that training starts from lexical matches. The biases are
    moved so that a logit of 0 separates a token from the others.
    """
    parameters = [] if model.head is None else list(model.head.parameters())
    bias: nn.Parameter | None = model.decoder.bias
    parameters += [] if bias is None else [bias]
    if not parameters:
        return
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    was_training = model.training
    model.eval()
    for batch in itertools.islice(_repeat(sequences), STEPS):
        batch = batch.to(device)
        hidden = _encode(model, batch)
        loss = model.fused_loss(hidden, batch.input_ids) / len(hidden)
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    optimizer.zero_grad()
    if bias is not None:
        with torch.no_grad():
            logits = model.logits(hidden[:SAMPLE])
            own = logits.gather(1, batch.input_ids[:SAMPLE, None])
            others = logits.scatter(1, batch.input_ids[:SAMPLE, None], float("-inf")).amax(1)
            bias -= ((own.squeeze(1) + others) / 2).mean()
    model.train(was_training)


@torch.no_grad()
def _encode(model: LanguageModel, batch: FlatBatch) -> Tensor:
    return model.base_model.encode(**batch.inputs).hidden


def _repeat(sequences: Sequence[Feature]) -> Iterator[FlatBatch]:
    """Batches of about the same number of tokens, from the first sequence again after the last."""
    chosen: list[Feature] = []
    for sequence in itertools.cycle(sequences):
        chosen.append(sequence)
        if sum(len(own.ids) for own in chosen) >= TOKENS:
            yield FlatBatch.from_sequences([own.ids for own in chosen], [own.types for own in chosen])
            chosen = []
