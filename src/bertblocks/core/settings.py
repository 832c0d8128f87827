"""Strict settings: pydantic sections, YAML files without YAML's pitfalls, overrides, and errors that name the key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import PydanticCustomError, core_schema

from bertblocks.core.messages import InputError, short_repr
from bertblocks.core.registry import Registry, nearest

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A strict section: an unknown key or a wrong type is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown_keys(cls, values: Any) -> Any:
        for key in values if isinstance(values, Mapping) else ():
            if key not in cls.model_fields:
                known = list(cls.model_fields)
                raise ValueError(f"has no key {short_repr(key)}{nearest(key, known)}; the keys are {', '.join(known)}")
        return values


class SectionRegistry(Registry[type[Section]]):
    """Sections that a recipe selects by their `kind`. It is also the annotation of the fields that hold one.

    Sections may be registered after the recipe's schema was built.

    Example:
        >>> SHAPES = SectionRegistry("shape", default="circle")
        >>> class Shape(Section):
        ...     kind: str
        >>> @SHAPES.register("circle")
        ... class Circle(Shape):
        ...     radius: float = 1.0
        >>> class Drawing(Section):
        ...     shape: Annotated[Shape, SHAPES]
        >>> Drawing.model_validate({"shape": {"radius": 2.0}}).shape
        Circle(kind='circle', radius=2.0)
    """

    def __init__(self, key: str, default: str) -> None:
        super().__init__(key)
        self.default = default

    def register(self, name: str | bool) -> Callable[[type[Chosen]], type[Chosen]]:
        """Decorator that registers a section and fixes its `kind` to the name."""
        add = super().register(name)

        def define(section: type[Chosen]) -> type[Chosen]:
            add(section)
            section.model_fields["kind"].annotation = Literal[name]  # type: ignore[assignment]
            section.model_fields["kind"].default = name
            section.model_rebuild(force=True)
            return section

        return define

    def _validate(self, value: Any) -> Section:
        if isinstance(value, Section) and type(value) in self.blocks():
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"is {short_repr(value)}; it must have keys, such as kind")
        kind = value.get("kind", self.default)
        if not isinstance(kind, str) or kind not in self:
            raise PydanticCustomError("unknown_kind", "{message}", {"message": self.describe_unknown(kind)})
        return self[kind].model_validate(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def dump(section: Section, info: core_schema.SerializationInfo) -> dict[str, Any]:
            return section.model_dump(mode=info.mode, exclude_unset=info.exclude_unset)

        serializer = core_schema.plain_serializer_function_ser_schema(dump, info_arg=True)
        return core_schema.no_info_plain_validator_function(self._validate, serialization=serializer)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"oneOf": [handler(section.__pydantic_core_schema__) for section in self.blocks()]}


Chosen = TypeVar("Chosen", bound=Section)
Schema = TypeVar("Schema", bound=BaseModel)


class RecipeError(InputError):
    """An invalid recipe. The message names the key."""


#: Limits for YAML values, with aliases expanded.
MAX_VALUES, MAX_DEPTH = 100_000, 50


class _Loader(yaml.SafeLoader):
    """Reads 1e-6 as a number, which YAML 1.1 reads as text, and rejects duplicate keys and oversized values."""

    def get_single_data(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return self.construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            kind = node.tag.rpartition(":")[2]
            raise _problem(f"{short_repr(node.value)} is not a value of the type {kind!r}", node) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _problem("a key must be a single value, not a list or a mapping", key_node)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise _problem(f"the key {key!r} occurs twice", node)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _problem(message: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, message, node.start_mark)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _check_size(root: yaml.Node) -> None:
    """Counts values as if every alias were written out, because a few nested aliases can stand for billions."""
    sizes: dict[int, int] = {}

    def count(node: yaml.Node, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise _problem(f"values are nested more than {MAX_DEPTH} levels deep", node)
        if id(node) not in sizes:
            sizes[id(node)] = MAX_VALUES + 1  # an alias inside its own value would be endless
            sizes[id(node)] = 1 + sum(count(child, depth + 1) for child in _children(node))
        if sizes[id(node)] > MAX_VALUES:
            raise _problem(f"there are more than {MAX_VALUES:,} values once aliases are expanded", node)
        return sizes[id(node)]

    count(root, 1)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    except RecursionError as error:
        raise RecipeError(f"{path} is not valid YAML: values are nested too deeply.") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds a {type(values).__name__}; it must hold keys and values.")
    return values


def parse_value(text: str, origin: str) -> Any:
    """Parses a single value as in a YAML file.

    Example:
        >>> parse_value("1e-6", ""), parse_value("[1, two]", "")
        (1e-06, [1, 'two'])
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{origin}: {short_repr(text)} is not a valid YAML value.") from error


def read_section(schema: type[Schema], values: dict[str, Any], origin: str) -> Schema:
    """Validates plain values. `origin` names them in error messages."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problems: dict[str, str] = {}
        for problem in error.errors():
            path, message = _describe(values, problem)
            problems.setdefault(path, message)  # of several alternatives, report the first
        raise RecipeError(f"{origin}: {'; '.join(f'{path} {problems[path]}' for path in problems)}.") from error


def override(schema: type[BaseModel], values: dict[str, Any], assignment: str) -> None:
    """Sets one value, as in `optimizer.lr=2e-3`. A missing section starts from the schema's default."""
    key, equals, text = assignment.partition("=")
    if not equals or not key:
        raise RecipeError(f"{short_repr(assignment)} is not an override; write key.sub=value.")
    set_value(schema, values, key, parse_value(text, assignment), assignment)


def set_value(schema: type[BaseModel], values: dict[str, Any], key: str, value: Any, origin: str) -> None:
    """Sets the value of a key such as `optimizer.lr`. A missing section starts from the schema's default."""
    place: Any = values
    *parents, last = key.split(".")
    if parents and parents[0] not in values and parents[0] in schema.model_fields:
        section = schema.model_validate({parents[0]: schema.model_fields[parents[0]].default})
        values.update(section.model_dump(mode="json", exclude_unset=True))
    for name in parents:
        place = place.setdefault(name, {}) if isinstance(place, dict) else place[_index(place, name, key)]
        if not isinstance(place, (dict, list)):
            raise RecipeError(f"{short_repr(origin)}: {name} is {short_repr(place)}, which does not have keys.")
    place[last if isinstance(place, dict) else _index(place, last, key)] = value


def _index(place: list[Any], name: str, key: str) -> int:
    if not name.isdigit() or int(name) >= len(place):
        raise RecipeError(f"{key}: {name!r} is not an index of this list; its indices are 0 to {len(place) - 1}.")
    return int(name)


def _describe(values: Any, problem: Any) -> tuple[str, str]:
    """The path and message of a pydantic error. Names of union alternatives are not part of the path."""
    kind, given = problem["type"], problem["input"]
    path, place = [], values
    for depth, part in enumerate(problem["loc"], start=1):
        if (isinstance(place, dict) and part in place) or (isinstance(place, list) and isinstance(part, int)):
            place = place[part]
        elif kind != "missing" or depth < len(problem["loc"]):
            continue
        path.append(str(part))
    message = str(problem["msg"]).removeprefix("Value error, ")
    if kind == "unknown_kind":
        path.append("kind")
    elif kind == "missing":
        message = "is missing"
    elif kind != "value_error":
        message = f"is {short_repr(given)}; {message.replace('Input should', 'it must')}"
    return ".".join(path) or "the recipe", message
