"""Folders of cross-encoders: an encoder with a head that scores a pair of texts, and the activation of the score."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.sentence_transformers.embedder import (
    EmbeddingSettings,
    read_pooling,
    write_pooling,
)
from bertblocks.checkpoints.sentence_transformers.modules import (
    MODULES,
    PROMPTS,
    READERS,
    TRANSFORMER,
    find_kind,
    read_dense,
    read_if_any,
    read_max_length,
    read_modules,
    read_prompts,
    save_folder,
    write_layer,
    write_modules,
)
from bertblocks.config import BertBlocksConfig
from bertblocks.core.log import logger
from bertblocks.core.storage import read_json, write_json
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.nn.embedding_head import ACTIVATIONS, EmbeddingNorm

#: What the encoder's file says if the checkpoint's own head makes the scores, and if modules behind it do.
HEADS = {
    "sequence-classification": ("logits", "scores"),
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
}
#: The feature that holds the scores.
SCORES = "scores"


@dataclass(frozen=True)
class CrossEncoderSettings(EmbeddingSettings):
    """How a checkpoint scores a pair of texts.

    The head is that of a classifier, or the `layers` behind a pooling. The prompt precedes the first text of a pair.
    """

    #: The class of torch.nn that turns logits into scores. None: Sigmoid for one label, Identity for several.
    activation: str | None = None


def make_activation(settings: EmbeddingSettings, labels: int) -> nn.Module:
    """The activation of a model's scores. The default is that of sentence-transformers."""
    name = settings.activation if isinstance(settings, CrossEncoderSettings) else None
    return ACTIVATIONS[name or ("Sigmoid" if labels == 1 else "Identity")]()


def read_cross_encoder(folder: Path) -> CrossEncoderSettings:
    """Reads `modules.json` and the files it leads to, or `config.json` alone, as versions before 6 write it."""
    config = read_if_any(folder / "config.json")
    nested = config.get("sentence_transformers")
    old = nested.get("activation_fn") if isinstance(nested, dict) else None
    old = old or config.get("sbert_ce_default_activation_function")
    path = folder / MODULES
    if not path.is_file():
        return CrossEncoderSettings(activation=_read_activation(folder / "config.json", old))
    named = read_if_any(folder / PROMPTS).get("activation_fn")
    activation = _read_activation(folder / (PROMPTS if named else "config.json"), named or old)
    pooling, layers = _read_head(folder, path)
    prompts, default = read_prompts(folder / PROMPTS)
    return CrossEncoderSettings(pooling, read_max_length(folder), prompts, default, layers, activation)


def _read_activation(path: Path, name: Any) -> str | None:
    """The name of a class in torch.nn. As in sentence-transformers, code from elsewhere is not run: a default is."""
    if name is None:
        return None
    module, _, kind = str(name).rpartition(".")
    if not module.startswith("torch."):
        logger.warning(f"{path}: the activation {name!r} is not one of torch.nn, so the default is used.")
        return None
    if kind not in ACTIVATIONS:
        raise ValueError(
            f"{path}: the activation of scores is {name!r}; it must be one of torch.nn's {', '.join(ACTIVATIONS)}."
        )
    return kind


def _read_head(folder: Path, path: Path) -> tuple[str, tuple[nn.Module, ...]]:
    """The pooling and the modules behind the encoder, of which the last makes scores; none for a classifier."""
    modules = read_modules(path)
    for kind, _ in modules:
        if kind not in ("Transformer", "Pooling", *READERS):
            raise ValueError(
                f"{path} has a {kind} module; BertBlocks scores pairs with Transformer, Pooling, {', '.join(READERS)}."
            )
    if [kind for kind, _ in modules] == ["Transformer"]:
        return CrossEncoderSettings.pooling, ()
    if len(modules) < 3 or [kind for kind, _ in modules[:2]] != ["Transformer", "Pooling"] or modules[-1][0] != "Dense":
        raise ValueError(
            f"{path} lists {', '.join(kind for kind, _ in modules)}; a cross-encoder is a Transformer alone, or has a "
            "Pooling and modules behind it, of which the last is Dense."
        )
    between = [READERS[kind](folder / name) for kind, name in modules[2:-1]]
    last = read_dense(folder / modules[-1][1], target=SCORES)
    return read_pooling(folder / modules[1][1] / "config.json"), (*between, last)


def keep_activation(source: Path, target: Path) -> None:
    """Writes the activation of an older cross-encoder next to its new config, which does not have it."""
    if find_kind(source) != "cross-encoder" or (source / MODULES).is_file():
        return
    settings, config = read_cross_encoder(source), read_json(target / "config.json")
    names = config.get("architectures") or [""]
    if settings.activation is not None and names[0].endswith("ForSequenceClassification"):
        write_cross_encoder(target, settings, labels=1, width=0)


def save_cross_encoder(
    model: BertBlocksPreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase, settings: CrossEncoderSettings
) -> None:
    """Writes a folder that `CrossEncoder` opens."""
    labels = model.base_model.embedding_head.size if settings.layers else model.config.num_labels
    width = model.config.hidden_size
    save_folder(model, folder, tokenizer, lambda scratch: write_cross_encoder(scratch, settings, labels, width))


def write_cross_encoder(folder: Path, settings: CrossEncoderSettings, labels: int, width: int) -> None:
    """Writes what `read_cross_encoder` reads next to a checkpoint with hidden states of `width` numbers."""
    kind = type(make_activation(settings, labels))
    activation = f"{kind.__module__}.{kind.__name__}"
    task = "feature-extraction" if settings.layers else "sequence-classification"
    output, feature = HEADS[task]
    values: dict[str, Any] = {
        "transformer_task": task,
        "modality_config": {"text": {"method": "forward", "method_output_name": output}},
        "module_output_name": feature,
    }
    if settings.max_length is not None:
        values["max_seq_length"] = settings.max_length
    write_json(folder / TRANSFORMER, values)
    prompts = {"prompts": settings.prompts, "default_prompt_name": settings.default_prompt}
    write_json(folder / PROMPTS, {"model_type": "CrossEncoder", "activation_fn": activation, **prompts})
    config = read_json(folder / "config.json")
    if config.get("model_type") != BertBlocksConfig.model_type:  # versions before 6 read it there
        write_json(folder / "config.json", {**config, "sentence_transformers": {"activation_fn": activation}})
    modules = [("", "Transformer")]
    if settings.layers:
        modules.append(("1_Pooling", "Pooling"))
        write_pooling(folder / "1_Pooling" / "config.json", settings.pooling.split("+"), width)
    for number, layer in enumerate(settings.layers, start=2):
        name = "LayerNorm" if isinstance(layer, EmbeddingNorm) else type(layer).__name__
        modules.append((f"{number}_{name}", name))
        is_last = number == len(settings.layers) + 1
        names = {"module_input_name": "sentence_embedding", "module_output_name": SCORES} if is_last else {}
        write_layer(layer, folder / f"{number}_{name}", **names)
    write_modules(folder, modules)
