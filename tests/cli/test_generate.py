"""Masked diffusion learns a distribution of known entropy; `generate` samples from it."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import BertTokenizer
from typer.testing import CliRunner

from bertblocks import BertBlocksForMaskedDiffusion
from bertblocks.cli import generate as command
from bertblocks.cli import output
from bertblocks.cli.main import app
from bertblocks.data.stream import DocumentChunk
from bertblocks.objectives import MaskedDiffusion
from bertblocks.text.vocabulary import Vocabulary
from tests.helpers import tiny_config

WORDS = ["the", "cat", "dog", "sat", "ran", "."]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
FIRST = len(SPECIAL)
LENGTH = 6
#: A Markov chain over words: START gives the first word's distribution, each row that of the next word.
START = np.array([0.5, 0.1, 0.1, 0.1, 0.1, 0.1])
CHAIN = np.array(
    [
        [0.0, 0.6, 0.4, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.8, 0.2, 0.0],
        [0.0, 0.0, 0.0, 0.1, 0.9, 0.0],
        [0.3, 0.0, 0.0, 0.0, 0.0, 0.7],
        [0.1, 0.0, 0.0, 0.0, 0.0, 0.9],
        [0.9, 0.0, 0.0, 0.05, 0.05, 0.0],
    ]
)


def chain_entropy() -> float:
    """The entropy of a text of LENGTH words, in nats."""
    safe = np.where(CHAIN > 0, CHAIN, 1.0)
    of_row = -(CHAIN * np.log(safe)).sum(axis=1)
    total, share = -(START * np.log(START)).sum(), START
    for _ in range(LENGTH - 1):
        total, share = total + share @ of_row, share @ CHAIN
    return float(total)


def draw_texts(count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    words = [random.choice(len(WORDS), size=count, p=START)]
    for _ in range(LENGTH - 1):
        steps = random.random((count, 1))
        words.append((steps > CHAIN[words[-1]].cumsum(axis=1)).sum(axis=1))
    return np.stack(words, axis=1) + FIRST


def rows(texts: np.ndarray, first: int) -> list[list[DocumentChunk]]:
    """Rows with one chunk each."""
    return [
        [DocumentChunk(text.astype(np.int32), 0, first + number, 0, first + number)]
        for number, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("words") / "vocab.txt"
    file.write_text("\n".join([*SPECIAL, *WORDS]))
    return BertTokenizer(str(file))


@pytest.fixture(scope="module")
def objective(tokenizer: Any) -> Any:
    return MaskedDiffusion(Vocabulary.from_tokenizer(tokenizer))


def train(objective: Any, steps: int, size: int) -> BertBlocksForMaskedDiffusion:
    """A model trained on texts of the chain."""
    torch.manual_seed(0)
    options = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "initializer_range": 0.05}
    model = BertBlocksForMaskedDiffusion(tiny_config(vocab_size=FIRST + len(WORDS), mask_token_id=4, **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, 3 * (1 - step / steps))
        batch = objective.batch(rows(draw_texts(size, step), step * size), seed=0)
        # all texts are of one length: a square batch of the objective's tensors is faster than a ragged one
        square = {name: getattr(batch, name).view(size, LENGTH + 2) for name in ("input_ids", "labels")}
        count = batch.counts["masked_diffusion"]
        model(**square, timesteps=batch.timesteps, num_items_in_batch=count).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def trained(objective: Any) -> Any:
    return train(objective, 600, 128)


@pytest.fixture(scope="module")
def model(objective: Any) -> Any:
    """Trained just enough to write the most likely words."""
    return train(objective, 80, 64)


@pytest.mark.slow
def test_the_diffusion_bound_of_a_trained_model_reaches_the_entropy_of_the_texts(trained: Any, objective: Any) -> None:
    with torch.no_grad():
        batch = objective.batch(rows(draw_texts(4000, seed=10**6), 0), seed=1)
        bound = objective.losses(trained, batch)["masked_diffusion"].item() / batch.counts["masked_diffusion"]
    assert bound == pytest.approx(chain_entropy() / LENGTH, rel=0.05)


@pytest.mark.slow
def test_samples_follow_the_training_distribution(trained: Any) -> None:
    """Words and pairs are as frequent as in the chain. Few tokens per step: those of one step are independent."""
    canvas = torch.full((2000, LENGTH + 2), 4)
    canvas[:, 0], canvas[:, -1] = 2, 3
    generator = torch.Generator().manual_seed(0)
    texts = trained.infill(canvas, steps=40, order="ancestral", temperature=1.0, generator=generator)[:, 1:-1]
    has_words = (texts >= FIRST).all(dim=1)
    assert has_words.float().mean() > 0.99
    texts = texts[has_words]
    found, expected = (np.zeros((len(WORDS), len(WORDS))) for _ in range(2))
    for sample, table in ((texts.numpy(), found), (draw_texts(100_000, seed=3), expected)):
        pairs = np.stack([sample[:, :-1].ravel(), sample[:, 1:].ravel()]) - FIRST
        np.add.at(table, tuple(pairs), 1.0 / pairs.shape[1])
    # total variation; that of 10,000 draws from the truth itself is about 0.02
    assert np.abs(found - expected).sum() / 2 < 0.06


@pytest.mark.slow
def test_infill_follows_the_conditional_distribution(trained: Any) -> None:
    """In "the ? sat", cat has weight 0.6 * 0.8 and dog 0.4 * 0.1."""
    ids = torch.tensor([[2, 5, 4, 8, 10, 5, 6, 3]]).repeat(3000, 1)
    filled = trained.infill(ids, steps=1, temperature=1.0, generator=torch.Generator().manual_seed(1))
    assert torch.equal(filled[:, 3:], ids[:, 3:])
    assert torch.equal(filled[:, :2], ids[:, :2])
    share = (filled[:, 2] == 6).float().mean().item()
    assert share == pytest.approx(0.48 / 0.52, abs=0.04)


def test_infill_never_changes_given_tokens(model: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    for steps, order, block in ((1, "confidence", None), (7, "ancestral", None), (9, "confidence", 2)):
        ids = torch.randint(1, 11, (200, 12), generator=generator)
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = 4
        mask = torch.ones_like(ids)
        mask[::3, 9:] = 0
        filled = model.infill(ids, mask, steps=steps, order=order, temperature=1.0, block_length=block)
        given = (ids != 4) | (mask == 0)
        assert torch.equal(filled[given], ids[given])
        assert not ((filled == 4) & (mask == 1)).any()


def test_each_step_is_reported_and_has_fewer_masks(model: Any) -> None:
    seen: list[torch.Tensor] = []
    ids = torch.tensor([[2, 4, 4, 4, 4, 4, 4, 3]])
    filled = model.infill(ids, steps=3, on_step=lambda now: seen.append(now.clone()))
    assert [(tokens == 4).sum().item() for tokens in seen] == [4, 2, 0]
    assert torch.equal(seen[-1], filled)


# ---------------------------------------------------------------------- command


@pytest.fixture(scope="module")
def folder(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("diffusion")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def run(*arguments: str, expect: int = 0) -> Any:
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert result.exit_code == expect, result.output
    return result


def test_generate_prints_only_the_text_into_a_pipe(folder: Any) -> None:
    text = run(folder, "the cat", "--length", "4", "--seed", "1").stdout
    assert text.startswith("the cat ")
    assert text.count("\n") == 1
    assert run(folder, "the cat", "--length", "4", "--seed", "1").stdout == text
    assert run(folder, "--length", "5", "--block", "2", "--top-k", "3", "--top-p", "0.9", "--order", "ancestral").stdout


def test_the_infill_option_keeps_the_given_text(folder: Any) -> None:
    found = json.loads(run(folder, "--infill", "the [MASK] sat . the [MASK]", "--temperature", "0", "--json").stdout)
    assert found["text"] == "the cat sat. the cat"
    assert found["written"] == [2, 6]
    assert found["ids"] == [2, *(FIRST + WORDS.index(word) for word in ["the", "cat", "sat", ".", "the", "cat"]), 3]


def test_generate_shows_each_step_in_a_terminal(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(output, "make_console", lambda: Console(file=screen, force_terminal=True, width=80))
    run(folder, "the", "--length", "5", "--steps", "5", "--seed", "0")
    shown = screen.getvalue()
    for count in range(1, 5):
        assert any(line.count(command.OPEN) == count for line in shown.splitlines()), count


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["the", "--infill", "a [MASK]"], 2, "cannot be combined"),
        (["--infill", "the cat"], 1, r"--infill is 'the cat'; it must contain [MASK]"),
        (["--top-p", "-0.5"], 1, "top_p is -0.5; it must be greater than 0"),
    ],
)
def test_mistakes_give_one_sentence(folder: Any, arguments: Any, code: Any, message: Any) -> None:
    assert message in " ".join(run(folder, *arguments, expect=code).stderr.split())


def test_generate_reports_a_missing_tokenizer_or_folder(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "bare")
    assert "does not have a tokenizer" in run(str(tmp_path / "bare"), expect=1).stderr
    assert "is not a checkpoint folder" in run(str(tmp_path / "none"), expect=1).stderr


def test_the_entropy_formula_equals_the_sum_over_all_texts() -> None:
    """Compares with the sum over all 6^6 texts."""
    share = START.copy()
    for _ in range(LENGTH - 1):
        share = (share[..., None] * CHAIN.reshape((1,) * (share.ndim - 1) + CHAIN.shape)).astype(float)
    share = share[share > 0]
    assert share.sum() == pytest.approx(1.0)
    assert -(share * np.log(share)).sum() == pytest.approx(chain_entropy())
    assert math.isfinite(chain_entropy())
