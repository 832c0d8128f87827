"""Tables at several widths, and strings with control characters."""

from __future__ import annotations

import io
import json

import pytest

from bertblocks.cli.output import make_table, print_json, print_table
from bertblocks.core.console import SafeConsole, make_console, printable

NUMBERS = ["1,031,314,112", "149,655,232", "5,440"]


def show(width: int) -> list[str]:
    console = SafeConsole(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    table = make_table(["name", "description", "parameters", "FLOPs per token"], text_columns=2)
    for number in NUMBERS:
        table.add_row(f"model-of-{number}", "an encoder with a long description of many words", number, "103.81 M")
    print_table(console, "Models", table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_tables_fit_and_keep_every_number(width: int) -> None:
    lines = show(width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for number in NUMBERS:
        assert f"model-of-{number}" in words
        assert number in words
    assert words.count("103.81") == len(NUMBERS)
    assert words.count("description") >= len(NUMBERS)
    assert not any("…" in line for line in lines)


def test_narrow_tables_have_a_line_for_each_cell() -> None:
    assert show(40)[2:4] == ["model-of-1,031,314,112", "  description      an encoder with a    "]
    assert show(200)[2].split() == ["name", "description", "parameters", "FLOPs", "per", "token"]


def test_control_characters_are_escaped_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[31mred\x1b]0;title\x07\x9b2J\x7f[bold]b"
    console = SafeConsole(file=io.StringIO(), width=200, force_terminal=True)
    table = make_table([evil, evil], text_columns=2)
    table.add_row(evil, evil)
    print_table(console, evil, table)
    console.print(evil)
    console.print(f"\n{evil}", style="dim")
    written = console.file.getvalue()  # type: ignore[attr-defined]
    for style in ("\x1b[1m", "\x1b[2m", "\x1b[0m"):  # rich's own
        written = written.replace(style, "")
    assert not set(written) & set("\x1b\x07\x9b\x7f")
    assert written.count("a\\x1b[31mred") == 7
    assert "[bold]b" in written, "not markup"
    print_json({evil: [evil]})
    text = capsys.readouterr().out
    assert json.loads(text) == {evil: [evil]}
    assert not set(text) & set("\x1b\x07\x9b\x7f")
    assert printable("tab\tand\nnewline") == "tab\tand\nnewline"


def test_a_program_reads_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    make_console(stderr=True).print("step 1/2 | " + "word " * 100 + "[bold]")
    assert capsys.readouterr().err.count("\n") == 1
