"""What requests and answers of several dialects share: inputs of every kind, and their JSON schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

_TEXT = {"type": "string"}
#: Token ids are those of the model's vocabulary, which is smaller.
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**24}, "minItems": 1}
_PAIR = {"type": "array", "items": _TEXT, "minItems": 2, "maxItems": 2}


class Body(BaseModel):
    """A request. Unknown keys are errors, and values are never converted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, description="The model's name; by default the first one that does the task.")


class Answer(BaseModel):
    """An answer. Its class describes it in the OpenAPI document; answers are not validated again."""

    model_config = ConfigDict(protected_namespaces=())


def _list_of(*items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items[0] if len(items) == 1 else {"anyOf": list(items)}, "minItems": 1}


def _one_or_many(*items: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*items, _list_of(*items)]}


def _checked(is_valid: Callable[[Any], bool], wanted: str) -> PlainValidator:
    def check(value: Any) -> Any:
        if not is_valid(value):
            raise ValueError(f"it must be {wanted}")
        return value

    return PlainValidator(check)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item <= 2**24 for item in value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_text, value))


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _all(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(is_valid, value))


def _either(*checks: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(check(value) for check in checks)


Texts = Annotated[
    str | list[str],
    _checked(_either(_is_text, _all(_is_text)), "a text or a list of texts"),
    WithJsonSchema(_one_or_many(_TEXT)),
]
TextList = Annotated[list[str], _checked(_all(_is_text), "a list of texts"), WithJsonSchema(_list_of(_TEXT))]
TextsOrIds = Annotated[
    str | list[int] | list[str | list[int]],
    _checked(
        _either(_is_text, _is_ids, _all(_either(_is_text, _is_ids))),
        "a text, a list of token ids, or a list of texts or of lists of token ids",
    ),
    WithJsonSchema(_one_or_many(_TEXT, _IDS)),
]
IdLists = Annotated[
    list[int] | list[list[int]],
    _checked(_either(_is_ids, _all(_is_ids)), "a list of token ids, or a list of such lists"),
    WithJsonSchema(_one_or_many(_IDS)),
]
#: Of our own classify: a text, or a list of texts and of pairs of texts.
TextsOrPairs = Annotated[
    str | list[str | list[str]],
    _checked(_either(_is_text, _all(_either(_is_text, _is_pair))), "a text, or a list of texts or of pairs of texts"),
    WithJsonSchema({"anyOf": [_TEXT, _list_of(_TEXT, _PAIR)]}),
]
#: Of TEI's predict: a text, a pair, or a list of lists of one or two texts.
PredictInputs = Annotated[
    str | list[str] | list[list[str]],
    _checked(
        _either(_is_text, _is_pair, _all(lambda value: _is_words(value) and len(value) <= 2)),
        "a text, a pair of texts, or a list of lists of one or two texts",
    ),
    WithJsonSchema({"anyOf": [_TEXT, _PAIR, _list_of({**_PAIR, "minItems": 1})]}),
]
#: Of tag: a text, or a list of texts and of lists of words.
TextsOrWords = Annotated[
    str | list[str | list[str]],
    _checked(
        _either(_is_text, _all(_either(_is_text, _is_words))),
        "a text, or a list of texts or of lists of words",
    ),
    WithJsonSchema({"anyOf": [_TEXT, _list_of(_TEXT, _list_of(_TEXT))]}),
]


def as_list(inputs: Any) -> list[Any]:
    """A list of inputs; one text, or the ids of one, are a list of one.

    Example:
        >>> as_list("a"), as_list(["a", "b"]), as_list([1, 2])
        (['a'], ['a', 'b'], [[1, 2]])
    """
    return [inputs] if isinstance(inputs, str) or isinstance(inputs[0], int) else inputs


def given(**options: Any) -> dict[str, Any]:
    """The options that a request has set."""
    return {name: value for name, value in options.items() if value is not None}
