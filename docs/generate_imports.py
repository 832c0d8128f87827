"""Draws the import graph between rooms in docs/architecture.md from the code.

`python docs/generate_imports.py` rewrites the graph. Tests check that it is up to date and that imports point one way.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "bertblocks"
TARGET = ROOT / "docs" / "architecture.md"
#: The packages of bertblocks in order. Each imports only packages above it.
ROOMS = [
    "core",
    "reports",
    "nn",
    "config",
    "models",
    "analysis",
    "text",
    "checkpoints",
    "data",
    "objectives",
    "inference",
    "tasks",
    "search",
    "serve",
    "bulk",
    "training",
    "evaluation",
    "lab",
    "flax",
    "cli",
]
BEGIN = "<!-- The graph below is written by docs/generate_imports.py. -->\n"
END = "<!-- End of the graph. -->\n"


def module_files() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imported_names(path: Path) -> set[str]:
    """Modules and names of bertblocks that a file imports, inside functions too, except under TYPE_CHECKING."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    for_typing = {
        id(inner)
        for node in ast.walk(module)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    names = set()
    for node in ast.walk(module):
        if id(node) in for_typing:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "bertblocks":
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "bertblocks"}
    return names


def room_of(name: str) -> str | None:
    """The room of a dotted name, or None for the package's own files."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else None


def room_imports() -> dict[str, set[str]]:
    """The other rooms that each room imports."""
    graph: dict[str, set[str]] = {room: set() for room in ROOMS}
    for name, path in module_files().items():
        if room := room_of(name):
            graph[room] |= {other for other in map(room_of, imported_names(path)) if other and other != room}
    return graph


def without_implied_edges(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without edges that follow from others. `graph` has no cycle."""
    reachable: dict[str, set[str]] = {}

    def reach(room: str) -> set[str]:
        if room not in reachable:
            reachable[room] = graph[room].union(*(reach(other) for other in graph[room]))
        return reachable[room]

    return {room: others - set().union(*(reach(other) for other in others)) for room, others in graph.items()}


def draw() -> str:
    edges = without_implied_edges(room_imports())
    lines = [f"    {room} --> {other}" for room in reversed(ROOMS) for other in sorted(edges[room], key=ROOMS.index)]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```", ""])


def render() -> str:
    """The page with the graph as the code has it now."""
    page = TARGET.read_text(encoding="utf-8")
    pattern = re.compile(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", re.DOTALL)
    page, count = pattern.subn(lambda _: f"\n{draw()}\n", page)
    if count != 1:
        raise ValueError(f"{TARGET.name} must hold the two comments around the graph once; found {count}")
    return page


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(f"Wrote {TARGET.relative_to(ROOT)}.")
