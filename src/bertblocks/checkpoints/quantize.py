"""Quantizes checkpoint folders and measures the accuracy on text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.convert import copy_files, find_source
from bertblocks.checkpoints.load import load_trained
from bertblocks.checkpoints.save import save_model
from bertblocks.core.storage import atomic_folder
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.models.quantization import MIN_COSINE, Accuracy, QuantizationError, describe, quantize
from bertblocks.models.quantization_accuracy import collect_outputs
from bertblocks.reports.model_card import CARD, Card, write_card
from bertblocks.text.tokenizers import load_tokenizer_if_any

#: The default texts for measuring accuracy: short and long, plain and odd.
SAMPLE_TEXTS = (
    "Yes.",
    "The parcel was left with a neighbour.",
    "How do I get my money back?",
    "Refunds are paid to your card within five days of the day on which we receive the item.",
    "A man is playing a guitar on the stage.",
    "Somebody plays an instrument in front of an audience.",
    "Rain is expected in the north tonight, with strong wind along the coast and snow above 800 metres.",
    "In 1969 two people walked on the moon for the first time; a third waited for them in orbit.",
    "I would not buy this again: the battery lasts two hours and the screen broke in the first week.",
    "Wonderful! We laughed from beginning to end, and so did the children.",
    "def area(width, height):\n    return width * height",
    "SELECT name, COUNT(*) FROM orders WHERE paid = 1 GROUP BY name HAVING COUNT(*) > 3;",
    "Email: support@example.org, phone +1 (555) 010-9999, open 9:00-17:30.",
    "Der Zug nach Leipzig hat heute etwa zwanzig Minuten Verspätung.",
    "La bibliothèque est fermée le dimanche et les jours fériés.",
    "Proteins fold into shapes that decide what they bind to, and a single change in the sequence of their amino acids "
    "can keep them from doing so, which is why some inherited diseases follow from one wrong letter in a gene.",
    "The committee, which had met four times since the spring without reaching an agreement, decided on Thursday that "
    "the bridge would be closed to lorries, that cars might use one lane in each direction, and that a ferry would run "
    "every half hour until the repairs, whose cost nobody was willing to name, were complete.",
    "7 8 9 10 11 12",
    "?!",
    "antidisestablishmentarianism",
)
#: Longer samples are truncated.
SAMPLE_TOKENS = 128
#: Samples for a language model have one mask in so many tokens.
MASK_EVERY = 7


@dataclass(frozen=True)
class QuantizedFolder:
    """The result of quantizing a folder."""

    method: str
    task: str
    kernel: str
    #: The number of texts behind the accuracy; 0 if there is no tokenizer, which means random ids.
    texts: int
    accuracy: Accuracy
    source_bytes: int
    target_bytes: int
    carried: list[str]


def quantize_folder(
    source: str | Path,
    target: str | Path,
    method: str = "int8",
    texts: Sequence[str] = SAMPLE_TEXTS,
    min_cosine: float = MIN_COSINE,
    allow_pickle: bool = False,
    task: str | None = None,
) -> QuantizedFolder:
    """Quantizes a checkpoint of any family and writes it to `target`, if it is accurate on `texts`.

    The result is read back, and must give exactly the outputs of the model in memory. The tokenizer and other files are
    copied as `convert` copies them, and `task` selects the head as it does there.
    """
    target = Path(target)
    if not texts:
        raise ValueError("There are no texts to measure the accuracy on; give at least one.")
    folder = find_source(source, target, allow_pickle)
    model, report = load_trained(folder, task, allow_pickle=allow_pickle)
    report.log(with_unread=task is None)
    model = model.float()
    source_bytes = sum(tensor.nbytes for tensor in model.parameters())
    tokenizer = load_tokenizer_if_any(folder)
    batch = None if tokenizer is None else sample_batch(model, tokenizer, texts)
    accuracy = quantize(model, method, batch, min_cosine)
    with atomic_folder(target) as scratch:
        save_model(model, scratch)
        carried = copy_files(folder, scratch, allow_pickle, keep_tokenizer=False)
        count = len(texts) if tokenizer is not None else 0
        if CARD in carried:  # it is about the source, whose outputs differ
            (scratch / CARD).unlink()
            carried.remove(CARD)
        write_card(scratch, _card(folder, target, method, accuracy, count))
        ids = torch.arange(min(8, model.config.vocab_size))[None]
        probe = batch or {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        again, _ = load_trained(scratch, report.task)
        if not torch.equal(collect_outputs(again, probe).hidden, collect_outputs(model, probe).hidden):
            raise QuantizationError(
                f"The written model gives other outputs than the one in memory; {target} was not kept."
            )
    target_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    return QuantizedFolder(method, report.task, describe(), count, accuracy, source_bytes, target_bytes, carried)


def _card(folder: Path, target: Path, method: str, accuracy: Accuracy, texts: int) -> Card:
    drift = {f"{drift.output}: {drift.meaning}": drift.value for drift in accuracy.drift}
    return Card(
        target.name,
        f"The checkpoint `{folder.name}` with {method} linear layers, quantized by BertBlocks for CPUs.",
        sources=[folder],
        relation="quantized",
        scores={"cosine_mean": accuracy.mean_cosine, "cosine_min": accuracy.lowest_cosine, **drift},
        scored_on=f"{texts} texts, against the source" if texts else "random ids, against the source",
        limitations=["Its outputs differ slightly from those of the source; see the scores."],
    )


def sample_batch(
    model: BertBlocksPreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> dict[str, Tensor]:
    """Texts as a padded batch. For a language model, some tokens are masked."""
    config = model.config
    longest = SAMPLE_TOKENS
    if config.embd_pos_enc_kind == "learned":
        longest = min(longest, config.max_position_embeddings - config.position_offset)
    options = {"padding": True, "truncation": True, "return_attention_mask": True, "return_tensors": "pt"}
    encoded = tokenizer(list(texts), max_length=longest, **options)
    batch = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
    if config.type_vocab_size and "token_type_ids" in encoded:
        batch["token_type_ids"] = encoded["token_type_ids"]
    if isinstance(model, LanguageModel) and tokenizer.mask_token_id is not None:
        masked = torch.arange(batch["input_ids"].shape[1]) % MASK_EVERY == MASK_EVERY // 2
        batch["input_ids"] = batch["input_ids"].masked_fill(
            masked & batch["attention_mask"].bool(), tokenizer.mask_token_id
        )
    return batch
