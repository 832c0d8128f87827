"""The two models of a distillation: the teacher as its files have it, and the student as it starts."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.cut import cut
from bertblocks.checkpoints.families import read_config
from bertblocks.checkpoints.files import find_checkpoint
from bertblocks.checkpoints.load import load_trained, load_with_report
from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings, find_kind
from bertblocks.checkpoints.sentence_transformers.any_kind import read_settings_of_any
from bertblocks.checkpoints.sentence_transformers.cross_encoder import CrossEncoderSettings
from bertblocks.config import BertBlocksConfig
from bertblocks.config.presets import preset_names
from bertblocks.core.registry import nearest
from bertblocks.core.storage import read_json
from bertblocks.core.tensor_files import find_safetensors
from bertblocks.inference.splitting import max_sequence_length
from bertblocks.models import TASK_MODELS, BertBlocksPreTrainedModel
from bertblocks.text.tokenizers import load_tokenizer_if_any
from bertblocks.training.build import TOKEN_KEYS
from bertblocks.training.starting_model import with_config

#: Config keys that say what the labels of a head mean.
LABEL_KEYS = ("id2label", "label2id", "problem_type")


@dataclass(frozen=True)
class Teacher:
    """A checkpoint that is imitated. Its model is in fp32 and in evaluation mode."""

    folder: Path
    model: BertBlocksPreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    #: What its files say about embeddings, and whether they make it an embedding model.
    embedding: EmbeddingSettings
    is_embedder: bool
    #: Its head, by its name in `bertblocks.load`.
    task: str

    @property
    def max_length(self) -> int:
        return max_sequence_length(self.model, self.tokenizer, self.embedding.max_length)


@dataclass(frozen=True)
class Student:
    """The model that learns, before it has learned."""

    model: BertBlocksPreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    embedding: EmbeddingSettings
    is_embedder: bool
    #: Where its weights come from, in words.
    origin: str

    @property
    def max_length(self) -> int:
        return max_sequence_length(self.model, self.tokenizer, self.embedding.max_length)


def load_teacher(source: str | Path, task: str | None) -> Teacher:
    """Loads a checkpoint with the head of a task, or with its own if that is None."""
    folder = find_checkpoint(source)
    model, report = load_trained(folder, _head_of(folder, task), torch.float32)
    tokenizer = load_tokenizer_if_any(folder)
    if tokenizer is None:
        raise ValueError(f"{source}: there is no tokenizer next to the model.")
    if model.config.quantization is not None:
        raise ValueError(f"{source} is quantized to {model.config.quantization}; give the original model.")
    model.requires_grad_(False)
    is_embedder = report.task == "base" and find_kind(folder) == "embedder"
    return Teacher(folder, model, tokenizer, read_settings_of_any(folder), is_embedder, report.task)


def _head_of(folder: Path, task: str | None) -> str | None:
    """The head of a checkpoint for a task: none if modules behind the encoder make the scores of pairs."""
    is_classifier = task == "sequence-classification"
    return "base" if is_classifier and is_scored_by_layers(read_settings_of_any(folder)) else task


def is_scored_by_layers(settings: EmbeddingSettings) -> bool:
    """Whether modules behind the encoder make the score of a pair, instead of a classifier's head."""
    return isinstance(settings, CrossEncoderSettings) and bool(settings.layers)


def make_student(source: str | Path | None, layers: int | None, teacher: Teacher, task: str | None = None) -> Student:
    """The student: some layers of the teacher, a checkpoint, or new weights for a preset or a config.

    It gets the head of a task, or that of the teacher. Without a tokenizer of its own it has the teacher's.
    """
    task = task or teacher.task
    if (source is None) == (layers is None):
        given = "both are given" if layers is not None else "neither is given"
        raise ValueError(f"student and layers: {given}; give a student, or how many of the teacher's layers it has.")
    if layers is not None:
        model = cut(teacher.model, layers).requires_grad_(True)
        embedding = replace(teacher.embedding, layers=copy.deepcopy(teacher.embedding.layers))
        return Student(model, teacher.tokenizer, embedding, teacher.is_embedder, f"{layers} layers of the teacher")
    assert source is not None
    folder = _find_folder(source)
    if folder is None or not find_safetensors(folder):
        return _new_student(source, folder, teacher, task)
    head = _head_of(folder, task)
    loaded, _ = load_with_report(folder, head, torch.float32)
    if loaded.config.quantization is not None:
        raise ValueError(f"{source} is quantized to {loaded.config.quantization}; give the original model.")
    model = with_config(loaded, _labels(teacher, head))
    tokenizer = load_tokenizer_if_any(folder) or teacher.tokenizer
    _check_vocabulary(model.config, tokenizer, source)
    is_embedder = head == "base" and find_kind(folder) == "embedder"
    return Student(model, tokenizer, read_settings_of_any(folder), is_embedder, f"the weights of {source}")


def _labels(teacher: Teacher, head: str | None) -> dict[str, Any]:
    """What the student's config takes from the teacher's: the meaning of its head's outputs."""
    if head not in ("sequence-classification", "token-classification"):
        return {}
    if teacher.task == "base":  # modules behind the encoder make its score
        return {"num_labels": 1}
    return {key: getattr(teacher.model.config, key) for key in LABEL_KEYS}


def _find_folder(source: str | Path) -> Path | None:
    """The folder of a checkpoint, or None for a preset or a config file."""
    path = Path(source)
    if str(source) in preset_names() or path.is_file():
        return None
    if path.exists() or len(path.parts) > 1:
        return find_checkpoint(source)
    try:
        return find_checkpoint(source)
    except FileNotFoundError as error:
        hint = nearest(str(source), preset_names())
        raise FileNotFoundError(
            f"student is {str(source)!r}; it must be a checkpoint folder, a hub id, a preset{hint} or a .json config."
        ) from error


def _new_student(source: str | Path, folder: Path | None, teacher: Teacher, task: str) -> Student:
    """A student with random weights, from a preset, a config file, or a folder without weights."""
    tokenizer = (None if folder is None else load_tokenizer_if_any(folder)) or teacher.tokenizer
    if str(source) in preset_names():
        tokens = {key: getattr(tokenizer, name) for key, name in TOKEN_KEYS.items()}
        config = BertBlocksConfig.from_preset(str(source), vocab_size=len(tokenizer), **tokens)
    else:
        file = Path(source) if folder is None else folder / "config.json"
        try:
            config = read_config(read_json(file))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    _check_vocabulary(config, tokenizer, source)
    config.pooler = config.pooler and task != "base"
    for key, value in _labels(teacher, task).items():
        setattr(config, key, value)
    embedding = EmbeddingSettings(teacher.embedding.pooling)
    return Student(TASK_MODELS[task](config), tokenizer, embedding, False, f"random weights, by {source}")


def _check_vocabulary(config: BertBlocksConfig, tokenizer: PreTrainedTokenizerBase, source: str | Path) -> None:
    if config.vocab_size < len(tokenizer):
        raise ValueError(f"{source}: vocab_size is {config.vocab_size}; the tokenizer has {len(tokenizer)} tokens.")


def require_same_vocabulary(teacher: Teacher, student: Student, method: str) -> None:
    """Raises an error if a text has other tokens for the student than for the teacher."""
    own, theirs = student.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if own == theirs:
        return
    token = min(set(own.items()) ^ set(theirs.items()))[0]
    raise ValueError(
        f"method {method} compares the two models token by token, but their vocabularies differ, such as in {token!r}; "
        "use a student with the teacher's tokenizer, or the method embeddings or scores."
    )
