"""Folders of sparse encoders: a masked language model with a SpladePooling, and queries that may need no encoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.sentence_transformers.embedder import EmbeddingSettings
from bertblocks.checkpoints.sentence_transformers.modules import (
    MODULES,
    PROMPTS,
    TRANSFORMER,
    find_kind,
    read_if_any,
    read_max_length,
    read_modules,
    read_prompts,
    save_folder,
    write_modules,
)
from bertblocks.core.storage import read_json, write_json
from bertblocks.core.tensor_files import SINGLE, read_safetensors, save_tensors
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.nn.ops.sparse_pooling import ACTIVATIONS, POOLINGS
from bertblocks.nn.sparse_head import SparseHead
from bertblocks.text.tokenizers import load_tokenizer_if_any, save_tokenizer

ROUTER = "router_config.json"
#: The modules of a sparse encoder, by the names of their classes; the first two are the same.
ENCODERS, POOLING, STATIC = ("Transformer", "MLMTransformer"), "SpladePooling", "SparseStaticEmbedding"
#: The classes that are written.
TYPES = {
    "Router": "sentence_transformers.base.modules.router.Router",
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    POOLING: "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling",
    STATIC: "sentence_transformers.sparse_encoder.modules.sparse_static_embedding.SparseStaticEmbedding",
}
POOLING_FOLDER, ROUTED_POOLING, ROUTED_STATIC = f"1_{POOLING}", f"document_1_{POOLING}", f"query_0_{STATIC}"


@dataclass(frozen=True)
class SparseEncoderSettings(EmbeddingSettings):
    """How a checkpoint makes sparse vectors, with the defaults for a folder without modules.json."""

    sparse_pooling: str = "max"
    activation: str = "relu"
    #: The most entries of a vector; the largest are kept.
    max_active_dims: int | None = None
    #: The weight of each token in a query that does not pass through the encoder.
    query_weights: Tensor | None = None
    #: Whether training leaves these weights alone.
    is_frozen: bool = True

    def make_head(self) -> SparseHead:
        return SparseHead(self.sparse_pooling, self.activation, self.query_weights, self.is_frozen)


@dataclass(frozen=True)
class _Modules:
    """The folders of the modules."""

    encoder: Path
    pooling: Path
    static: Path | None = None


def find_encoder(folder: Path) -> Path:
    """The folder of the model and its tokenizer, which a Router keeps in a folder of its own."""
    is_routed = not (folder / "config.json").is_file() and (folder / MODULES).is_file()
    return _find_modules(folder).encoder if is_routed and find_kind(folder) == "sparse-encoder" else folder


def read_sparse_encoder(folder: Path) -> SparseEncoderSettings:
    """Reads `modules.json` and the files it leads to. A module that BertBlocks cannot run is an error."""
    modules = _find_modules(folder)
    path = modules.pooling / "config.json"
    values = read_json(path)
    pooling, activation = values.get("pooling_strategy", "max"), values.get("activation_function", "relu")
    for key, value, known in (
        ("pooling_strategy", pooling, POOLINGS),
        ("activation_function", activation, tuple(ACTIVATIONS)),
    ):
        if value not in known:
            raise ValueError(f"{path}: {key} is {value!r}; it must be one of {', '.join(known)}.")
    limit = read_if_any(folder / PROMPTS).get("max_active_dims")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(f"{folder / PROMPTS}: max_active_dims is {limit!r}; it must be a positive whole number.")
    prompts, default = read_prompts(folder / PROMPTS)
    weights, is_frozen = None, True
    if modules.static is not None:
        weights = _read_weights(modules.static, folder, modules.encoder)
        is_frozen = read_if_any(modules.static / "config.json").get("frozen") is True
    return SparseEncoderSettings(
        max_length=read_max_length(modules.encoder),
        prompts=prompts,
        default_prompt=default,
        sparse_pooling=pooling,
        activation=activation,
        max_active_dims=limit,
        query_weights=weights,
        is_frozen=is_frozen,
    )


def _find_modules(folder: Path) -> _Modules:
    path = folder / MODULES
    listed = read_modules(path)
    kinds = [kind for kind, _ in listed]
    if kinds == ["Router"]:
        return _find_routes(folder / listed[0][1])
    if len(listed) != 2 or kinds[0] not in ENCODERS or kinds[1] != POOLING:
        raise ValueError(
            f"{path} lists {', '.join(kinds)}; BertBlocks makes sparse vectors with Transformer and {POOLING}, or with "
            "a Router between these and queries without an encoder."
        )
    return _Modules(folder / listed[0][1], folder / listed[1][1])


def _find_routes(folder: Path) -> _Modules:
    path = folder / ROUTER
    values = read_json(path)
    types, structure = values.get("types"), values.get("structure")
    if not isinstance(types, dict) or not isinstance(structure, dict):
        raise ValueError(f"{path}: types and structure must be JSON objects.")
    routes: dict[str, list[tuple[str, str]]] = {}
    for route, names in structure.items():
        if not isinstance(names, list) or not all(isinstance(types.get(name), str) for name in names):
            raise ValueError(f"{path}: the route {route!r} must be a list of modules that types has.")
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in names):
            raise ValueError(f"{path}: the modules of the route {route!r} must be folders inside {folder}.")
        routes[route] = [(types[name].rpartition(".")[2], name) for name in names]
    document, query = routes.get("document", []), routes.get("query", [])
    is_document = len(document) == 2 and document[0][0] in ENCODERS and document[1][0] == POOLING
    is_static = [kind for kind, _ in query] == [STATIC]
    if not is_document or not (is_static or query in ([], document)) or set(routes) - {"query", "document"}:
        written = "; ".join(f"{route}: {', '.join(kind for kind, _ in own)}" for route, own in routes.items())
        raise ValueError(
            f"{path} has the routes {written}; BertBlocks reads document: Transformer, {POOLING}, with query: {STATIC} "
            "or the same."
        )
    return _Modules(folder / document[0][1], folder / document[1][1], folder / query[0][1] if is_static else None)


def _read_weights(static: Path, folder: Path, encoder: Path) -> Tensor:
    """The weights of query tokens, from tensors or, as OpenSearch has them, from a JSON file of tokens."""
    tokenizer = load_tokenizer_if_any(encoder)
    own = load_tokenizer_if_any(static) or tokenizer
    if tokenizer is None or own is None:
        raise ValueError(f"{encoder}: there is no tokenizer next to the model.")
    vocabulary = own.get_vocab()
    if vocabulary != tokenizer.get_vocab():
        raise ValueError(f"{static}: its tokenizer has other tokens than that of {encoder}; both must be the same.")
    named = read_if_any(static / "config.json").get("path")
    if isinstance(named, str) and named.endswith(".json"):
        found = [place / Path(named).name for place in (static, folder) if (place / Path(named).name).is_file()]
        if not found:
            raise ValueError(f"{static / 'config.json'}: path is {named!r}; there is no such file in {static}.")
        weights = torch.zeros(len(vocabulary))
        for token, weight in read_json(found[0]).items():
            if token in vocabulary:
                weights[vocabulary[token]] = float(weight)
        return weights
    weights = read_safetensors(static / SINGLE).get("weight", torch.zeros(0)).float()
    if weights.shape != (len(vocabulary),):
        raise ValueError(
            f"{static / SINGLE}: weight has shape {list(weights.shape)}; the tokenizer asks for [{len(vocabulary)}]."
        )
    return weights


# ---------------------------------------------------------------------- writing


def save_sparse_encoder(
    model: LanguageModel, folder: Path, tokenizer: PreTrainedTokenizerBase, settings: SparseEncoderSettings
) -> None:
    """Writes a folder that `SparseEncoder` opens."""

    def write(scratch: Path) -> None:
        _write_settings(scratch, settings)
        if settings.query_weights is not None:
            save_tokenizer(tokenizer, scratch / ROUTED_STATIC)

    head, model.sparse_head = model.sparse_head, None  # it has files of its own
    try:
        save_folder(model, folder, tokenizer, write)
    finally:
        model.sparse_head = head


def _write_settings(folder: Path, settings: SparseEncoderSettings) -> None:
    encoder: dict[str, Any] = {
        "transformer_task": "fill-mask",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "token_embeddings",
    }
    if settings.max_length is not None:
        encoder["max_seq_length"] = settings.max_length
    write_json(folder / TRANSFORMER, encoder)
    values: dict[str, Any] = {"model_type": "SparseEncoder", "prompts": settings.prompts}
    values |= {"default_prompt_name": settings.default_prompt, "similarity_fn_name": "dot"}
    if settings.max_active_dims is not None:
        values["max_active_dims"] = settings.max_active_dims
    write_json(folder / PROMPTS, values)
    pooling = {"pooling_strategy": settings.sparse_pooling, "activation_function": settings.activation}
    if settings.query_weights is None:
        write_json(folder / POOLING_FOLDER / "config.json", pooling)
        write_modules(folder, [("", TYPES["Transformer"]), (POOLING_FOLDER, TYPES[POOLING])])
        return
    write_json(folder / ROUTED_POOLING / "config.json", pooling)
    write_json(folder / ROUTED_STATIC / "config.json", {"frozen": settings.is_frozen})
    save_tensors({"weight": settings.query_weights.detach().contiguous().cpu()}, folder / ROUTED_STATIC / SINGLE)
    # the encoder stays in the folder itself, as in OpenSearch's models, so that it is a plain checkpoint too
    write_json(
        folder / ROUTER,
        {
            "types": {ROUTED_STATIC: TYPES[STATIC], "": TYPES["Transformer"], ROUTED_POOLING: TYPES[POOLING]},
            "structure": {"query": [ROUTED_STATIC], "document": ["", ROUTED_POOLING]},
            "parameters": {"default_route": "document", "allow_empty_key": True, "route_mappings": {}},
        },
    )
    write_modules(folder, [("", TYPES["Router"])])
