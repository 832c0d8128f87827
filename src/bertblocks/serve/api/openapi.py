"""The OpenAPI document, made from the schemas of the routes, and a page that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

import orjson
from pydantic import BaseModel, TypeAdapter

import bertblocks
from bertblocks.serve.api.endpoint import MAX_TIMEOUT, RAW, Endpoint
from bertblocks.serve.api.errors import ERROR_SCHEMAS, MEANINGS
from bertblocks.serve.api.status import GET_ROUTES
from bertblocks.serve.error_bodies import dialect_of
from bertblocks.serve.models import ModelSet

_POST_ERRORS = (400, 401, 404, 408, 413, 415, 422, 429, 500, 503, 504)
_TAGS = {"openai": "OpenAI", "tei": "Text Embeddings Inference", "cohere": "Cohere"}
_TIMINGS = {
    "X-Compute-Characters": "Characters of the inputs.",
    "X-Compute-Tokens": "Tokens that the model read.",
    "X-Total-Time": "Milliseconds from the arrival of the request to its result.",
    "X-Tokenization-Time": "Milliseconds of tokenization.",
    "X-Queue-Time": "Milliseconds in the queue.",
    "X-Inference-Time": "Milliseconds in the model.",
}
_RAW_HEADERS = {
    "X-Shape": "The array's shape, such as 2,384.",
    "X-Dtype": "The type of its little-endian numbers.",
    "X-Lengths": "The rows of each input, if they differ.",
    "X-Range": "int8 covers the numbers between -range and range.",
}


def make_document(endpoints: Sequence[Endpoint], models: ModelSet) -> dict[str, Any]:
    """Describes every route, every status it can answer with, and the names of the models."""
    schemas = _Schemas()
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths[endpoint.path] = {"post": _describe_post(endpoint, schemas, models)}
    for path, (response, summary, statuses) in GET_ROUTES.items():
        paths.setdefault(path, {})["get"] = _describe_get(path, response, summary, statuses, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "BertBlocks", "version": bertblocks.__version__, "description": "Encoders over HTTP."},
        "security": [{}, {"bearer": []}],
        "paths": paths,
        "components": {"schemas": schemas.found, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


class _Schemas:
    """The JSON schemas of types; those of classes are components that others refer to."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def add(self, kind: Any, prefix: str = "") -> dict[str, Any]:
        """The schema of a type, or what refers to it. `prefix` tells classes of the same name apart."""
        schema = self.resolve(kind, prefix)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            self.found[prefix + kind.__name__] = schema
            return {"$ref": f"#/components/schemas/{prefix}{kind.__name__}"}
        return schema

    def resolve(self, kind: Any, prefix: str = "") -> dict[str, Any]:
        """The schema of a type itself; classes within are components."""
        schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/" + prefix + "{model}")
        for name, part in schema.pop("$defs", {}).items():
            self.found[prefix + name] = part
        return schema


def _describe_post(endpoint: Endpoint, schemas: _Schemas, models: ModelSet) -> dict[str, Any]:
    own = endpoint.request.__module__.rpartition(".")[2]
    content: dict[str, Any] = {"application/json": {"schema": schemas.add(endpoint.response, f"{own}.")}}
    headers = dict(_TIMINGS) if endpoint.task is not None else {}
    if endpoint.has_raw:
        content[RAW] = {"schema": {"type": "string", "format": "binary"}}
        headers |= _RAW_HEADERS
    request = schemas.resolve(endpoint.request, f"{own}.")
    able = [model for model in models if endpoint.task is None or endpoint.task in model.tasks]
    names = [model.name for model in able]
    mask = able[0].predictor.tokenizer.mask_token if able else None
    example = orjson.loads(orjson.dumps(dict(endpoint.example)).replace(b"[MASK]", (mask or "[MASK]").encode()))
    return {
        "tags": [_tag(endpoint)],
        "summary": endpoint.summary,
        "operationId": "post" + endpoint.path.replace("/", "_").replace("-", "_"),
        "parameters": [
            {
                "name": "X-Timeout-Ms",
                "in": "header",
                "required": False,
                "description": "The deadline of the request, in milliseconds.",
                "schema": {"type": "integer", "minimum": 1, "maximum": MAX_TIMEOUT},
            }
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _with_models(request, names),
                    "example": example,
                }
            },
        },
        "responses": {
            "200": {
                "description": "The result.",
                "content": content,
                "headers": {
                    name: {"description": text, "schema": {"type": "string"}} for name, text in headers.items()
                },
            },
            **_describe_errors(endpoint.path, _POST_ERRORS, schemas),
        },
    }


def _with_models(request: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The schema of a request in which the names of the models that do its task are listed."""
    model = {key: value for key, value in request["properties"]["model"].items() if key != "anyOf"}
    return {**request, "properties": {**request["properties"], "model": {**model, "enum": [*names, "", None]}}}


def _describe_get(
    path: str, response: Any, summary: str, statuses: tuple[int, ...], schemas: _Schemas
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "tags": ["Server"],
        "summary": summary,
        "operationId": "get" + path.replace("/", "_").replace("{", "").replace("}", ""),
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {"schema": schemas.add(response)}}},
            **_describe_errors(path, statuses, schemas),
        },
    }
    if "{id}" in path:
        described["parameters"] = [
            {"name": "id", "in": "path", "required": True, "description": "A name.", "schema": {"type": "string"}}
        ]
    return described


def _describe_errors(path: str, statuses: Sequence[int], schemas: _Schemas) -> dict[str, Any]:
    schema = schemas.add(ERROR_SCHEMAS[dialect_of(path)])
    return {
        str(status): {"description": MEANINGS[status], "content": {"application/json": {"schema": schema}}}
        for status in statuses
    }


def _tag(endpoint: Endpoint) -> str:
    is_own = endpoint.request.__module__.endswith(".own")
    return "BertBlocks" if is_own else _TAGS[endpoint.dialect]


def make_page(document: dict[str, Any]) -> str:
    """A page that shows the document, with no script, and nothing from elsewhere."""
    sections: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            shown = _show_route(method.upper(), path, operation, document["components"]["schemas"])
            sections.setdefault(operation["tags"][0], []).append(shown)
    routes = "\n".join(f"<h2>{escape(tag)}</h2>" + "\n".join(shown) for tag, shown in sections.items())
    template = resources.files(__package__).joinpath("docs.html").read_text(encoding="utf-8")
    return template.replace("$VERSION", escape(document["info"]["version"])).replace("$ROUTES", routes)


def _show_route(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    parts = []
    if "requestBody" in operation:
        content = operation["requestBody"]["content"]["application/json"]
        body = orjson.dumps(content["example"]).decode()
        command = f"curl -H 'Content-Type: application/json' -d '{body}' $SERVER{path}"
        schema = _resolve(content["schema"], schemas)
        required = schema.get("required", ())
        rows = [_show_key(key, part, key in required, schemas) for key, part in schema["properties"].items()]
        parts.append(f"<pre>{escape(command)}</pre>")
        parts.append(_table("Body", ("Key", "Type", "Meaning"), rows))
    answers = [_show_answer(status, answer, schemas) for status, answer in operation["responses"].items()]
    parts.append(_table("Answers", ("Status", "Meaning", "Body"), answers))
    title = f"<b>{method}</b> <code>{escape(path)}</code> {escape(operation['summary'])}"
    return f"<details><summary>{title}</summary>{''.join(parts)}</details>"


def _table(title: str, columns: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    return f"<h3>{title}</h3><table><tr>{head}</tr>{''.join(rows)}</table>"


def _show_key(key: str, schema: dict[str, Any], is_required: bool, schemas: dict[str, Any]) -> str:
    default = (
        "" if is_required or schema.get("default") is None else f" Default: {orjson.dumps(schema['default']).decode()}."
    )
    text = schema.get("description", "") + default
    mark = " (required)" if is_required else ""
    return _row(f"<code>{escape(key)}</code>{mark}", escape(_show_type(schema, schemas)), escape(text))


def _show_answer(status: str, answer: dict[str, Any], schemas: dict[str, Any]) -> str:
    kinds = " or ".join(
        kind if kind == RAW else _show_type(part["schema"], schemas) for kind, part in answer["content"].items()
    )
    return _row(status, escape(answer["description"]), escape(kinds))


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _resolve(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _show_type(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """A schema in a few words, such as `string or [string]`."""
    schema = _resolve(schema, schemas)
    if "enum" in schema:
        return " or ".join(orjson.dumps(value).decode() for value in schema["enum"])
    if "const" in schema:
        return orjson.dumps(schema["const"]).decode()
    if "anyOf" in schema:
        return " or ".join(_show_type(part, schemas) for part in schema["anyOf"])
    if schema.get("type") == "array":
        return f"[{_show_type(schema['items'], schemas)}]"
    if "properties" in schema:
        return (
            "{" + ", ".join(f"{key}: {_show_type(part, schemas)}" for key, part in schema["properties"].items()) + "}"
        )
    return str(schema.get("type", "any"))
