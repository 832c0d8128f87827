"""Conversion of checkpoint folders between families, proved on probe batches before anything is left behind."""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn

from bertblocks.checkpoints.families import FAMILIES, get_family
from bertblocks.checkpoints.files import MAX_SHARD_BYTES, OnShare, find_checkpoint
from bertblocks.checkpoints.huggingface import save_huggingface
from bertblocks.checkpoints.load import load_model
from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import ConfigError
from bertblocks.core.storage import atomic_folder, read_json, require_new_folder
from bertblocks.models import TASK_MODELS, BertBlocksPreTrainedModel
from bertblocks.text.tokenizers import has_tokenizer, load_tokenizer

OWN = BertBlocksConfig.model_type
#: The largest honest differences seen are a few 1e-6 of an output's size.
DEFAULT_TOLERANCE = 3e-5
#: Files of a folder that hold its config or weights; all others are carried along as they are.
REPLACED = (
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.h5",
    "*.msgpack",
)
#: Files that would be code, which is never carried.
DROPPED = ("*.py", "*.pkl", "*.pt", "*.pth", "*.ckpt", "*.onnx", ".git*")


class ProofError(ValueError):
    """A conversion whose result differs from its source; nothing was written."""


@dataclass(frozen=True)
class Difference:
    """How far an output of the result is from the source's, at most, over all probes."""

    output: str
    largest: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.largest <= self.tolerance


@dataclass(frozen=True)
class Conversion:
    """What a conversion read, wrote and proved."""

    source_family: str
    target_family: str
    task: str
    differences: list[Difference]
    carried: list[str]
    #: Why no other family could hold the model, where that was tried.
    refusal: str


def convert(
    source: str | Path,
    target: str | Path,
    to: str = OWN,
    tolerance: float = DEFAULT_TOLERANCE,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    allow_pickle: bool = False,
    on_progress: Callable[[str, float], None] = lambda step, share: None,
) -> Conversion:
    """Writes the checkpoint `source` to the folder `target` as family `to`, if the result gives the same outputs.

    `to` is "bertblocks", a family, or "native": the first family that can hold the architecture, bertblocks if none
    can. Source and result are run side by side, each by its own library, on ragged batches with lengths around every
    edge; a largest difference above `tolerance` times the size of the output is an error and leaves no `target`.
    Tokenizer files, sentence-transformers modules and all else that is neither weights nor code is carried along.
    """
    target = Path(target)
    if to not in (OWN, "native"):
        get_family(to)
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance is {tolerance}; it must be a number greater than 0.")
    folder = find_source(source, target, allow_pickle)
    source_family = read_json(folder / "config.json").get("model_type", OWN)
    model = load_model(folder, allow_pickle=allow_pickle, on_share=lambda share: on_progress("reading", share))
    config = model.config
    task = next(name for name, kind in TASK_MODELS.items() if kind is type(model))
    with atomic_folder(target) as scratch:
        target_family, refusal = _write(
            model, scratch, to, max_shard_bytes, lambda share: on_progress("writing", share)
        )
        carried = carry_files(folder, scratch, allow_pickle, keep_tokenizer=target_family != OWN)
        # never more than two models in memory
        reference = model if _is_ours(source_family) else _open_natively(folder, source_family, task)
        del model
        result = load_model(scratch) if _is_ours(target_family) else _open_natively(scratch, target_family, task)
        differences = compare(reference, result, config, tolerance, lambda share: on_progress("comparing", share))
        if wrong := [difference for difference in differences if not difference.agrees]:
            worst = max(wrong, key=lambda difference: difference.largest / difference.tolerance)
            raise ProofError(
                f"{worst.output} differs by {worst.largest:.1e}, above {worst.tolerance:.1e}; {target} was not written."
            )
    return Conversion(source_family, target_family, task, differences, carried, refusal)


def find_source(source: str | Path, target: Path, allow_pickle: bool = False) -> Path:
    """The folder of a source, once it is clear that `target` can be written beside it."""
    require_new_folder(target)
    folder = find_checkpoint(source, allow_pickle)
    if target.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{target} lies inside {folder}; choose a folder beside it.")
    return folder


def _write(
    model: BertBlocksPreTrainedModel, folder: Path, to: str, max_shard_bytes: int, on_share: OnShare
) -> tuple[str, str]:
    """The family that was written, and, where none could hold the model, why."""
    refusal = ""
    if to != OWN:
        try:
            return save_huggingface(model, folder, None if to == "native" else to, max_shard_bytes, on_share), ""
        except ConfigError as error:
            if to != "native":
                raise
            refusal = str(error)
    try:
        model.save_pretrained(folder, max_shard_size=max_shard_bytes)
    except SafetensorError as error:
        raise OSError(f"{folder} could not be written: {error}.") from error
    return OWN, refusal


def carry_files(source: Path, target: Path, allow_pickle: bool = False, keep_tokenizer: bool = True) -> list[str]:
    """Copies what is neither weights nor config nor code: tokenizer, sentence-transformers modules, README.

    Unless `keep_tokenizer`, a tokenizer that only the family's name tells transformers how to read is written anew.
    """
    dropped = DROPPED if allow_pickle else (*DROPPED, "*.bin")
    carried = []
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        is_weights = name.parent == Path(".") and any(path.match(pattern) for pattern in REPLACED)
        is_code = any(part.match(pattern) for part in (name, *name.parents) for pattern in dropped)
        if path.is_file() and not is_weights and not is_code and not (target / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name)
            carried.append(str(name))
        elif path.suffix == ".bin" and not is_weights:
            warnings.warn(f"{name} is a pickle and was left behind.", stacklevel=3)
    if not keep_tokenizer and has_tokenizer(target) and not (target / "tokenizer.json").exists():
        load_tokenizer(source).save_pretrained(target)
    return carried


# ---------------------------------------------------------------------- the proof


def _is_ours(family: str) -> bool:
    """True if no library but this one opens checkpoints of a family."""
    return family == OWN or not FAMILIES[family].in_transformers


def _open_natively(folder: Path, family: str, task: str) -> nn.Module:
    model_class = getattr(transformers, FAMILIES[family].model_classes[task])
    has_safetensors = any(folder.glob("*.safetensors"))
    # eager is given so that a config cannot name a kernel to download
    return model_class.from_pretrained(
        folder, dtype="auto", use_safetensors=has_safetensors, attn_implementation="eager"
    )


def probe_lengths(config: BertBlocksConfig, longest: int = 512) -> list[int]:
    """Short ones, both sides of every window edge, and as long as positions allow, up to `longest`."""
    half = config.local_attention_window_size // 2 if "local" in config.layer_types else 0
    room = max(longest, 3 * half + 2)
    if config.embd_pos_enc_kind == "learned":
        room = min(room, config.max_position_embeddings - config.position_offset)
    edges = {1, 2, 7, room}
    if half:
        edges |= {half, half + 1, 2 * half, 2 * half + 1, 3 * half + 2}
    return sorted(length for length in edges if 0 < length <= room)


def probes(config: BertBlocksConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Ragged batches of two sequences of random ids, with their masks."""
    generator = torch.Generator().manual_seed(0)
    lengths = probe_lengths(config)
    for pair in zip(lengths, reversed(lengths), strict=True):
        mask = (torch.arange(max(pair)) < torch.tensor(pair)[:, None]).long()
        ids = torch.randint(0, config.vocab_size, mask.shape, generator=generator)
        # padding inside a text would be read differently by models that find padding by its id
        is_padding = torch.eq(ids, -1 if config.pad_token_id is None else config.pad_token_id)
        ids = torch.where(is_padding, (ids + 1) % config.vocab_size, ids)
        yield ids.masked_fill(mask == 0, config.pad_token_id or 0), mask
        if pair[0] >= pair[1]:
            return


@torch.inference_mode()
def compare(
    reference: nn.Module,
    result: nn.Module,
    config: BertBlocksConfig,
    tolerance: float,
    on_share: OnShare = lambda share: None,
) -> list[Difference]:
    """The largest difference of every output that both models have, on real tokens, in fp32."""
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
    """Every tensor that a model returns, without what it has for padding."""
    output: dict[str, Any] = model(**inputs)
    mask = inputs["attention_mask"]
    tensors = {name: value for name, value in output.items() if isinstance(value, Tensor)}
    return {name: x[mask == 1] if x.shape[:2] == mask.shape else x for name, x in tensors.items()}
