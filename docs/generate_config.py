"""Writes docs/config.md from the source: the keys, defaults and `#:` comments of src/bertblocks/config/config.py.

Run it after changing a key: `python docs/generate_config.py`. The source is parsed, not imported.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "bertblocks"
TARGET = ROOT / "docs" / "config.md"

INTRODUCTION = """\
# Config keys

<!-- docs/generate_config.py writes this page from the comments in src/bertblocks/config/config.py. Edit them there. -->

`BertBlocksConfig()` is BERT-base. Every key below is one step away from it. A key that is not listed here is refused
with the nearest known name, except for what transformers itself keeps on a config (`num_labels`, `id2label`,
`label2id`, `problem_type`, `output_hidden_states` and the like).

A default *implied* follows from other keys, as the last column says. Once the config is made the key holds its value,
and a saved config lists it. It follows when those keys are changed later, unless it then holds another value than the
implied one. *Per layer* marks keys that `layer_overrides` may set for one layer.
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
    """The keys of the config class in the order of the file, under their `# ----` titles."""
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
            if sections:  # what stands before the first title is no key
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
    """The value of a literal that a module assigns to `name`."""
    return ast.literal_eval(_assigned(path, name))


def _assigned(path: Path, name: str) -> Any:
    """What a module assigns to `name`, as a tree."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return getattr(node, "value", None)
    raise KeyError(f"{path} assigns nothing to {name}.")


def read_choices(path: Path) -> dict[str, list[str]]:
    """The keys whose values are written out in `CHOICES`; those of a registry are not known before running."""
    choices = {}
    tree = _assigned(path, "CHOICES")
    for key, value in zip(tree.keys, tree.values, strict=True):
        try:
            choices[ast.literal_eval(key)] = ast.literal_eval(value.body)
        except (AttributeError, ValueError):
            continue
    return choices


def render() -> str:
    config, checks = PACKAGE / "config/config.py", PACKAGE / "config/validation.py"
    per_layer = read_constant(checks, "LAYER_KEYS")
    choices = read_choices(checks)
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
        parts.append(f"## {section.title}\n\n" + table(("Key", "Type", "Default", "Per layer", "Meaning"), rows))
    parts.append(_render_aliases(PACKAGE / "config/aliases.py"))
    parts.append(_render_ngpt(checks))
    return "\n".join(parts)


def _render_aliases(spelling: Path) -> str:
    rows = [(f"`{alias}`", f"`{name}`") for alias, name in read_constant(spelling, "KEY_ALIASES").items()]
    for key, values in read_constant(spelling, "VALUE_ALIASES").items():
        rows += [(f'`{key}="{alias}"`', f'`{key}="{value}"`') for alias, value in values.items()]
    layers = read_constant(spelling, "LAYER_TYPE_ALIASES")
    rows += [(f'`"{alias}"` in `layer_types`', f'`"{value}"`') for alias, value in layers.items()]
    introduction = "Read on input, never written, except that saved configs have transformers' names in `layer_types`."
    return f"## Other spellings\n\n{introduction}\n\n" + table(("Spelling", "Stands for"), rows)


def _render_ngpt(checks: Path) -> str:
    values = read_constant(checks, "NGPT_VALUES")
    rows = [(f"`{key}`", f"`{value!r}`", reason) for key, (value, reason) in values.items()]
    rows.append(("`num_kv_heads`", "`num_attention_heads`", "queries and keys share their scale"))
    return "## What `ngpt` fixes\n\nWith `ngpt` true any other value is refused.\n\n" + table(
        ("Key", "Value", "Because"), rows
    )


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(f"Wrote {TARGET.relative_to(ROOT)}.")
