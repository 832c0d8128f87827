"""Lengths, batches and real texts for the benchmarks, the same every time."""

from __future__ import annotations

import ast
import csv
import json
import math
import os
import random
import sysconfig
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from bertblocks.models.masked_lm import IGNORE

#: The default folder of real texts, and the variable that changes it.
DATA_VARIABLE = "BERTBLOCKS_BENCH_DATA"
DATA_FOLDER = Path(__file__).parents[2] / "shared" / "data"

Batch = dict[str, Tensor]


def ragged_lengths(count: int = 32, longest: int = 256, sigma: float = 0.78) -> list[int]:
    """Lognormal lengths, as real texts have, in a mixed order.

    They are quantiles and not random draws, so the padding factor is the same for every `longest`.

    Example:
        >>> lengths = ragged_lengths()
        >>> max(lengths), round(32 * 256 / sum(lengths), 1)
        (256, 4.0)
    """
    normal = [NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)]
    lengths = [max(4, round(longest * math.exp(sigma * (draw - normal[-1])))) for draw in normal]
    random.Random(0).shuffle(lengths)
    return lengths


def make_batch(lengths: list[int], vocab_size: int) -> Batch:
    """Random ids, padded on the right, with a mask, as a tokenizer returns them."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, vocab_size, mask.shape, generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask}


def make_masked_batch(lengths: list[int], vocab_size: int, share: float = 0.3) -> Batch:
    """The same, with labels on a share of the real tokens."""
    batch = make_batch(lengths, vocab_size)
    generator = torch.Generator().manual_seed(1)
    chosen = (torch.rand(batch["input_ids"].shape, generator=generator) < share) & batch["attention_mask"].bool()
    return {**batch, "labels": batch["input_ids"].masked_fill(~chosen, IGNORE)}


def sorted_batches(batch: Batch, size: int) -> list[tuple[Tensor, Batch]]:
    """Rows sorted by length, `size` at a time, cut to the longest row of each batch, with the rows' indices."""
    lengths = batch["attention_mask"].sum(1)
    return [
        (rows, {name: values[rows, : int(lengths[rows].max())] for name, values in batch.items()})
        for rows in lengths.argsort(descending=True).split(size)
    ]


# ---------------------------------------------------------------------- real texts


def data_folder(option: Path | None) -> Path | None:
    """The folder of real texts: the option, the variable, or the default if it exists."""
    if option is None and DATA_VARIABLE in os.environ:
        option = Path(os.environ[DATA_VARIABLE])
    if option is not None and not option.is_dir():
        raise SystemExit(f"{option} is not a folder; give one that contains stsb/, banking77/ or xquad/.")
    return option or (DATA_FOLDER if DATA_FOLDER.is_dir() else None)


def real_texts(folder: Path | None, count: int) -> tuple[str, list[str]]:
    """The source of the texts, and `count` of them in mixed order.

    They are sentences, questions and paragraphs of the data sets in the folder, or else docstrings of the standard
    library.
    """
    sources = {} if folder is None else _data_set_texts(folder)
    if not sources:
        sources = {"docstrings of the standard library": docstrings()}
    texts = [text for texts in sources.values() for text in texts]
    random.Random(0).shuffle(texts)
    return ", ".join(sources), texts[:count]


def _data_set_texts(folder: Path) -> dict[str, list[str]]:
    found = {}
    if (pairs := sts_pairs(folder)) is not None:
        found["STS-B"] = [sentence for first, second, _ in pairs for sentence in (first, second)]
    if (questions := folder / "banking77" / "test.csv").exists():
        with questions.open(encoding="utf-8", newline="") as file:
            found["Banking77"] = [row["text"] for row in csv.DictReader(file)]
    if (articles := xquad_articles(folder)) is not None:
        found["XQuAD"] = [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]
    return found


def sts_pairs(folder: Path | None) -> list[tuple[str, str, float]] | None:
    """Sentence pairs of STS-B's test set with their scores, or None if the folder does not have it."""
    if folder is None or not (file := folder / "stsb" / "test.csv").exists():
        return None
    with file.open(encoding="utf-8", newline="") as rows:
        return [(first, second, float(score)) for first, second, score in csv.reader(rows)]


def xquad_articles(folder: Path | None) -> list[dict[str, Any]] | None:
    """Articles of XQuAD with their paragraphs and questions, or None if the folder does not have it."""
    if folder is None or not (file := folder / "xquad" / "xquad.en.json").exists():
        return None
    return json.loads(file.read_text(encoding="utf-8"))["data"]


@cache
def docstrings() -> list[str]:
    """Real English texts of uneven length that every Python has, parsed from the sources without importing them."""
    found: dict[str, None] = {}
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and (text := ast.get_docstring(node)):
                found[" ".join(text.split())] = None
    return list(found)
