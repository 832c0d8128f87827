"""Model cards: huggingface_hub reads them, their code runs, and a card that someone wrote is never replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from bertblocks import BertBlocksForMaskedLM, BertBlocksForSequenceClassification, BertBlocksModel
from bertblocks.checkpoints.convert import convert
from bertblocks.checkpoints.merge import merge
from bertblocks.checkpoints.quantize import quantize_folder
from bertblocks.reports.model_card import CARD, Card, is_written_by_user, read_metadata, write_card
from tests.helpers import tiny_config
from tests.reports.cards import check
from tests.small_tokenizers import wrap

EVIL = "a|b`c`\n---\n# <b>"
WRITTEN = "---\nlicense: mit\nlanguage: de\ntags: [mine]\n---\n# My model\n\nWritten by hand.\n"


def save(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    wrap("wordpiece").save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save(tmp_path / "source", BertBlocksForMaskedLM(tiny_config(vocab_size=len(wrap("wordpiece")))))


def test_a_converted_model_has_a_card(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(source, tmp_path / "out")
    card = check(tmp_path / "out", monkeypatch)
    assert (card.data.pipeline_tag, card.data.license) == ("fill-mask", "unknown")
    assert "converted by BertBlocks" in card.text


def test_a_conversion_keeps_the_card_of_its_source(source: Path, tmp_path: Path) -> None:
    (source / CARD).write_text(WRITTEN)
    done = convert(source, tmp_path / "out")
    assert (tmp_path / "out" / CARD).read_text() == WRITTEN
    assert CARD in done.carried


def test_a_quantized_model_has_its_own_card_with_the_metadata_of_its_source(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / CARD).write_text(WRITTEN)
    done = quantize_folder(source, tmp_path / "out", min_cosine=0.0)
    card = check(tmp_path / "out", monkeypatch)
    assert (card.data.license, card.data.language, card.data.tags) == ("mit", "de", ["bertblocks", "mine"])
    scores = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert scores["cosine_mean"] == pytest.approx(done.accuracy.mean_cosine, abs=1e-6)
    assert CARD not in done.carried
    assert (source / CARD).read_text() == WRITTEN


def test_a_merged_model_has_a_card(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    other = save(tmp_path / "other", BertBlocksForMaskedLM(tiny_config(vocab_size=len(wrap("wordpiece")))))
    merge([source, other], tmp_path / "out", [1, 3])
    card = check(tmp_path / "out", monkeypatch)
    assert "merge" in card.data.tags
    assert "| `share of other` | `0.75` |" in card.content


def test_metadata_name_the_base_model_of_a_hub_id(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    save(folder, BertBlocksForSequenceClassification(tiny_config(vocab_size=len(wrap("wordpiece")))))
    cached = tmp_path / "models--org--base" / "snapshots" / "0123"
    cached.mkdir(parents=True)
    (cached / CARD).write_text("---\nlicense: apache-2.0\nbase_model: other/older\n---\n")
    write_card(
        folder, Card("n", "s", [cached], "finetune", ["glue"], ["glue", str(tmp_path)], {"accuracy": 0.5}, "glue")
    )
    data = ModelCard.load(folder / CARD).data
    assert (data.base_model, data.base_model_relation, data.license) == (["org/base"], "finetune", "apache-2.0")
    assert (data.datasets, data.pipeline_tag) == (["glue"], "text-classification")
    assert [(r.metric_type, r.metric_value, r.dataset_name) for r in data.eval_results] == [("accuracy", 0.5, "glue")]


def test_any_text_leaves_the_card_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "out", BertBlocksModel(tiny_config(vocab_size=len(wrap("wordpiece")))))
    write_card(
        tmp_path / "out",
        Card(EVIL, EVIL, [], None, [EVIL], [], {EVIL: 1.0, "nan": float("nan")}, EVIL, [EVIL], {EVIL: EVIL}),
    )
    card = check(tmp_path / "out", monkeypatch)
    assert card.data.model_name == EVIL
    assert [result.dataset_name for result in card.data.eval_results] == [EVIL]


def test_a_card_that_someone_changed_is_kept(source: Path, tmp_path: Path) -> None:
    write_card(source, Card("first", "A model."))
    assert not is_written_by_user(source / CARD)
    write_card(source, Card("second", "A model."))
    text = (source / CARD).read_text()
    assert "# second" in text
    (source / CARD).write_text(text.replace("A model.", "My model."))
    assert is_written_by_user(source / CARD)
    write_card(source, Card("third", "A model."))
    assert "My model." in (source / CARD).read_text()
    new = save(tmp_path / "new", BertBlocksModel(tiny_config(vocab_size=len(wrap("wordpiece")))))
    write_card(new, Card("fourth", "A model."), target=source)
    assert "My model." in (new / CARD).read_text()


@pytest.mark.parametrize("text", ["", "no metadata", "---\n[1, 2]\n---\n", "---\n{broken\n---\n", "\0"])
def test_cards_of_others_may_hold_anything(tmp_path: Path, text: str) -> None:
    (tmp_path / CARD).write_text(text)
    assert read_metadata(tmp_path) == {}


def test_a_checkpoint_without_a_tokenizer_has_code_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BertBlocksModel(tiny_config()).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out")
    check(tmp_path / "out", monkeypatch)
