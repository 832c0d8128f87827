"""Tables as files: CSV with all values, and LaTeX and Markdown as people read them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

#: Characters that LaTeX reads as commands.
LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"},
}


def csv_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Example:
    >>> csv_table(["name", "value"], [["a, b", None]])
    'name,value\\n"a, b",\\n'
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([columns, *rows])
    return file.getvalue()


def latex_table(columns: Sequence[str], rows: Iterable[Sequence[str]], alignment: str) -> str:
    """A table for the package booktabs. `alignment` has a letter for each column, such as "llr"."""
    lines = [" & ".join(map(_escape_latex, line)) + r" \\" for line in [columns, *rows]]
    body = "\n".join([r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"])
    return f"\\begin{{tabular}}{{{alignment}}}\n{body}\n\\end{{tabular}}\n"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], alignment: str) -> str:
    """A table of GitHub's Markdown, with the same `alignment` as for LaTeX.

    Example:
        >>> print(markdown_table(["name", "value"], [["a|b", "1"]], "lr"), end="")
        | name | value |
        | --- | ---: |
        | a\\|b | 1 |
    """
    ruler = ["---:" if letter == "r" else "---" for letter in alignment]
    lines = [columns, ruler, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _escape_latex(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)
