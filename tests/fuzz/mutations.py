"""Hostile changes of values, texts, bytes and files, drawn from a seeded generator."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Values that readers stumble over: other types, edges of number formats, and text that means something elsewhere.
HOSTILE: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    255,
    10**6,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**30,
    10**400,
    0.5,
    -0.0,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    "0",
    "a",
    "true",
    "None",
    "nan",
    "x" * 100_000,
    "\ud800",
    "\x00",
    "\x1b[31mred\x07",
    "\U0001d518\u202e\u0301",
    "../../../etc/passwd",
    "/dev/null",
    "/nonexistent/file",
    ".",
    "http://localhost:1/x",
    "!!python/object/apply:os.system [id]",
    "%s%n{0}{{x}}",
    "[MASK]",
    [],
    [None],
    [1, "a", None],
    [[[]]],
    [0] * 10_000,
    {},
    {"": None},
    {"a": {"b": {"c": 1}}},
    {"kind": "a"},
]


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def hostile_value(draw: random.Random) -> Any:
    return deep(draw.choice([10, 60, 400])) if draw.random() < 0.05 else copy.deepcopy(draw.choice(HOSTILE))


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values inside a value; of a long list or mapping, the first few."""
    if isinstance(value, dict):
        items: Any = list(value.items())[:60]
    elif isinstance(value, list):
        items = list(enumerate(value))[:8]
    else:
        return [place]
    return [place, *(path for key, child in items for path in _places(child, (*place, key)))]


def mutate_value(draw: random.Random, value: Any) -> Any:
    """A copy of a JSON value with one to three changes."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        value = _change(draw, value)
    return value


def _change(draw: random.Random, value: Any) -> Any:
    path = draw.choice(_places(value))
    if not path:
        return value if draw.random() < 0.8 else hostile_value(draw)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    key, old = path[-1], parent[path[-1]]
    change = draw.choice(["replace", "replace", "replace", "delete", "wrap", "rename", "text", "number", "add", "swap"])
    if change == "delete":
        del parent[key]
    elif change == "wrap":
        parent[key] = draw.choice([[old], {"a": old}, [old, old], str(old)])
    elif change == "rename" and isinstance(parent, dict):
        parent[draw.choice([key.upper(), key[:-1], f"{key}_", "", "x" * 5000, "\ud800", "1"])] = parent.pop(key)
    elif change == "text" and isinstance(old, str):
        parent[key] = draw.choice([old.upper(), old[:-1], old * 2, f" {old} ", old[::-1], f"{old}\x00", f"../{old}"])
    elif change == "number" and isinstance(old, (int, float)):
        parent[key] = draw.choice([-old, old + 1, old * 2, old * 1000, old / 3, float(old), str(old), old - 1])
    elif change == "add" and isinstance(parent, dict):
        parent[draw.choice(["extra", "auto_map", "__class__", "", "type", "\ud800"])] = hostile_value(draw)
    elif change == "swap" and isinstance(parent, dict) and len(parent) > 1:
        other = draw.choice(list(parent))
        parent[key], parent[other] = parent[other], old
    else:
        parent[key] = hostile_value(draw)
    return value


def to_json(draw: random.Random, value: Any) -> bytes:
    """JSON, sometimes with what Python's encoder does not write."""
    text = json.dumps(value, indent=draw.choice([None, 2]), ensure_ascii=draw.random() < 0.8)
    trick = draw.random()
    if trick < 0.03:
        text = "[" * 100_000 + "]" * 100_000
    elif trick < 0.06:
        text = text.replace("{", '{"a": 1, "a": 2, ', 1)
    elif trick < 0.08:
        text = text.replace(": ", ": 1" + "0" * 5000 + ", ", 1)
    elif trick < 0.10:
        text = text + draw.choice(["}", "\x00", " {}", "//comment", ","])
    data = text.encode(draw.choice(["utf-8"] * 12 + ["utf-16", "utf-8-sig", "utf-32", "latin-1"]), "replace")
    return mutate_bytes(draw, data) if draw.random() < 0.1 else data


def mutate_bytes(draw: random.Random, data: bytes) -> bytes:
    """Flipped, lost, repeated or foreign bytes."""
    if not data:
        return b"\x00"
    start = draw.randrange(len(data))
    stop = min(len(data), start + draw.choice([1, 4, 64, 4096]))
    changed = bytearray(data)
    change = draw.randrange(9)
    if change == 0:
        return data[:start]
    if change == 1:
        return data[:start] + data[stop:]
    if change == 2:
        return data[:stop] + data[start:]
    if change == 3:
        changed[start:stop] = bytes(stop - start)
    elif change == 4:
        changed[start:start] = draw.randbytes(draw.choice([1, 8, 300]))
    elif change == 5:
        return draw.choice([b"", b"\n", b"\x00" * 10_000, draw.randbytes(2000), b"\xff\xfe", data[::-1]])
    else:
        for _ in range(draw.choice([1, 1, 5, 50])):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def mutate_text(draw: random.Random, text: str) -> bytes:
    """Changed lines, cells, encodings or bytes."""
    lines = text.splitlines(keepends=True) or [""]
    place = draw.randrange(len(lines))
    hostile = str(draw.choice([value for value in HOSTILE if not isinstance(value, int) or value < 2**64]))
    change = draw.randrange(10)
    if change == 0:
        del lines[place]
    elif change == 1:
        lines.insert(place, lines[draw.randrange(len(lines))])
    elif change == 2:
        lines[place] = hostile + "\n"
    elif change == 3:
        words = lines[place].split(draw.choice([",", "\t", " ", '"']))
        words[draw.randrange(len(words))] = hostile
        lines[place] = ",".join(words)
    elif change == 4:
        lines = [line.replace(",", draw.choice([";", "|", "\t", ""])) for line in lines]
    elif change == 5:
        lines[place] = lines[place].rstrip("\n") + draw.choice(['"', "\r", "\x85", "\u2028", ",,,,", "\\", "'"]) + "\n"
    elif change == 6:
        lines[0], lines[place] = lines[place], lines[0]
    elif change == 7:
        lines = lines * draw.choice([2, 50])
    encoding = draw.choice(["utf-8"] * 6 + ["utf-16", "utf-8-sig", "utf-16-be", "cp1252", "shift_jis"])
    data = "".join(lines).encode(encoding, "surrogatepass" if encoding.startswith("utf") else "replace")
    return mutate_bytes(draw, data) if change >= 8 else data


def replace_file(draw: random.Random, path: Path) -> None:
    """Something else than a file in its place."""
    content = path.read_bytes()
    path.unlink()
    change = draw.randrange(7)
    if change == 0:
        path.mkdir()
    elif change == 1:
        path.symlink_to(path.name)
    elif change == 2:
        path.symlink_to("nowhere")
    elif change == 3:
        path.symlink_to("/etc/passwd")
    elif change == 4:
        path.write_bytes(b"")
    elif change == 5:
        path.with_name(path.name.upper()).write_bytes(content)
    # else the file is missing


def mutate_file(draw: random.Random, path: Path) -> None:
    """Change a file in a way that fits its format."""
    if draw.random() < 0.08:
        replace_file(draw, path)
        return
    data = path.read_bytes()
    changes: dict[str, Callable[[], bytes]] = {
        ".json": lambda: to_json(draw, mutate_value(draw, json.loads(data))),
        ".jsonl": lambda: _mutate_json_lines(draw, data),
        ".safetensors": lambda: _mutate_safetensors(draw, data),
        ".csv": lambda: mutate_text(draw, data.decode()),
        ".tsv": lambda: mutate_text(draw, data.decode()),
        ".txt": lambda: mutate_text(draw, data.decode()),
        ".conll": lambda: mutate_text(draw, data.decode()),
    }
    change = changes.get(path.suffix)
    path.write_bytes(mutate_bytes(draw, data) if change is None or draw.random() < 0.15 else change())


def _mutate_json_lines(draw: random.Random, data: bytes) -> bytes:
    lines = [json.loads(line) for line in data.splitlines()]
    place = draw.randrange(len(lines))
    lines[place] = mutate_value(draw, lines[place])
    return (
        mutate_text(draw, "".join(json.dumps(line) + "\n" for line in lines))
        if draw.random() < 0.2
        else b"".join(to_json(draw, line).replace(b"\n", b" ") + b"\n" for line in lines)
    )


def _mutate_safetensors(draw: random.Random, data: bytes) -> bytes:
    """Another header, with the right or a wrong length, or other tensors."""
    length = int.from_bytes(data[:8], "little")
    header = mutate_value(draw, json.loads(data[8 : 8 + length]))
    text = json.dumps(header).encode("utf-8", "replace")
    size = draw.choice([len(text)] * 8 + [0, 2**63, 2**64 - 1, len(text) + 1, 10**9])
    return size.to_bytes(8, "little") + text + data[8 + length :]
