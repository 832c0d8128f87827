"""Writes docs/config.md from src/bertblocks/config/config.py and from what every block declares about itself.

Run `python docs/generate_config.py` after changing a key or a block.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertblocks.config.blocks import SLOTS
from bertblocks.core.keys import Key as DeclaredKey
from bertblocks.core.keys import keys_of
from bertblocks.core.registry import Registry

COLUMNS = ("Key", "Type", "Default", "Per layer", "Meaning")
ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "bertblocks"
TARGET = ROOT / "docs" / "config.md"

INTRODUCTION = """\
# Config keys

<!-- docs/generate_config.py writes this page from src/bertblocks/config/config.py and the blocks' own files. -->

`BertBlocksConfig()` is BERT-base; every key below changes one aspect of it. A key that is not listed raises an error
that suggests the nearest known name. A key of a block raises an error unless a layer uses that block. Keys that
transformers keeps on every config (`num_labels`, `id2label`, `label2id`, `problem_type`, `output_hidden_states` and the
like) are accepted too.

An *implied* default follows from other keys, as the last column says. The key gets its value when the config is built,
and a saved config includes it. If those other keys change later, the key follows, unless you have set it to something
else. *Per layer* marks keys that `layer_overrides` can set for a single layer.
"""


@dataclass
class Key:
    name: str
    kind: str
    default: str
    comment: str


@dataclass
class Section:
    title: str
    keys: list[Key] = field(default_factory=list)


def read_sections(source: str) -> list[Section]:
    """Return the keys of the config class in source order, grouped by their `# ----` titles."""
    lines = source.splitlines()
    config = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "BertBlocksConfig")
    assert isinstance(config, ast.ClassDef)
    fields = {node.lineno: node for node in config.body if isinstance(node, ast.AnnAssign)}
    sections: list[Section] = []
    comment: list[str] = []
    for number in range(config.lineno, max(fields) + 1):
        line = lines[number - 1].strip()
        if line.startswith("# ---- "):
            sections.append(Section(_title(line.removeprefix("# ---- "))))
        elif line.startswith("#: "):
            comment.append(line.removeprefix("#: "))
        elif number in fields:
            if sections:  # assignments before the first title are not keys
                sections[-1].keys.append(_read_key(fields[number], " ".join(comment)))
            comment = []
    return sections


def _title(text: str) -> str:
    return text if text == "nGPT" else text[0].upper() + text[1:]


def _read_key(node: ast.AnnAssign, comment: str) -> Key:
    default = "required" if node.value is None else ast.unparse(node.value)
    default = "*implied*" if default == "IMPLIED" else f"`{default}`"
    return Key(ast.unparse(node.target), ast.unparse(node.annotation), default, comment)


def read_constant(path: Path, name: str) -> Any:
    """Return the literal that a module assigns to `name`."""
    return ast.literal_eval(_assigned(path, name))


def _assigned(path: Path, name: str) -> Any:
    """Return the syntax tree of what a module assigns to `name`."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return getattr(node, "value", None)
    raise KeyError(f"{path} does not assign {name}.")


def read_choices(path: Path) -> dict[str, list[str]]:
    """Return the keys whose values `CHOICES` spells out; values of a registry are only known at run time."""
    choices = {}
    tree = _assigned(path, "CHOICES")
    for key, value in zip(tree.keys, tree.values, strict=True):
        try:
            choices[ast.literal_eval(key)] = ast.literal_eval(value.body)
        except (AttributeError, ValueError):
            continue
    return choices


def render() -> str:
    config, validation = PACKAGE / "config/config.py", PACKAGE / "config/validation.py"
    per_layer = read_constant(validation, "LAYER_KEYS")
    choices = read_choices(validation)
    parts = [INTRODUCTION]
    for section in read_sections(config.read_text(encoding="utf-8")):
        rows = []
        for key in section.keys:
            meaning = key.comment
            if any(choice not in meaning for choice in choices.get(key.name, [])):
                meaning = f"One of {', '.join(choices[key.name])}. {meaning}".strip()
            rows.append(
                (f"`{key.name}`", f"`{key.kind}`", key.default, "yes" if key.name in per_layer else "", meaning)
            )
        parts.append(f"## {section.title}\n\n" + table(COLUMNS, rows))
        for key in section.keys:
            if key.name in SLOTS:
                parts += _render_slot(SLOTS[key.name])
    parts.append(_render_aliases(PACKAGE / "config/aliases.py"))
    return "\n".join(parts)


def _render_slot(registry: Registry[Any]) -> list[str]:
    """Return the blocks that a key can choose, then the keys of each block that has some."""
    names = {name: f"`{registry.key}={_write(name)}`" for name in registry}
    parts = []
    if names and list(names) != [True]:
        rows = [(f"`{_write(name)}`", _describe(registry[name])) for name in names]
        parts.append(f"### Values of `{registry.key}`\n\n" + table(("Value", "What it is"), rows))
    for name, title in names.items():
        block = registry[name]
        if keys := keys_of(block):
            rows = [(f"`{key}`", *_declared(declared)) for key, declared in keys.items()]
            parts.append(f"### Keys of {title}\n\n" + table(COLUMNS, rows))
        if required := getattr(block, "requires", {}):
            rows = [(f"`{key}`", f"`{value!r}`", reason) for key, (value, reason) in required.items()]
            parts.append(f"### Values that {title} requires\n\n" + table(("Key", "Value", "Because"), rows))
    return parts


def _write(name: Any) -> str:
    return str(name).lower() if isinstance(name, bool) else f'"{name}"'


def _describe(block: Any) -> str:
    line = " ".join((inspect.getdoc(block) or "").split("\n\n")[0].split())
    return f"{line} {getattr(block, 'evidence', '')}".strip()


def _declared(key: DeclaredKey) -> tuple[str, str, str, str]:
    kind = key.type.__name__ if isinstance(key.type, type) else str(key.type).replace("typing.", "")
    default = "*implied*" if key.implied is not None else f"`{key.default!r}`"
    meaning = key.doc
    if any(choice not in meaning for choice in key.choices):
        meaning = f"One of {', '.join(key.choices)}. {meaning}"
    return f"`{kind}`", default, "yes" if key.per_layer else "", meaning


def _render_aliases(aliases: Path) -> str:
    rows = [(f"`{alias}`", f"`{name}`") for alias, name in read_constant(aliases, "KEY_ALIASES").items()]
    for key, values in read_constant(aliases, "VALUE_ALIASES").items():
        rows += [(f'`{key}="{alias}"`', f'`{key}="{value}"`') for alias, value in values.items()]
    layers = read_constant(aliases, "LAYER_TYPE_ALIASES")
    rows += [(f'`"{alias}"` in `layer_types`', f'`"{value}"`') for alias, value in layers.items()]
    introduction = (
        "Accepted on input, never written, except that saved configs use transformers' names in `layer_types`."
    )
    return f"## Aliases\n\n{introduction}\n\n" + table(("Alias", "Key or value"), rows)


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(f"Wrote {TARGET.relative_to(ROOT)}.")
