"""One reader for every format: endings, delimiters, quotes, encodings, compression, pipes, and endless lines."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
import threading
import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from bertblocks.text import files
from bertblocks.text.inputs import Roles, read_inputs
from bertblocks.text.records import DataError, ReadOptions
from bertblocks.text.tables import read_records

ROWS = [{"text": "fine, really", "label": "a"}, {"text": "caf\u00e9 \u56db", "label": "b"}]
TEXTS = [row["text"] for row in ROWS]
TEXT = Roles([("text",)])


def write_csv(
    delimiter: Any = ",", quote: Any = '"', quoting: Any = csv.QUOTE_MINIMAL, encoding: Any = "utf-8", rows: Any = ROWS
) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ["text", "label"], delimiter=delimiter, quotechar=quote, quoting=quoting)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode(encoding)


def json_lines() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def arrow_bytes(write: Any) -> bytes:
    sink = io.BytesIO()
    write(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


def write_stream(table: Any, sink: Any) -> None:
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


CONTENTS = {
    "a.CSV": write_csv(),
    "a.csv": write_csv(";"),
    "b.csv": write_csv("|"),
    "c.csv": write_csv("\t"),
    "d.csv": write_csv(quote="'", quoting=csv.QUOTE_ALL),
    "e.csv": write_csv(encoding="utf-16"),
    "f.csv": write_csv(encoding="utf-8-sig"),
    "a.tsv": write_csv("\t"),
    "b.tsv": write_csv("\t", quoting=csv.QUOTE_ALL),
    "a.ndjson": json_lines(),
    "a.JSONL": json_lines(),
    "a.Json": json.dumps(ROWS).encode(),
    "a.parquet": arrow_bytes(parquet.write_table),
    "a.feather": arrow_bytes(feather.write_feather),
    "a.arrow": arrow_bytes(write_stream),
    "a.csv.gz": gzip.compress(write_csv(";")),
    "a.jsonl.GZ": gzip.compress(json_lines()),
    "a.ndjson.zst": pa.compress(json_lines(), "zstd", asbytes=True),
    "a.feather.gz": gzip.compress(arrow_bytes(feather.write_feather)),
    "no_ending_jsonl": json_lines(),
    "no_ending_gz": gzip.compress(json_lines()),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_every_format_gives_the_same_inputs_and_task_data(tmp_path: Path, name: Any) -> None:
    path = tmp_path / name
    path.write_bytes(CONTENTS[name])
    inputs = list(read_inputs([path], TEXT))
    assert [record.value for record in inputs] == TEXTS
    assert [record.columns for record in inputs] == ROWS
    assert read_records(path).rows == ROWS


def test_a_csv_without_a_file_ending_needs_a_format(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(write_csv())
    inputs = read_inputs([path], TEXT)
    assert "read as text; name another format with format=csv" in inputs.notes[0]
    assert [record.value for record in read_inputs([path], TEXT, options=ReadOptions(format="csv"))] == TEXTS


def test_detection_is_shown_and_can_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("text;label\ncaf\u00e9, oui;a\n".encode("latin-1"))
    inputs = read_inputs([path], TEXT)
    assert inputs.notes == [f"{path}: text=text (delimiter semicolon, double quotes, encoding cp1252)"]
    assert [record.value for record in inputs] == ["caf\u00e9, oui"]
    other = read_inputs([path], TEXT, options=ReadOptions.parse(["delimiter=;", "encoding=cp1250"]))
    assert [record.value for record in other] == ["caf\u00e9, oui"]
    whole = read_inputs([path], TEXT, options=ReadOptions.parse(["delimiter=#", "header=no", "encoding=latin-1"]))
    assert [record.value for record in whole] == ["text;label", "caf\u00e9, oui;a"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["delimeter=,"], r"key of format, .* \(did you mean 'delimiter'\?\)"),
        (["delimiter=ab"], "must be one character"),
        (["encoding=latin-99"], "'latin-99', which Python does not know"),
        (["format=word"], "format is 'word'; it must be text, csv"),
        (["header=maybe"], "must be yes or no"),
    ],
)
def test_invalid_read_options_raise(settings: Any, message: Any) -> None:
    with pytest.raises(DataError, match=message):
        ReadOptions.parse(settings)


def test_quotes_in_tsv_files_are_text(tmp_path: Path) -> None:
    """GLUE's files do not quote fields: a quote at the start of a sentence belongs to it."""
    path = tmp_path / "a.tsv"
    path.write_text('sentence\tlabel\n"So it goes," he said.\t1\n"Yes."\t0\n')
    assert [record.value for record in read_inputs([path], TEXT)] == ['"So it goes," he said.', '"Yes."']
    path.write_text('sentence\tlabel\n"two\nlines"\t1\nplain\t0\n')
    assert [record.value for record in read_inputs([path], TEXT)] == ["two\nlines", "plain"]


def test_several_files_globs_and_folders(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"part{number}.jsonl").write_text(json.dumps({"text": f"text {number}", "label": number}) + "\n")
    expected = ["text 1", "text 2"]
    for sources in ([tmp_path], [f"{tmp_path}/part*.jsonl"], [tmp_path / "part1.jsonl", tmp_path / "part2.jsonl"]):
        assert [record.value for record in read_inputs(sources, TEXT)] == expected
    records = read_records(f"{tmp_path}/part*.jsonl")
    assert records.column("text") == expected
    assert records.place(1) == f"{tmp_path}/part2.jsonl line 1"
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"The folder .*empty has no \.txt, \.jsonl"):
        read_inputs([tmp_path / "empty"], TEXT)
    with pytest.raises(DataError, match=r"gone\.csv: no such file or folder"):
        read_inputs([tmp_path / "gone.csv"], TEXT)


def test_columns_are_found_in_any_case_and_inside_objects(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("ID,Text\n1,fine\n")
    assert next(iter(read_inputs([tmp_path / "a.csv"], TEXT))).value == "fine"
    nested = [{"review": {"body": "good"}, "text": "title"}]
    (tmp_path / "a.jsonl").write_text(json.dumps(nested[0]) + "\n")
    (tmp_path / "a.json").write_text(json.dumps(nested))
    parquet.write_table(pa.Table.from_pylist(nested), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "a.parquet"):
        inputs = read_inputs([tmp_path / name], TEXT, {"text": "review.body"})
        assert [record.value for record in inputs] == ["good"], name


def test_a_pipe_of_process_substitution_is_read(tmp_path: Path) -> None:
    """Bash passes `<(command)` as /dev/fd/63, which is neither a regular file nor has an ending."""
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as file:
            file.write(json_lines())

    thread = threading.Thread(target=write)
    thread.start()
    try:
        inputs = read_inputs([f"/dev/fd/{reading}"], TEXT)
        assert [record.value for record in inputs] == TEXTS
    finally:
        thread.join()
        os.close(reading)


def test_xlsx_without_openpyxl_raises_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.xlsx"
    path.write_bytes(b"PK\x03\x04")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(DataError, match=r"a\.xlsx: reading \.xlsx needs openpyxl; install it with `pip install"):
        read_inputs([path], TEXT)


def write_workbook(path: Path, *rows: tuple[Any, ...]) -> Path:
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    book.create_sheet("notes").append(("not", "this"))
    book.save(path)
    return path


def test_a_real_workbook(tmp_path: Path) -> None:
    day = datetime(2024, 5, 1)
    rows = [("Text", "label", None, "day"), ("fine", 1, "x", day), (None, None, None, None), ("bad", 0, None, day)]
    path = write_workbook(tmp_path / "a.XLSX", *rows)
    inputs = list(read_inputs([path], TEXT))
    assert [(record.value, record.location) for record in inputs] == [
        ("fine", f"{path} row 2"),
        ("bad", f"{path} row 4"),
    ]
    assert [record.columns["label"] for record in inputs] == [1, 0]
    assert inputs[0].columns["column3"] == "x"
    assert inputs[0].columns["day"] == day


def test_rows_of_zeros_are_rows(tmp_path: Path) -> None:
    table = read_records(write_workbook(tmp_path / "a.xlsx", ("text", "label"), (0, 0), (False, 2)))
    assert [(row["text"], row["label"]) for row in table.rows] == [(0, 0), (False, 2)]


def test_a_damaged_workbook_gives_one_sentence(tmp_path: Path) -> None:
    whole = write_workbook(tmp_path / "a.xlsx", ("text",), ("fine",)).read_bytes()
    with zipfile.ZipFile(tmp_path / "a.xlsx") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "torn.xlsx", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content[: len(content) // 2] if "sheet1" in name else content)
    (tmp_path / "half.xlsx").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "other.xlsx").write_bytes(b"PK\x03\x04")
    for name in ("torn", "half", "other"):
        with pytest.raises(DataError, match=rf"{name}\.xlsx: the file is not an \.xlsx workbook, or it is damaged"):
            list(read_inputs([tmp_path / f"{name}.xlsx"], TEXT))


def test_a_workbook_that_expands_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workbook = write_workbook(tmp_path / "a.xlsx", ("text",), ("fine",))
    monkeypatch.setattr("bertblocks.text.workbooks.MAX_WHOLE_BYTES", 2**20)
    with zipfile.ZipFile(workbook, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/extra.xml", b" " * 2**21)
    with pytest.raises(DataError, match="the workbook has more than 1 MiB"):
        list(read_inputs([workbook], TEXT))


def arrow_file(path: Path) -> bytes:
    table = pa.Table.from_pylist([{"text": f"text {number}", "words": ["a", "b"]} for number in range(20)])
    feather.write_feather(table, path, compression="uncompressed")
    return path.read_bytes()


def test_a_damaged_arrow_file_gives_one_sentence(tmp_path: Path) -> None:
    """Offsets that point outside a buffer once ended the process with a segmentation fault."""
    path = tmp_path / "a.arrow"
    intact = arrow_file(path)
    damaged = 0
    for place in range(0, len(intact), 7):
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 255]) + intact[place + 1 :])
        try:
            list(read_inputs([path], TEXT))
        except DataError:
            damaged += 1
    assert damaged > 20


def test_each_wrong_path_has_its_own_sentence(tmp_path: Path) -> None:
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "gone.csv")
    for read in (lambda: read_inputs([link], TEXT), lambda: read_records(link)):
        with pytest.raises(DataError, match=r"link\.csv:? is a link to .*gone\.csv, which does not exist"):
            read()
    with pytest.raises(DataError, match="no such file or folder"):
        read_inputs([tmp_path / "gone.csv"], TEXT)
    with pytest.raises(DataError, match=r"The folder .* has no \.txt"):
        read_inputs([tmp_path], TEXT)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"text": "half \\ud800"}\n',
            r"a\.jsonl line 1: the text holds half of a surrogate pair \(\\ud800\)",
        ),
        ("a.json", '[{"text": "half \\ud800"}]', r"a\.json record 1: the text holds half of a surrogate pair"),
        ("a.jsonl", "[" * 100_000, "line 1: the JSON is nested too deeply"),
        ("a.json", "[" * 100_000, "the JSON is nested too deeply"),
        ("a.jsonl", '{"text": null}\n', "line 1: None is not a text"),
    ],
)
def test_values_that_are_not_text_raise_an_error_that_names_them(
    tmp_path: Path, name: Any, content: Any, message: Any
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        list(read_inputs([tmp_path / name], TEXT))


def test_bad_records_can_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": null}\noops\n{"body": "x"}\n{"text": "two"}\n')
    bad: list[Any] = []
    inputs = read_inputs([tmp_path / "a.jsonl"], TEXT, on_bad=bad.append)
    assert [record.value for record in inputs] == ["one", "two"]
    assert [record.location.number for record in bad] == [2, 3, 4]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.txt.gz"])
def test_an_endless_line_is_a_bad_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any) -> None:
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 1000)
    lines = ['{"text": "good"}', '{"text": "' + "x" * 5000 + '"}', '{"text": "last"}']
    if "csv" in name:
        lines = ["text,label", "good,1", "x" * 5000 + ",1", "last,1"]
    if "txt" in name:
        lines = ["good", "x" * 5000, "last"]
    (tmp_path / name).write_bytes(gzip.compress("\n".join(lines).encode()))
    bad: list[Any] = []
    inputs = read_inputs([tmp_path / name], TEXT, on_bad=bad.append)
    assert [record.value for record in inputs] == ["good", "last"]
    assert [(record.location.number, record.reason) for record in bad] == [
        (len(lines) - 1, "the line is longer than 0 MiB")
    ]


def test_the_size_of_compressed_files_read_at_once_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_WHOLE_BYTES", 2**20)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b"[" + b" " * 2**21 + b"]"))
    with pytest.raises(DataError, match=r"a\.json\.gz: the file has more than 1 MiB and has to be read at once"):
        list(read_inputs([tmp_path / "a.json.gz"], TEXT))


def test_fine_tuning_settings_control_how_a_table_is_read(tmp_path: Path) -> None:
    from bertblocks.tasks.settings import ClassifySettings

    settings = ClassifySettings(delimiter=";", quote="none", encoding="latin-1", header=False)
    (tmp_path / "a.csv").write_bytes('"caf\u00e9;x\n"oui";y\n'.encode("latin-1"))
    records = read_records(tmp_path / "a.csv", settings.read_options)
    assert records.rows == [{"column1": '"caf\u00e9', "column2": "x"}, {"column1": '"oui"', "column2": "y"}]
