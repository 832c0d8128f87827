"""A start for the masked-LM head of a checkpoint that has none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.tasks.features import Feature

#: The steps, the tokens of each, and the learning rate.
STEPS, TOKENS, RATE = 100, 1024, 3e-3
#: A token is told from those of its batch and from this many others, drawn at random.
OTHERS = 1000


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
    middle = 0.0
    for batch in itertools.islice(_repeat(sequences), STEPS):
        batch = batch.to(device)
        with torch.no_grad():
            hidden = model.base_model.encode(**batch.inputs).hidden
        others = torch.randint(model.config.vocab_size, (OTHERS,), device=device)
        candidates, labels = torch.cat([batch.input_ids, others]).unique(return_inverse=True)
        logits = _logits(model, hidden, candidates)
        loss = F.cross_entropy(logits, labels[: len(hidden)])
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
        middle = _find_middle(logits.detach(), labels[: len(hidden)])
    optimizer.zero_grad()
    if bias is not None:
        with torch.no_grad():
            bias.sub_(middle)
    model.train(was_training)


def _logits(model: LanguageModel, hidden: Tensor, candidates: Tensor) -> Tensor:
    """The logits of some tokens of the vocabulary."""
    bias = None if model.decoder.bias is None else model.decoder.bias[candidates]
    logits = F.linear(model.decoder_input(hidden), model.decoder.weight[candidates].detach(), bias)
    return logits if model.logit_scale is None else logits * model.logit_scale[candidates].detach()


def _find_middle(logits: Tensor, labels: Tensor) -> float:
    """The number between the logit of a token and the highest of all others, on average."""
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], float("-inf")).amax(1)
    return float(((own.squeeze(1) + others) / 2).mean())


def _repeat(sequences: Sequence[Feature]) -> Iterator[FlatBatch]:
    """Batches of about the same number of tokens, from the first sequence again after the last."""
    chosen: list[Feature] = []
    for sequence in itertools.cycle(sequences):
        chosen.append(sequence)
        if sum(len(own.ids) for own in chosen) >= TOKENS:
            yield FlatBatch.from_sequences([own.ids for own in chosen], [own.types for own in chosen])
            chosen = []
