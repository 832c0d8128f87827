"""The intact files that cases begin with: tiny checkpoints of several kinds, tables in every format, and recipes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import torch
import transformers
import yaml
from openpyxl import Workbook

from bertblocks import BertBlocksConfig, BertBlocksForMaskedDiffusion, BertBlocksForMaskedLM
from bertblocks.checkpoints.quantize import quantize_folder
from bertblocks.checkpoints.save import save_model
from tests.checkpoints.family_cases import FAMILY_CASES
from tests.small_tokenizers import wrap

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
TEXTS = ["plain words are here", "two leading trailing", "don't", "été 北京", "words words here", "plain trailing"]
LABELS = ["good", "bad", "neither"]
ROWS = [{"id": i, "text": text, "label": LABELS[i % 3], "score": i / 4} for i, text in enumerate(TEXTS * 2)]
TAGGED = [{"tokens": text.split(), "tags": ["B-PER", "I-PER", "O", "O"][: len(text.split())]} for text in TEXTS]
SPAN = "leading"
QUESTIONS = [
    {"id": str(i), "question": "who is here", "context": text, "answers": {"text": [SPAN], "answer_start": [4]}}
    for i, text in enumerate(["two leading trailing", "the leading words"] * 3)
]
PAIRS = [{"text_a": a, "text_b": b, "score": 0.5 * (a == b)} for a, b in zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True)]


def make_seeds(folder: Path) -> None:
    """Write everything below `folder`: models/, configs/, data/ and recipes/."""
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    for make in (_make_models, _make_configs, _make_data, _make_recipes):
        make(folder)


def _make_models(folder: Path) -> None:
    models = folder / "models"
    own = BertBlocksConfig.from_preset("mini", **SIZES, max_position_embeddings=64)
    labels = {"num_labels": 3, "id2label": dict(enumerate(LABELS)), "label2id": {n: i for i, n in enumerate(LABELS)}}
    tags = dict(enumerate(["O", "B-PER", "I-PER"]))
    bert = {**SIZES, "max_position_embeddings": 64}
    save_model(BertBlocksForMaskedLM(own), models / "own")
    save_model(BertBlocksForMaskedDiffusion(own), models / "diffusion")
    config = transformers.BertConfig(**bert, **labels)
    transformers.BertForSequenceClassification(config).save_pretrained(models / "classifier")
    config = transformers.BertConfig(**bert, id2label=tags, label2id={name: i for i, name in tags.items()})
    transformers.BertForTokenClassification(config).save_pretrained(models / "tagger")
    transformers.BertForQuestionAnswering(transformers.BertConfig(**bert)).save_pretrained(models / "reader")
    transformers.ModernBertForMaskedLM(FAMILY_CASES["modernbert"].make_config(**SIZES)).save_pretrained(
        models / "modern"
    )
    encoder = transformers.BertModel(transformers.BertConfig(**bert))
    encoder.save_pretrained(models / "sharded", max_shard_size="8KB")
    encoder.save_pretrained(models / "sentence")
    _write_sentence_files(models / "sentence")
    for model in models.iterdir():
        wrap("wordpiece").save_pretrained(model)
    quantize_folder(models / "classifier", models / "int8", min_cosine=0.0)


def _write_sentence_files(folder: Path) -> None:
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    kinds = [
        {"idx": int(index), "name": index, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, path, kind in modules
    ]
    files: dict[str, Any] = {
        "modules.json": kinds,
        "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "5.0.0", "transformers": "5.0.0", "pytorch": "2.0.0"},
            "prompts": {"query": "query: ", "document": "passage: "},
            "default_prompt_name": "document",
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {
            "word_embedding_dimension": SIZES["hidden_size"],
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "include_prompt": True,
        },
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2))
    (folder / "2_Normalize").mkdir()


def _make_configs(folder: Path) -> None:
    (folder / "configs").mkdir()
    for name, case in FAMILY_CASES.items():
        case.make_config().to_json_file(folder / "configs" / f"{name}.json", use_diff=False)
    for preset in ("mini", "modernbert-base"):
        BertBlocksConfig.from_preset(preset).to_json_file(folder / "configs" / f"{preset}.json")


def _make_data(folder: Path) -> None:
    data = folder / "data"
    data.mkdir()
    tables: dict[str, list[Any]] = {"rows": ROWS, "tagged": TAGGED, "questions": QUESTIONS, "pairs": PAIRS}
    for name, rows in tables.items():
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (data / f"{name}.json").write_text(json.dumps(rows))
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, data / f"{name}.parquet")
        pyarrow.feather.write_feather(table, data / f"{name}.arrow", compression="uncompressed")
        with gzip.open(data / f"{name}.jsonl.gz", "wb") as file:
            file.write((data / f"{name}.jsonl").read_bytes())
        with pyarrow.CompressedOutputStream(str(data / f"{name}.jsonl.zst"), "zstd") as file:
            file.write((data / f"{name}.jsonl").read_bytes())
    for name, rows in {"rows": ROWS, "pairs": PAIRS}.items():
        header, cells = list(rows[0]), [list(row.values()) for row in rows]
        for ending, delimiter in ((".csv", ","), (".tsv", "\t")):
            lines = [delimiter.join(map(str, line)) for line in [header, *cells]]
            (data / f"{name}{ending}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        book = Workbook()
        assert book.active is not None
        for line in [header, *cells]:
            book.active.append(line)
        book.save(data / f"{name}.xlsx")
    words = "\n\n".join(
        "\n".join(f"{word} {tag}" for word, tag in zip(row["tokens"], row["tags"], strict=False)) for row in TAGGED
    )
    (data / "tagged.conll").write_text(f"-DOCSTART- O\n\n{words}\n")
    asked = [
        {"id": row["id"], "question": row["question"], "answers": [{"text": SPAN, "answer_start": 4}]}
        for row in QUESTIONS
    ]
    squad = [{"title": "a", "paragraphs": [{"context": "two leading trailing", "qas": asked}]}]
    (data / "squad.json").write_text(json.dumps({"version": "1.1", "data": squad}))
    (data / "texts.txt").write_text("\n".join(TEXTS) + "\n\n" + "\n".join(TEXTS[::-1]) + "\n")


def _make_recipes(folder: Path) -> None:
    (folder / "recipes").mkdir()
    source = {"name": "texts", "files": ["texts.txt"], "one_per": "line"}
    phase = {"name": "only", "duration": 2, "length": 16, "batch_tokens": 64, "mask_rate": 0.3}
    recipes: dict[str, Any] = {
        "full": {
            "name": "full",
            "model": {"preset": "mini", "config": {**SIZES, "vocab_size": 64, "num_hidden_layers": 1}},
            "tokenizer": {"kind": "wordpiece", "vocab_size": 64},
            "corpus": {"sources": [source], "held_out": 0.3, "max_bad_share": 0.5, "workers": 1},
            "objective": {"kind": "masked_lm", "rate": 0.2, "whole_word": True},
            "optimizer": {"kind": "adamw", "lr": 1e-3, "betas": [0.9, 0.98]},
            "schedule": {"kind": "wsd", "warmup": "5%", "decay": "30%"},
            "phases": [phase],
            "run": {
                "folder": "run",
                "device": "cpu",
                "precision": "fp32",
                "checkpoints": {"every": 1, "keep": 1},
                "evaluation": {"every": 1, "tokens": 64, "pseudo_perplexity_tokens": 4},
            },
        },
        "short": {"model": {"preset": "mini"}, "corpus": {"sources": [source]}, "phases": [phase]},
        "muon": {"model": {"preset": "mini"}, "optimizer": {"kind": "muon"}, "phases": [phase, phase | {"name": "b"}]},
    }
    for name, values in recipes.items():
        (folder / "recipes" / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
