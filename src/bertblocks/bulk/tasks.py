"""What each task reads, and the columns that it adds. The predict commands show the same columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from bertblocks.core.registry import nearest
from bertblocks.text.inputs import Roles

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor


@dataclass(frozen=True)
class BulkTask:
    """A method of `Predictor` on the rows of a table."""

    method: str
    roles: Roles
    #: The columns of a result.
    to_columns: Callable[[Any], dict[str, Any]]
    #: The Arrow types of these columns, for a predictor and the options of the method.
    types: Callable[[Predictor, Mapping[str, Any]], dict[str, Any]]
    #: Makes the predictor's input from the cells of a row.
    make_input: Callable[[Any], Any] = field(default=lambda value: value)


def get_task(name: str) -> BulkTask:
    if name not in TASKS:
        raise ValueError(f"task is {name!r}; it must be one of {', '.join(TASKS)}{nearest(name, TASKS)}.")
    return TASKS[name]


def _sparse_columns(vector: Any) -> dict[str, Any]:
    """The entries as Text Embeddings Inference's `/embed_sparse` returns them."""
    pairs = zip(vector.indices.tolist(), vector.values.tolist(), strict=True)
    return {"sparse_embedding": [{"index": index, "value": round(value, 7)} for index, value in pairs]}


def _fill_mask_columns(masks: Any) -> dict[str, Any]:
    return {"masks": [[asdict(filling) for filling in mask] for mask in masks]}


def _embed_types(predictor: Predictor, options: Mapping[str, Any]) -> dict[str, Any]:
    import pyarrow as pa

    size = min(options.get("dimensions") or predictor.embedding_size, predictor.embedding_size)
    numbers = {"float32": pa.float32(), "float16": pa.float16(), "int8": pa.int8(), "binary": pa.uint8()}
    precision = options.get("precision") or "float32"
    return {"embedding": pa.list_(numbers[precision], -(-size // 8) if precision == "binary" else size)}


def _multi_types(predictor: Predictor, options: Mapping[str, Any]) -> dict[str, Any]:
    import pyarrow as pa

    return {"vectors": pa.list_(pa.list_(pa.float32(), predictor.embedding_size))}


def _classify_types(predictor: Predictor, options: Mapping[str, Any]) -> dict[str, Any]:
    import pyarrow as pa

    names: Mapping[Any, str] = predictor.model.config.id2label or {}
    scores = pa.struct([(names[index], pa.float32()) for index in sorted(names)])
    return {"labels": pa.list_(pa.string()), "scores": scores, "is_regression": pa.bool_()}


def _fixed(**names: str) -> Callable[[Predictor, Mapping[str, Any]], dict[str, Any]]:
    """The types of columns that do not depend on the model, each by the name of one in `_STRUCTS` or of a number."""

    def types(predictor: Predictor, options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _parse(kind) for name, kind in names.items()}

    return types


def _parse(kind: str) -> Any:
    """An Arrow type: `int32`, `list<...>`, or the name of a struct."""
    import pyarrow as pa

    if kind.startswith("list<"):
        return pa.list_(_parse(kind[5:-1]))
    if kind in _STRUCTS:
        return pa.struct([(name, _parse(inner)) for name, inner in _STRUCTS[kind].items()])
    return getattr(pa, kind)()


_SPAN = {"start": "int32", "end": "int32", "text": "string", "score": "float32"}
_STRUCTS: dict[str, dict[str, str]] = {
    "entry": {"index": "int32", "value": "float32"},
    "tag": {"label": "string", **_SPAN},
    "span": _SPAN,
    "filling": {"token": "string", "id": "int32", "score": "float32"},
    "ranked": {"index": "int32", "score": "float32", "text": "string"},
}


def _as_pair(value: Any) -> Any:
    """A query and a list of documents, from a row with one document or with several."""
    if not isinstance(value, tuple):
        raise ValueError("lines of text have no queries; rerank needs a table with query and document")
    query, documents = value
    return query, documents if isinstance(documents, list) else [documents]


TASKS: dict[str, BulkTask] = {
    "embed": BulkTask("encode", Roles([("text",)]), lambda vector: {"embedding": vector}, _embed_types),
    "sparse": BulkTask("encode_sparse", Roles([("text",)]), _sparse_columns, _fixed(sparse_embedding="list<entry>")),
    "multi": BulkTask("encode_multi", Roles([("text",)]), lambda vectors: {"vectors": list(vectors)}, _multi_types),
    "rerank": BulkTask(
        "rerank",
        Roles([("query", "document")]),
        lambda ranked: {"documents": [asdict(document) for document in ranked]},
        _fixed(documents="list<ranked>"),
        _as_pair,
    ),
    "classify": BulkTask("classify", Roles([("text",)], optional=("text_pair",)), asdict, _classify_types),
    "tag": BulkTask(
        "tag",
        Roles([("words",), ("text",)]),
        lambda tags: {"tags": [asdict(tag) for tag in tags]},
        _fixed(tags="list<tag>"),
    ),
    "answer": BulkTask(
        "answer",
        Roles([("question", "context")]),
        asdict,
        _fixed(
            text="string",
            start="int32",
            end="int32",
            score="float32",
            no_answer_score="float32",
            best="list<span>",
        ),
    ),
    "fill-mask": BulkTask("fill_mask", Roles([("text",)]), _fill_mask_columns, _fixed(masks="list<list<filling>>")),
}
