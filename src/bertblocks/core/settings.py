"""Strict settings: pydantic sections, YAML files without YAML's traps, overrides, and errors that name the key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bertblocks.core.registry import nearest

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Strict: an unknown key or another type is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: Any) -> Any:
        for key in values if isinstance(values, Mapping) else ():
            if key not in cls.model_fields:
                known = list(cls.model_fields)
                raise ValueError(f"has no key {key!r}{nearest(key, known)}; there are {', '.join(known)}")
        return values


Schema = TypeVar("Schema", bound=BaseModel)


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names the key."""


class _Loader(yaml.SafeLoader):
    """Reads 1e-6 as a number, which YAML 1.1 takes for text, and refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is there twice", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a file."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is no valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds {type(values).__name__}; it must hold keys and values.")
    return values


def parse_value(text: str, origin: str) -> Any:
    """One value, as it would be read in a file.

    Example:
        >>> parse_value("1e-6", ""), parse_value("[1, two]", "")
        (1e-06, [1, 'two'])
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{origin}: {text!r} is no valid YAML value.") from error


def read_section(schema: type[Schema], values: dict[str, Any], origin: str) -> Schema:
    """Plain values, checked; `origin` names them in errors."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problems: dict[str, str] = {}
        for problem in error.errors():
            path, message = _describe(values, problem)
            problems.setdefault(path, message)  # of several alternatives, what the first one says
        raise RecipeError(f"{origin}: {'; '.join(f'{path} {problems[path]}' for path in problems)}.") from error


def override(schema: type[BaseModel], values: dict[str, Any], assignment: str) -> None:
    """Sets one value, as in `optimizer.lr=2e-3`; a section that is not there begins as the schema's default."""
    key, equals, text = assignment.partition("=")
    if not equals or not key:
        raise RecipeError(f"{assignment!r} is no override; write key.sub=value.")
    place: Any = values
    *parents, last = key.split(".")
    if parents and parents[0] not in values and parents[0] in schema.model_fields:
        section = schema.model_validate({parents[0]: schema.model_fields[parents[0]].default})
        values.update(section.model_dump(mode="json", exclude_unset=True))
    for name in parents:
        place = place.setdefault(name, {}) if isinstance(place, dict) else place[_index(place, name, key)]
        if not isinstance(place, (dict, list)):
            raise RecipeError(f"{assignment!r}: {name} is {place!r} and has no keys of its own.")
    place[last if isinstance(place, dict) else _index(place, last, key)] = parse_value(text, assignment)


def _index(place: list[Any], name: str, key: str) -> int:
    if not name.isdigit() or int(name) >= len(place):
        raise RecipeError(f"{key}: {name!r} is no entry of this list; its entries are 0 to {len(place) - 1}.")
    return int(name)


def _describe(values: Any, problem: Any) -> tuple[str, str]:
    """Path and message of one of pydantic's errors; names of alternatives are no part of a path."""
    kind, given = problem["type"], problem["input"]
    path, place = [], values
    for place_in_path, part in enumerate(problem["loc"], start=1):
        if (isinstance(place, dict) and part in place) or (isinstance(place, list) and isinstance(part, int)):
            place = place[part]
        elif kind != "missing" or place_in_path < len(problem["loc"]):
            continue
        path.append(str(part))
    message = str(problem["msg"]).removeprefix("Value error, ")
    if kind == "union_tag_invalid":
        path.append("kind")
        expected = [tag.strip(" '") for tag in problem["ctx"]["expected_tags"].split(",")]
        tag = problem["ctx"]["tag"]
        message = f"is {tag!r}{nearest(tag, expected)}; it must be one of {', '.join(expected)}"
    elif kind == "missing":
        message = "is missing"
    elif kind != "value_error":
        message = f"is {given!r}; {message.replace('Input should', 'it must')}"
    return ".".join(path) or "the recipe", message
