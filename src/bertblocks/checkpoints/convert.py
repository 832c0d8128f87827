"""Converts checkpoint folders between families, and proves on probe batches that the outputs stay the same."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from bertblocks.checkpoints.families import FAMILIES, get_family
from bertblocks.checkpoints.files import (
    MAX_SHARD_BYTES,
    PICKLE,
    OnShare,
    consolidate,
    find_checkpoint,
    read_pickle,
)
from bertblocks.checkpoints.huggingface import UNEXPECTED, first_line
from bertblocks.checkpoints.load import OWN, load_trained
from bertblocks.checkpoints.save import save_huggingface, save_model
from bertblocks.checkpoints.sentence_transformers.cross_encoder import keep_activation
from bertblocks.checkpoints.sentence_transformers.multi_vector import copy_stanford
from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import ConfigError
from bertblocks.core.log import logger, quiet_transformers
from bertblocks.core.storage import PARTIAL, atomic_folder, read_json, require_new_folder
from bertblocks.core.tensor_files import PARTS, SINGLE, save_tensors
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.reports.model_card import CARD, Card, write_card
from bertblocks.text.tokenizers import has_tokenizer, load_tokenizer, save_tokenizer

#: Rounding alone changes an output by a few 1e-6 of its size.
DEFAULT_TOLERANCE = 3e-5
#: Files at the top of a folder that hold its config or weights. The conversion writes them anew.
REPLACED = (
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.h5",
    "*.msgpack",
)
RUN_FILES = ("finetune.json", "results.json", "run.json", "metrics.jsonl", "predictions.jsonl", "report.html")
#: Names of code, hidden files and the records of a run, which are never copied.
DROPPED = (*RUN_FILES, "*.py", "*.pkl", "*.pt", "*.pth", "*.ckpt", "*.onnx", ".*")
#: Files of training state, which are never copied. A subfolder with one of them is a training checkpoint.
TRAINING_STATE = ("complete.json", "state.json", "trainer_state.json", "optimizer.*", "scheduler.*", "ema.safetensors")


class ProofError(ValueError):
    """The outputs of a conversion differ from those of its source; nothing was written."""


@dataclass(frozen=True)
class Difference:
    """The largest difference between an output of the source and of the result, over all probes."""

    output: str
    largest: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.largest <= self.tolerance


@dataclass(frozen=True)
class Conversion:
    """The outcome of a conversion."""

    source_family: str
    target_family: str
    task: str
    differences: list[Difference]
    carried: list[str]
    #: Why no family of transformers can hold the model, if "native" was asked for.
    refusal: str


def convert(
    source: str | Path,
    target: str | Path,
    to: str = OWN,
    tolerance: float = DEFAULT_TOLERANCE,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    allow_pickle: bool = False,
    on_progress: Callable[[str, float], None] = lambda step, share: None,
    task: str | None = None,
) -> Conversion:
    """Writes the checkpoint `source` to the folder `target` as family `to`, if the result gives the same outputs.

    `to` is "bertblocks", a family, or "native": the first family that can hold the architecture, and bertblocks if none
    can. Each library runs its own format on ragged batches with lengths around every edge. If an output differs by more
    than `tolerance` times its size, the conversion raises an error and `target` does not appear. Tokenizer files,
    sentence-transformers modules, the model card, and other files that are neither weights nor code
    are copied. `task` selects the head
    to convert; by default it is the checkpoint's, or base if it lacks the head that its config names. The parts that
    processes wrote of a sharded model are put together.
    """
    target = Path(target)
    if to not in (OWN, "native"):
        get_family(to)
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance is {tolerance}; it must be a number greater than 0.")
    folder = find_source(source, target, allow_pickle)
    if (folder / PARTS).is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", suffix=PARTIAL, dir=target.parent) as scratch:
            whole = consolidate(folder, Path(scratch) / folder.name)
            return convert(whole, target, to, tolerance, max_shard_bytes, allow_pickle, on_progress, task)
    source_family = read_json(folder / "config.json").get("model_type", OWN)
    model, report = load_trained(
        folder, task, allow_pickle=allow_pickle, on_share=lambda share: on_progress("reading", share)
    )
    report.log(with_unread=task is None)
    config, task = model.config, report.task
    with atomic_folder(target) as scratch:
        target_family, refusal = _write(
            model, scratch, to, max_shard_bytes, lambda share: on_progress("writing", share)
        )
        carried = copy_files(folder, scratch, allow_pickle, keep_tokenizer=target_family != OWN)
        if not (scratch / CARD).is_file():  # the source's card is about this model, too
            write_card(scratch, _card(folder, target, source_family, target_family))
        # at most two models are in memory at a time
        reference = model if _is_ours(source_family, task) else _open_natively(folder, source_family, task)
        del model
        if _is_ours(target_family, task):
            result: nn.Module = load_trained(scratch, task)[0]
        else:
            result = _open_natively(scratch, target_family, task)
        differences = compare(reference, result, config, tolerance, lambda share: on_progress("comparing", share))
        if wrong := [difference for difference in differences if not difference.agrees]:
            worst = max(wrong, key=lambda difference: difference.largest / difference.tolerance)
            raise ProofError(
                f"{worst.output} differs by {worst.largest:.1e}, above {worst.tolerance:.1e}; {target} was not written."
            )
    return Conversion(source_family, target_family, task, differences, carried, refusal)


def _card(folder: Path, target: Path, source_family: str, target_family: str) -> Card:
    return Card(
        target.name,
        f"The checkpoint `{folder.name}`, converted by BertBlocks from the {source_family} to the {target_family} "
        "format. Both gave the same outputs on probe batches.",
        sources=[folder],
        limitations=["Everything that holds for the source holds for this model, too."],
    )


def find_source(source: str | Path, target: Path, allow_pickle: bool = False) -> Path:
    """The folder of a source, after a check that `target` can be written."""
    require_new_folder(target)
    folder = find_checkpoint(source, allow_pickle)
    if target.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{target} is inside {folder}; choose a folder outside it.")
    return folder


def _write(
    model: BertBlocksPreTrainedModel, folder: Path, to: str, max_shard_bytes: int, on_share: OnShare
) -> tuple[str, str]:
    """Writes the model and returns the family, and why no family can hold it if `to` is "native"."""
    refusal = ""
    if to != OWN:
        try:
            return save_huggingface(model, folder, None if to == "native" else to, max_shard_bytes, on_share), ""
        except ConfigError as error:
            if to != "native":
                raise
            refusal = str(error)
    save_model(model, folder, max_shard_bytes, on_share)
    return OWN, refusal


def copy_files(source: Path, target: Path, allow_pickle: bool = False, keep_tokenizer: bool = True) -> list[str]:
    """Copies the files that are neither weights nor config nor code: tokenizer, sentence-transformers modules, README.

    transformers picks the class of some tokenizers by the model's family. Unless `keep_tokenizer`, such a tokenizer is
    saved again in a form that does not depend on the family.
    """
    copied = []
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if not path.is_file() or _is_replaced(name) or (target / name).exists():
            continue
        if path.suffix == ".bin" and not allow_pickle:
            logger.warning(f"{name} is a pickle and was not copied.")
        elif not _is_inside(path, source):
            logger.warning(f"{name} links to a file outside {source} and was not copied.")
        elif not _is_dropped(source, name):
            is_pickle = path.name == PICKLE
            name = name.with_name(SINGLE) if is_pickle else name
            if (target / name).exists():
                continue
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if is_pickle:
                save_tensors(read_pickle(path), target / name)
            else:
                shutil.copyfile(path, target / name)
            copied.append(str(name))
    keep_activation(source, target)
    if not keep_tokenizer and has_tokenizer(target) and not (target / "tokenizer.json").exists():
        save_tokenizer(load_tokenizer(source), target)
    return copied + copy_stanford(source, target, allow_pickle)


def _is_replaced(name: Path) -> bool:
    return name.parent == Path(".") and any(name.match(pattern) for pattern in REPLACED)


def _is_dropped(source: Path, name: Path) -> bool:
    """True for code, hidden files, training state, and everything inside a training checkpoint."""
    if any(part.match(pattern) for part in (name, *name.parents) for pattern in DROPPED if part.name):
        return True
    folders = [source / folder for folder in name.parents if folder.name]
    return any(name.match(pattern) for pattern in TRAINING_STATE) or any(
        next(folder.glob(pattern), None) for folder in folders for pattern in TRAINING_STATE
    )


def _is_inside(path: Path, source: Path) -> bool:
    """True if a file is in `source` after links are followed. Files in the hub's cache link to its blobs."""
    roots = [source.resolve()]
    if source.parent.name == "snapshots":
        roots.append(source.resolve().parents[1] / "blobs")
    return any(path.resolve().is_relative_to(root) for root in roots)


# ---------------------------------------------------------------------- the proof


def _is_ours(family: str, task: str) -> bool:
    """True if only BertBlocks opens a family's checkpoints of a task."""
    return family == OWN or not FAMILIES[family].opens(task)


def _open_natively(folder: Path, family: str, task: str) -> nn.Module:
    model_class = getattr(transformers, FAMILIES[family].model_classes[task])
    has_safetensors = any(folder.glob("*.safetensors"))
    try:
        # without an explicit choice, the config could name a kernel to download
        with quiet_transformers():
            return model_class.from_pretrained(
                folder, dtype="auto", use_safetensors=has_safetensors, attn_implementation="eager"
            )
    except UNEXPECTED as error:
        raise ValueError(f"transformers cannot open {folder}: {first_line(error)}.") from error


def probe_lengths(config: BertBlocksConfig, longest: int = 512) -> list[int]:
    """Short lengths, both sides of every window edge, and the longest that positions and `longest` allow."""
    half = config.local_attention_window_size // 2 if "local" in config.layer_types else 0
    room = min(max(longest, 3 * half + 2), config.max_position_embeddings - config.position_offset)
    edges = {1, 2, 7, room}
    if half:
        edges |= {half, half + 1, 2 * half, 2 * half + 1, 3 * half + 2}
    return sorted(length for length in edges if 0 < length <= room)


def probes(config: BertBlocksConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Ragged batches of two sequences of random ids, and their attention masks."""
    generator = torch.Generator().manual_seed(0)
    lengths = probe_lengths(config)
    # transformers' ConvBERT convolves padding too, so its sequences run alone
    others = [0] * len(lengths) if config.span_convolution else lengths[::-1]
    for pair in zip(lengths, others, strict=True):
        mask = (torch.arange(max(pair)) < torch.tensor([size for size in pair if size])[:, None]).long()
        ids = torch.randint(0, config.vocab_size, mask.shape, generator=generator)
        # some models find padding by its id, so no real token may have it
        is_padding = torch.eq(ids, -1 if config.pad_token_id is None else config.pad_token_id)
        ids = torch.where(is_padding, (ids + 1) % config.vocab_size, ids)
        yield ids.masked_fill(mask == 0, config.pad_token_id or 0), mask
        if pair[0] >= pair[1] > 0:
            return


@torch.inference_mode()
def compare(
    reference: nn.Module,
    result: nn.Module,
    config: BertBlocksConfig,
    tolerance: float,
    on_share: OnShare = lambda share: None,
) -> list[Difference]:
    """The largest difference of every output that both models return, on real tokens, in fp32."""
    reference, result = reference.float().eval(), result.float().eval()
    largest: dict[str, float] = {}
    sizes: dict[str, float] = {}
    batches = list(probes(config))
    for number, (ids, mask) in enumerate(batches, start=1):
        inputs = {"input_ids": ids, "attention_mask": mask}
        if config.type_vocab_size > 1:
            inputs["token_type_ids"] = ids % config.type_vocab_size
        expected, actual = (_real_outputs(model, inputs) for model in (reference, result))
        for name in expected.keys() & actual.keys():
            difference = (actual[name] - expected[name]).abs().max().item()
            largest[name] = max(largest.get(name, 0.0), math.inf if math.isnan(difference) else difference)
            sizes[name] = max(sizes.get(name, 1.0), expected[name].abs().max().item())
        on_share(number / len(batches))
    if not largest:
        raise ProofError("The two models have no output in common; nothing was written.")
    return [Difference(name, largest[name], tolerance * sizes[name]) for name in sorted(largest)]


def _real_outputs(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor that a model returns, without the values at padding."""
    output: dict[str, Any] = model(**inputs)
    mask = inputs["attention_mask"]
    tensors = {name: value for name, value in output.items() if isinstance(value, Tensor)}
    return {name: x[mask == 1] if x.shape[:2] == mask.shape else x for name, x in tensors.items()}
