"""Reading task data: tables, CoNLL, SQuAD, tag schemes, and every kind of bad file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities

from bertblocks.tasks.labels import find_labels, split_labels
from bertblocks.text.columns import choose_columns
from bertblocks.text.conll import read_conll
from bertblocks.text.hub_datasets import load_dataset
from bertblocks.text.records import DataError, ReadOptions
from bertblocks.text.squad import read_questions
from bertblocks.text.tables import Records, read_records
from bertblocks.text.tag_schemes import entities, find_scheme, to_bio, write_tags

cells = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# ---------------------------------------------------------------------- tables


@given(rows=st.lists(st.tuples(cells, cells), min_size=1, max_size=8))
def test_csv_is_read_as_the_csv_module_writes_it(tmp_path_factory: pytest.TempPathFactory, rows: Any) -> None:
    path = tmp_path_factory.mktemp("csv") / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    records = read_records(path)
    assert records.columns == ["text", "label"]
    assert [(row["text"], row["label"]) for row in records.rows] == rows


def test_every_file_format_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"text": "one, two", "label": "a"}, {"text": "three", "label": "b"}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    write(tmp_path / "t.csv", 'text,label\n"one, two",a\nthree,b\n')
    write(tmp_path / "s.csv", "text;label\none, two;a\nthree;b\n".replace("one, two", '"one, two"'))
    write(tmp_path / "t.tsv", "text\tlabel\none, two\ta\nthree\tb\n")
    write(tmp_path / "t.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write(tmp_path / "t.json", json.dumps(rows))
    write(tmp_path / "d.json", json.dumps({"data": rows}))
    for name in ("t.parquet", "t.csv", "t.tsv", "t.jsonl", "t.json", "d.json"):
        assert read_records(tmp_path / name).rows == rows, name


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    table = datasets.Dataset.from_dict({"text": ["x", "y"], "label": [1, 0]}, features=features)
    table.save_to_disk(tmp_path / "saved")
    assert read_records(tmp_path / "saved").column("label") == ["yes", "no"]


def test_headers_are_detected(tmp_path: Path) -> None:
    def header(content: str) -> bool:
        return read_records(write(tmp_path / "t.csv", content)).has_header

    assert header("text,label\nfine,1\n")
    assert header("premise,similarity_of_both\na b,1.5\nc d,2\n")
    assert not header("A man dances.,A man is dancing.,5.0\nA dog.,A cat.,1.0\n")
    assert not header("good film,positive\nbad film,negative\n")


def test_columns_are_guessed_by_name_then_by_content() -> None:
    def choose(columns: Any, rows: Any, **given: Any) -> Any:
        table = Records(
            "t.csv",
            columns,
            [dict(zip(columns, row, strict=True)) for row in rows],
            list(range(len(rows))),
            has_header=not columns[0].startswith("column"),
        )
        return choose_columns(table, ["text", "label"], ["text_pair"], given)

    assert choose(["question", "sentence", "label"], [("a", "b", "1")]) == {
        "text": "question",
        "label": "label",
        "text_pair": "sentence",
    }
    unnamed = choose(["column1", "column2", "column3"], [("a b", "c d", "5.0"), ("e f", "g h", "1")])
    assert unnamed == {"text": "column1", "text_pair": "column2", "label": "column3"}
    # under a header a second text goes by its name alone, and the text is the longest
    reviews = [("r1", "what good fun", "2020-01-01", "5"), ("r2", "such a bad joke", "2020-01-02", "1")]
    assert choose(["review_id", "body", "date", "label"], reviews) == {"label": "label", "text": "body"}
    assert choose(["text", "sentence2", "label"], [("a", "b", "1")], text_pair="") == {"text": "text", "label": "label"}
    assert choose(["text", "label", "mood"], [("a", "b", "c")], label="mood") == {"text": "text", "label": "mood"}
    with pytest.raises(DataError, match=r"no column 'lable' for label.*did you mean 'label'"):
        choose(["text", "label"], [("a", "b")], label="lable")
    with pytest.raises(DataError, match=r"no column looks like label.*the columns are text"):
        choose(["text"], [("a",)])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "", "t.csv: the file is empty"),
        ("t.csv", "text,label\n", "no records"),
        ("t.csv", "text,label\na,b\nc\n", "line 3: the row has 1 columns, the first row has 2"),
        ("t.csv", 'text,label\na,b\n"c,d\n', "line 3: the row cannot be read as csv"),
        ("t.csv", "text,text\na,b\n", "line 1: the column 'text' is named twice"),
        ("t.jsonl", '{"text": "a"}\n{"text": \n', "line 2: the line is not JSON"),
        ("t.jsonl", "[1, 2]\n", "line 1: .* is not an object"),
        ("t.json", "{}", "must hold a list of objects"),
        ("t.json", '[{"a": 1},\n oops]', "line 2: the file is not JSON"),
        ("t.parquet", "not parquet", "the file is not parquet"),
        ("t.docx", "x", "'.docx' is not one of .jsonl, .csv"),
    ],
)
def test_bad_tables_raise_an_error_that_names_file_and_line(
    tmp_path: Path, name: Any, content: Any, message: Any
) -> None:
    with pytest.raises(DataError, match=message):
        read_records(write(tmp_path / name, content))


def test_encoding_is_detected_and_can_be_given(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", b"text,label\ncaf\xe9,b\n")
    found = read_records(path)
    assert (found.rows, found.details) == ([{"text": "café", "label": "b"}], "encoding cp1252")
    with pytest.raises(DataError, match="line 2: byte 0xe9 is not UTF-8"):
        read_records(path, ReadOptions(encoding="utf-8"))


def test_a_missing_file_raises_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.csv: no such file"):
        read_records(tmp_path / "gone.csv")


# ---------------------------------------------------------------------- tags

kinds = st.sampled_from(["PER", "LOC"])
bio_tags = st.lists(st.one_of(st.just("O"), st.builds("{}-{}".format, st.sampled_from("BI"), kinds)), max_size=12)


@given(tags=bio_tags)
def test_entities_equal_seqeval(tags: Any) -> None:
    ours = [(entity.kind, entity.start, entity.end - 1) for entity in entities(tags)]
    assert ours == get_entities(tags)


@given(tags=bio_tags, scheme=st.sampled_from(["bio", "iob1", "bioes"]))
def test_tag_schemes_convert_without_loss(tags: Any, scheme: Any) -> None:
    found = entities(tags)
    written = write_tags(found, len(tags), scheme)
    assert entities(written) == found
    bio, repaired = to_bio(written, scheme)
    assert entities(bio) == found
    assert repaired == 0


def test_invalid_tags_are_repaired_and_counted() -> None:
    assert to_bio(["I-PER", "I-PER", "O"], "bio") == (["B-PER", "I-PER", "O"], 1)
    assert to_bio(["B-PER", "O", "I-PER"], "iob1") == (["B-PER", "O", "B-PER"], 1)
    assert to_bio(["B-PER", "O", "E-LOC", "S-LOC"], "bioes") == (["B-PER", "O", "B-LOC", "B-LOC"], 2)
    assert to_bio(["B-PER", "I-PER", "L-PER", "U-LOC"], "bioes") == (["B-PER", "I-PER", "I-PER", "B-LOC"], 0)


def test_tag_schemes_are_detected() -> None:
    assert find_scheme([["B-PER", "I-PER", "O"], ["B-LOC"]]) == "bio"
    assert find_scheme([["I-PER", "B-PER", "O"]]) == "iob1"
    assert find_scheme([["B-PER", "E-PER", "S-LOC"]]) == "bioes"
    assert find_scheme([["NOUN", "O"]]) == "plain"
    assert find_scheme([["O", "O"]]) == "plain"


def test_conllu_skips_ranges_empty_words_and_comments(tmp_path: Path) -> None:
    row = "{}\t{}\t_\t{}\tX\t_\t_\t_\t_\t_\n"
    text = "# text = a\n" + row.format("1-2", "don't", "_") + row.format(1, "do", "AUX") + row.format(2, "n't", "PART")
    text += row.format("2.1", "ghost", "NOUN") + "\n" + row.format(1, "#", "SYM")
    sentences = read_conll(write(tmp_path / "t.conllu", text))
    assert [(s.words, s.tags) for s in sentences] == [(["do", "n't"], ["AUX", "PART"]), (["#"], ["SYM"])]
    assert read_conll(tmp_path / "t.conllu", "xpos")[0].tags == ["X", "X"]
    with pytest.raises(DataError, match=r"column 'upso' is not one of CoNLL-U's.*did you mean 'upos'"):
        read_conll(tmp_path / "t.conllu", "upso")


def test_conll_columns_and_ragged_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "t.conll", "-DOCSTART- O O\n\nEU NNP B-ORG\nrejects VBZ O\n\n")
    assert read_conll(path)[0].tags == ["B-ORG", "O"]
    assert read_conll(path, "2")[0].tags == ["NNP", "VBZ"]
    with pytest.raises(DataError, match="line 1: the row has 3 columns and no column 7"):
        read_conll(write(path, "EU NNP B-ORG\n"), "7")
    with pytest.raises(DataError, match="line 2: the row has 2 columns, not 3"):
        read_conll(write(path, "EU NNP B-ORG\nrejects VBZ\n"))
    with pytest.raises(DataError, match="no sentences"):
        read_conll(write(path, "\n\n"))


# ---------------------------------------------------------------------- questions


def squad(answers: Any, **entry: Any) -> Any:
    paragraph = {"context": "Ada wrote it.", "qas": [{"id": "1", "question": "Who?", "answers": answers, **entry}]}
    return json.dumps({"data": [{"paragraphs": [paragraph]}]})


def test_squad_and_flat_records_give_the_same_examples(tmp_path: Path) -> None:
    nested = read_questions(write(tmp_path / "a.json", squad([{"text": "Ada", "answer_start": 0}])))[0]
    flat = {"id": "1", "question": "Who?", "context": "Ada wrote it."}
    for answers in ({"text": ["Ada"], "answer_start": [0]}, [{"text": "Ada", "answer_start": 0}]):
        row = read_questions(write(tmp_path / "a.jsonl", json.dumps(flat | {"answers": answers})))[0]
        assert (row.id, row.question, row.context, row.answers) == ("1", "Who?", "Ada wrote it.", nested.answers)
    assert read_questions(write(tmp_path / "b.json", squad([], is_impossible=True)))[0].answers == []


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([{"text": "Ada", "answer_start": 1}], "'Ada' is not at answer_start 1, where the context has 'da '"),
        ([{"text": "Ada"}], "must have a text and a whole number answer_start"),
        ("Ada", "must be a list"),
    ],
)
def test_bad_answers_raise_an_error_that_names_them(tmp_path: Path, answers: Any, message: Any) -> None:
    with pytest.raises(DataError, match=r"article 1 paragraph 1 question '1'.*" + message):
        read_questions(write(tmp_path / "a.json", squad(answers)))


@pytest.mark.parametrize(
    ("header", "is_header"),
    [("review,sentiment", True), ("anchor,positive,negative", True), ("great film,positive", False)],
)
def test_two_known_column_names_make_a_header(tmp_path: Path, header: Any, is_header: Any) -> None:
    cells = ",".join(["some text"] * (header.count(",") + 1))
    assert read_records(write(tmp_path / "t.csv", f"{header}\n{cells}\n")).has_header is is_header
    named = read_records(write(tmp_path / "t.csv", "what,mood\nsome text,some text\n"), named=["mood"])
    assert named.columns == ["what", "mood"]


def test_only_newlines_end_tsv_lines(tmp_path: Path) -> None:
    records = read_records(write(tmp_path / "t.tsv", "text\tlabel\r\na\u2028b\x0cc\tx\r\nd\ty\r\n"))
    assert [row["text"] for row in records.rows] == ["a\u2028b\x0cc", "d"]
    assert records.place(1) == f"{tmp_path / 't.tsv'} line 3"


def test_labels_of_a_dataset_keep_their_order_and_lists_have_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["not_equivalent", "equivalent"])
    tag = datasets.ClassLabel(names=["O", "B-LOC"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label, "ner_tags": datasets.Sequence(tag)})
    rows = {"text": ["a", "b"], "label": [1, 0], "ner_tags": [[0, 1], [1]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    records = read_records(tmp_path / "saved")
    assert records.column("ner_tags") == [["O", "B-LOC"], ["B-LOC"]]
    assert find_labels(records, "label").names == ["not_equivalent", "equivalent"]


def test_lists_of_zeros_and_ones_are_not_labels(tmp_path: Path) -> None:
    records = read_records(write(tmp_path / "t.jsonl", '{"text": "a", "labels": [0, 1, 0]}\n'))
    with pytest.raises(DataError, match=r"line 1: the label '0' appears twice in \[0, 1, 0\]; .*list of names"):
        find_labels(records, "labels")
    assert split_labels(0, None, "here") == ["0"]


def test_answers_without_offsets_raise(tmp_path: Path) -> None:
    row = {"question": "who?", "context": "Ada wrote it.", "answers": {"text": ["Ada"], "answer_start": []}}
    with pytest.raises(DataError, match="line 1: there are 1 answers and 0 answer_start"):
        read_questions(write(tmp_path / "t.jsonl", json.dumps(row) + "\n"))


def test_half_of_a_surrogate_pair_raises_in_every_format(tmp_path: Path) -> None:
    paragraph = {"context": "half \ud800", "qas": [{"id": "1", "question": "Who?", "answers": []}]}
    path = write(tmp_path / "a.json", json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    with pytest.raises(DataError, match=r"question '1': the text holds half of a surrogate pair"):
        read_questions(path)
    words = {"words": ["half", "\ud800"], "tags": ["O", "O"]}
    with pytest.raises(DataError, match=r"line 1: the text holds half of a surrogate pair"):
        read_records(write(tmp_path / "a.jsonl", json.dumps(words)))


@pytest.mark.parametrize(
    ("name", "split", "expected"),
    [
        ("glue", None, ("glue", None, "train")),
        ("glue:mrpc", None, ("glue", "mrpc", "train")),
        ("glue:mrpc", "test", ("glue", "mrpc", "test")),
        ("glue:validation", None, ("glue", None, "validation")),
        ("glue:mrpc:validation", "test", ("glue", "mrpc", "validation")),
        ("glue::validation", None, ("glue", None, "validation")),
    ],
)
def test_dataset_names_are_parsed_by_one_rule(
    monkeypatch: pytest.MonkeyPatch, name: Any, split: Any, expected: Any
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda path: ["mrpc", "cola"])
    monkeypatch.setattr(datasets, "load_dataset", lambda path, config, split: (path, config, split))
    load_dataset.cache_clear()
    try:
        assert load_dataset(name, split) == expected
    finally:
        load_dataset.cache_clear()


def test_a_dataset_may_have_a_fixed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    versions: list[str] = []

    def config_names(path: str, revision: str) -> list[str]:
        versions.append(revision)
        return ["mrpc"]

    monkeypatch.setattr(datasets, "get_dataset_config_names", config_names)
    monkeypatch.setattr(datasets, "load_dataset", lambda path, config, split, revision: (path, config, split, revision))
    assert load_dataset("glue@a1b2:mrpc") == ("glue", "mrpc", "train", "a1b2")
    assert versions == ["a1b2"]
    load_dataset.cache_clear()


def test_splits_of_saved_datasets_are_named_after_the_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {split: datasets.Dataset.from_dict({"text": [split]}) for split in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert read_records(f"{tmp_path}/saved:test").column("text") == ["test"]
    assert read_records(tmp_path / "saved").column("text") == ["train"]
    with pytest.raises(DataError, match="`datasets` cannot load it"):
        read_records(f"{tmp_path}/saved:dev")
