"""Folders of multi-vector encoders, as sentence-transformers, PyLate and Stanford's ColBERT write them."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AddedToken, PreTrainedTokenizerBase

from bertblocks.checkpoints.files import read_tensors
from bertblocks.checkpoints.sentence_transformers.embedder import EmbeddingSettings
from bertblocks.checkpoints.sentence_transformers.modules import (
    COLBERT_FILE,
    MODULES,
    PROJECTION,
    PROMPTS,
    PYLATE_KEYS,
    ROLES,
    TRANSFORMER,
    find_kind,
    read_dense,
    read_if_any,
    read_max_length,
    read_modules,
    read_normalize,
    read_prompts,
    read_size,
    save_folder,
    write_layer,
    write_modules,
)
from bertblocks.core.storage import read_json, write_json
from bertblocks.models import BertBlocksModel
from bertblocks.nn.embedding_head import Dense, Normalize
from bertblocks.text.tokenizers import load_tokenizer_if_any, save_tokenizer

TOKENS = "token_embeddings"
#: Readers of modules that change the vectors of tokens.
READERS = {"Dense": lambda folder: read_dense(folder, TOKENS, TOKENS), "Normalize": lambda f: read_normalize(f, TOKENS)}
MASK, POOLING = "MultiVectorMask", "HierarchicalTokenPooling"
PACKAGE = "sentence_transformers.multi_vector_encoder.modules"
#: What sentence-transformers calls the two scores: the sum over query tokens, or their mean.
SIMILARITIES = ("maxsim", "meanmaxsim")
#: Stanford's defaults.
QUERY_MARKER, DOCUMENT_MARKER, QUERY_LENGTH = "[unused0]", "[unused1]", 32


@dataclass(frozen=True)
class Expansion:
    """Fills queries up with mask tokens, which the model turns into further query terms."""

    length: int = QUERY_LENGTH
    #: Whether longer queries are cut to the same length.
    is_fixed: bool = True
    #: Whether the other tokens attend to the filling.
    attend: bool = False
    #: The token to fill with. None: the tokenizer's mask, or its end of sequence.
    token: str | None = None


@dataclass(frozen=True)
class TokenPooling:
    """Merges the tokens of a text into a share of 1/factor, by hierarchical clustering (Clavié et al., 2024)."""

    factor: float = 1.0
    #: First tokens that stay as they are.
    protected: int = 1
    normalize: bool = True
    roles: tuple[str, ...] = ("document",)


@dataclass(frozen=True)
class MultiVectorSettings(EmbeddingSettings):
    """How a checkpoint makes one vector per token, and scores queries against documents.

    The `layers` change the vector of each token. Prompts named query and document precede the texts of these roles.
    """

    query_length: int | None = None
    document_length: int | None = None
    expansion: Expansion | None = None
    #: Words whose tokens have no vectors, in texts of these roles.
    skiplist: tuple[str, ...] = ()
    skiplist_roles: tuple[str, ...] = ("document",)
    token_pooling: TokenPooling | None = None
    similarity: str = SIMILARITIES[0]
    #: Tokens of the vocabulary that prompts consist of and that older files do not mark as special.
    markers: tuple[str, ...] = ()

    def length_of(self, role: str, max_length: int) -> int:
        """The tokens that a text of a role has at most."""
        length = self.document_length if role == "document" else self.query_length
        if role == "query" and self.expansion is not None:
            least = self.expansion.length
            length = least if self.expansion.is_fixed else max(length or max_length, least)
        return min(length or max_length, max_length)


def read_multi_vector(folder: Path, allow_pickle: bool = False) -> MultiVectorSettings:
    """Reads the files of a multi-vector encoder. A module that BertBlocks cannot run is an error."""
    if not (folder / MODULES).is_file():
        return _read_stanford(folder, allow_pickle)
    path = folder / MODULES
    layers: list[nn.Module] = []
    mask: dict[str, Any] | None = None
    pooling: TokenPooling | None = None
    for kind, name in read_modules(path):
        if kind not in ("Transformer", MASK, POOLING, *READERS):
            raise ValueError(
                f"{path} has a {kind} module; BertBlocks makes vectors of tokens with Transformer, "
                f"{', '.join(READERS)}, {MASK}, {POOLING}."
            )
        if pooling is not None:
            raise ValueError(f"{path}: the {kind} module {name!r} must come before {POOLING}.")
        if kind == MASK:
            mask = _read_mask(folder / name / "config.json")
        elif kind == POOLING:
            pooling = _read_pooling(folder / name / "config.json")
        elif kind != "Transformer":
            layers.append(READERS[kind](folder / name))
    values = read_if_any(folder / PROMPTS)
    prompts, default = read_prompts(folder / PROMPTS)
    similarity = values.get("similarity_fn_name")
    settings = MultiVectorSettings(
        max_length=read_max_length(folder),
        prompts=prompts,
        default_prompt=default,
        layers=tuple(layers),
        token_pooling=pooling,
        similarity=similarity if similarity in SIMILARITIES else SIMILARITIES[0],
        **(mask or {}),
    )
    if mask is None and (values.get("model_type") == "ColBERT" or any(key in values for key in PYLATE_KEYS)):
        return _read_pylate(folder / PROMPTS, values, settings)
    own, path = read_if_any(folder / TRANSFORMER), folder / TRANSFORMER
    return replace(settings, **_read_lengths(path, own), expansion=_read_expansion(path, own.get("query_expansion")))


def _read_pylate(path: Path, values: dict[str, Any], settings: MultiVectorSettings) -> MultiVectorSettings:
    """PyLate inserts prefixes as tokens, and has punctuation as its skiplist unless a file says otherwise."""
    prompts, markers = dict(settings.prompts), []
    for role in ROLES:
        prefix = values.get(f"{role}_prefix")
        if isinstance(prefix, str) and prefix:
            prompts[role] = prefix + prompts.get(role, "").removeprefix(prefix)
            markers.append(prefix)
    lengths = _read_lengths(path, values)
    expansion = None
    if values.get("do_query_expansion") is not False:
        attend = values.get("attend_to_expansion_tokens") is True
        expansion = Expansion(lengths["query_length"] or QUERY_LENGTH, attend=attend)
        lengths["query_length"] = None
    words = values.get("skiplist_words")
    return replace(
        settings,
        **lengths,
        prompts=prompts,
        markers=tuple(markers),
        layers=(*settings.layers, Normalize()),
        expansion=expansion,
        skiplist=tuple(string.punctuation) if words is None else _read_texts(path, "skiplist_words", words),
    )


def _read_stanford(folder: Path, allow_pickle: bool) -> MultiVectorSettings:
    """Stanford's folders have the projection among the weights and the settings in a file of their own."""
    path = folder / COLBERT_FILE
    values = read_if_any(path)
    weight = read_tensors(folder, allow_pickle).get(PROJECTION)
    if weight is None or weight.dim() != 2:
        raise ValueError(f"{folder}: the weights have no matrix {PROJECTION}, the projection of a ColBERT model.")
    with torch.device("meta"):
        layer = Dense(weight.shape[1], weight.shape[0], bias=False, activation="Identity")
    layer.load_state_dict({PROJECTION: weight.float()}, assign=True)
    named = {"query": values.get("query_token_id"), "document": values.get("doc_token_id")}
    marks = {"query": named["query"] or QUERY_MARKER, "document": named["document"] or DOCUMENT_MARKER}
    lengths = {key: read_size(path, values, key) for key in ("query_maxlen", "doc_maxlen") if values.get(key)}
    return MultiVectorSettings(
        prompts={role: f"{mark} " for role, mark in marks.items()},
        markers=tuple(marks.values()),
        layers=(layer.eval(), Normalize()),
        document_length=lengths.get("doc_maxlen"),
        expansion=Expansion(
            lengths.get("query_maxlen", QUERY_LENGTH), attend=values.get("attend_to_mask_tokens") is True
        ),
        skiplist=() if values.get("mask_punctuation") is False else tuple(string.punctuation),
    )


def _read_lengths(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("query_length", "document_length")
    return {key: None if values.get(key) is None else read_size(path, dict(values), key) for key in keys}


def _read_expansion(path: Path, values: Any) -> Expansion | None:
    if values is None:
        return None
    if not isinstance(values, dict) or values.get("strategy") not in ("fixed", "min"):
        raise ValueError(f"{path}: query_expansion is {values!r}; its strategy must be fixed or min.")
    token = values.get("token")
    if token is not None and not isinstance(token, str):
        raise ValueError(f"{path}: the token of query_expansion is {token!r}; it must be a token or null.")
    is_fixed = values["strategy"] == "fixed"
    return Expansion(read_size(path, values, "length"), is_fixed, values.get("attend") is True, token)


def _read_mask(path: Path) -> dict[str, Any]:
    values = read_json(path)
    if values.get("keep_only_token_ids") is not None:
        raise ValueError(f"{path}: keep_only_token_ids is for images, which BertBlocks does not read.")
    words = _read_texts(path, "skiplist_words", values.get("skiplist_words") or [])
    roles = values.get("skiplist_tasks")
    return {"skiplist": words, "skiplist_roles": _read_roles(path, "skiplist_tasks", roles)}


def _read_pooling(path: Path) -> TokenPooling:
    values = read_json(path)
    factor, protected = values.get("pool_factor", 1.0), values.get("num_protected_tokens", 1)
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not factor >= 1:
        raise ValueError(f"{path}: pool_factor is {factor!r}; it must be a number of at least 1.")
    if not isinstance(protected, int) or isinstance(protected, bool) or protected < 0:
        raise ValueError(f"{path}: num_protected_tokens is {protected!r}; it must be a whole number, 0 or more.")
    # files of earlier versions lack the key, and their vectors were not scaled
    is_normalized = values.get("normalize_embeddings", False) is True
    return TokenPooling(float(factor), protected, is_normalized, _read_roles(path, "tasks", values.get("tasks")))


def _read_texts(path: Path, key: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{path}: {key} is {values!r}; it must be a list of texts.")
    return tuple(values)


def _read_roles(path: Path, key: str, values: Any) -> tuple[str, ...]:
    if values is None:
        return ("document",)
    return _read_texts(path, key, [values] if isinstance(values, str) else values)


def add_markers(tokenizer: PreTrainedTokenizerBase | None, settings: EmbeddingSettings) -> None:
    """Makes the tokenizer read the markers of older checkpoints as single tokens, if it knows them.

    Such checkpoints inserted the tokens; here they are a text in front of another.
    """
    if tokenizer is None or not isinstance(settings, MultiVectorSettings):
        return
    known = {*tokenizer.get_vocab(), *tokenizer.added_tokens_encoder}
    new = []
    for marker in settings.markers:
        name = next((name for name in (marker, *marker.split()[:1]) if name in known), None)
        if name is not None and tokenizer.tokenize(name) != [name]:
            new.append(AddedToken(name, normalized=False, special=True))
    if new:
        tokenizer.add_tokens(new, special_tokens=True)


# ---------------------------------------------------------------------- writing


def copy_stanford(source: Path, target: Path, allow_pickle: bool = False) -> list[str]:
    """Writes the projection and settings of a folder of Stanford's ColBERT as modules next to a converted encoder.

    Does nothing for other folders. Returns the names of what it wrote.
    """
    if find_kind(source) != "multi-vector" or (source / MODULES).is_file():
        return []
    settings = read_multi_vector(source, allow_pickle)
    tokenizer = load_tokenizer_if_any(source)
    add_markers(tokenizer, settings)
    if tokenizer is not None:
        save_tokenizer(tokenizer, target)
    write_multi_vector(target, settings)
    (target / COLBERT_FILE).unlink(missing_ok=True)
    return [MODULES]


def save_multi_vector(
    model: BertBlocksModel, folder: Path, tokenizer: PreTrainedTokenizerBase, settings: MultiVectorSettings
) -> None:
    """Writes a folder that `MultiVectorEncoder` opens."""
    save_folder(model, folder, tokenizer, lambda scratch: write_multi_vector(scratch, settings))


def write_multi_vector(folder: Path, settings: MultiVectorSettings) -> None:
    """Writes what `read_multi_vector` reads, next to an encoder and its tokenizer, which knows the markers."""
    expansion, pooling = settings.expansion, settings.token_pooling
    own: dict[str, Any] = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": TOKENS,
        "max_seq_length": settings.max_length,
        "query_length": settings.query_length,
        "document_length": settings.document_length,
    }
    if expansion is not None:
        own["query_expansion"] = {
            "strategy": "fixed" if expansion.is_fixed else "min",
            "attend": expansion.attend,
            "token": expansion.token,
            "length": expansion.length,
        }
    write_json(folder / TRANSFORMER, {key: value for key, value in own.items() if value is not None})
    facts = {
        "model_type": "MultiVectorEncoder",
        "prompts": settings.prompts,
        "default_prompt_name": settings.default_prompt,
        "similarity_fn_name": settings.similarity,
    }
    write_json(folder / PROMPTS, facts)
    modules = [("", "Transformer")]
    for number, layer in enumerate(settings.layers, start=1):
        kind = type(layer).__name__
        modules.append((f"{number}_{kind}", kind))
        write_layer(layer, folder / modules[-1][0], module_input_name=TOKENS, module_output_name=TOKENS)
    modules.append((f"{len(modules)}_{MASK}", f"{PACKAGE}.{MASK}"))
    mask = {"skiplist_words": list(settings.skiplist), "skiplist_tasks": list(settings.skiplist_roles)}
    write_json(folder / modules[-1][0] / "config.json", mask)
    if pooling is not None:
        modules.append((f"{len(modules)}_{POOLING}", f"{PACKAGE}.{POOLING}"))
        values = {
            "pool_factor": pooling.factor,
            "num_protected_tokens": pooling.protected,
            "normalize_embeddings": pooling.normalize,
            "tasks": list(pooling.roles),
        }
        write_json(folder / modules[-1][0] / "config.json", values)
    write_modules(folder, modules)
