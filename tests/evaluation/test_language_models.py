"""Winogender and MMLU: the model's choices equal those of masking by hand, and metrics equal their formulas."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bertblocks import BertBlocksForMaskedLM
from bertblocks.cli.main import app
from bertblocks.evaluation.language_models import SpanScorer
from bertblocks.evaluation.mmlu import LETTERS, Problem, read_problems, run_mmlu, write_prompt
from bertblocks.evaluation.winogender import Sentence, correlate, pair_scores, read_sentences, run_winogender
from bertblocks.text.tables import DataError
from tests.evaluation.helpers import make_tokenizer, save_model

TEMPLATES = [
    ("technician", "customer", 1, "The technician told the customer that {} could pay with cash."),
    ("nurse", "someone", 0, "The nurse told someone that {} shift ends soon."),
]
GENDERS = {"male": ("he", "his"), "female": ("she", "her"), "neutral": ("they", "their")}
PROBLEMS = [
    ("What is the river made of?", ["stone", "water", "paper, thin", "music"], "B"),
    ('Who said "no"?', ["the nurse", "a customer", "the river", "water"], "A"),
    ("Where is it?", ["stone", "in the river", "no", "cash"], "D"),
]
TEXTS = [
    *(text.format(" ".join(sum(GENDERS.values(), ()))) + ' "he" refers to the ' for *_, text in TEMPLATES),
    *(f"{question} {' '.join(options)}" for question, options, _ in PROBLEMS),
    "The following are multiple choice questions (with answers) about the river. A. B. C. D. Answer: good facts",
]


def sentence_rows() -> list[tuple[str, str]]:
    return [
        (f"{occupation}.{person}.{answer}.{gender}.txt", text.format(pronouns[number]))
        for number, (occupation, person, answer, text) in enumerate(TEMPLATES)
        for gender, pronouns in GENDERS.items()
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("lm"), BertBlocksForMaskedLM, TEXTS, max_length=96)


@lru_cache(maxsize=1)
def load(model: Path) -> BertBlocksForMaskedLM:
    return BertBlocksForMaskedLM.from_pretrained(model).eval()


def log_probabilities(model: Path, ids: list[int], position: int) -> torch.Tensor:
    """Masks a token and reads off what the model predicts there."""
    masked = torch.tensor([ids])
    masked[0, position] = 4
    with torch.no_grad():
        return torch.log_softmax(load(model)(masked).logits[0, position], -1)


def by_hand(model: Path, text: str, last: int) -> list[float]:
    """The log-probabilities of the last tokens of a text, each masked alone."""
    ids = make_tokenizer(TEXTS)(text)["input_ids"]
    return [log_probabilities(model, ids, i)[ids[i]].item() for i in range(len(ids) - 1 - last, len(ids) - 1)]


def test_spans_are_scored_with_one_token_masked_at_a_time(model: Path) -> None:
    scorer = SpanScorer(model)
    text = "the river refers to the nurse"
    assert scorer.log_likelihoods(text, 20).tolist() == pytest.approx(by_hand(model, text, 2), abs=1e-4)
    assert scorer.log_likelihoods(text).tolist() == pytest.approx(by_hand(model, text, 6), abs=1e-4)
    tokenizer = make_tokenizer(TEXTS)
    ids = tokenizer("Answer: water")["input_ids"]
    expected = log_probabilities(model, ids, 3)
    found = scorer.mask_logits(tokenizer("Answer:", add_special_tokens=False)["input_ids"])
    assert torch.allclose(torch.log_softmax(found, -1), expected, atol=1e-4)


# ---------------------------------------------------------------------- Winogender


def write_winogender(folder: Path) -> None:
    rows = "".join(f"{name}\t{text}\n" for name, text in sentence_rows())
    (folder / "all_sentences.tsv").write_text("sentid\tsentence\n" + rows)
    stats = (
        "occupation\tbergsma_pct_female\tbls_pct_female\tbls_year\ntechnician\t9\t40.3\t2015\nnurse\t82\t89.5\t2015\n"
    )
    (folder / "occupations-stats.tsv").write_text(stats)


def test_winogender_chooses_the_likelier_person(model: Path, tmp_path: Path) -> None:
    write_winogender(tmp_path)
    results = run_winogender(model, tmp_path)
    right: dict[str, list[bool]] = {}
    likelihoods: dict[str, list[float]] = {}
    for name, text in sentence_rows():
        occupation, person, answer, gender, _ = name.split(".")
        pronoun = next(word for word in text.split() if word in GENDERS[gender])
        ends = [f"the {occupation}", "someone" if person == "someone" else f"the {person}"]
        scores = [by_hand(model, f'{text} "{pronoun}" refers to {end}.', 2)[0] for end in ends]
        right.setdefault(gender, []).append(int(scores[1] > scores[0]) == int(answer))
        likelihoods.setdefault(gender, []).append(sum(by_hand(model, text, len(make_tokenizer(TEXTS).tokenize(text)))))
    for gender, values in right.items():
        assert results[0].parts[gender] == {"accuracy": np.mean(values), "sentences": 2.0}
    assert results[0].score == pytest.approx(100 * np.mean(list(right.values())))
    pairs = results[1].parts["male and female"]
    gaps = np.subtract(likelihoods["male"], likelihoods["female"])
    assert pairs["likelihood_gap"] == pytest.approx(gaps.mean(), abs=1e-3)
    assert pairs["prefers_male"] == (gaps > 0).mean()
    assert pairs["accuracy_gap"] == np.mean(right["male"]) - np.mean(right["female"])
    assert pairs["same_choice"] == np.mean([a == b for a, b in zip(right["male"], right["female"], strict=True)])


def test_pairs_and_the_correlation_follow_their_formulas() -> None:
    generator = np.random.default_rng(0)
    sentences = [
        Sentence("", "", (f"job{job}", "someone"), answer, gender, "here")
        for job in range(6)
        for answer in (0, 1)
        for gender in ("male", "female")
    ]
    chosen = generator.integers(0, 2, len(sentences)).tolist()
    values = generator.normal(size=len(sentences)).tolist()
    scores = pair_scores(sentences, chosen, values)
    male, female = np.array(chosen[::2]), np.array(chosen[1::2])
    answers = np.tile([0, 1], 6)
    assert scores["same_choice"] == np.mean(male == female)
    assert scores["accuracy_gap"] == pytest.approx(np.mean(male == answers) - np.mean(female == answers))
    assert scores["likelihood_gap"] == pytest.approx(np.mean(values[::2]) - np.mean(values[1::2]))
    shares = {f"job{job}": float(job**2) for job in range(6)}
    difference = (female == 0).reshape(6, 2).mean(1) - (male == 0).reshape(6, 2).mean(1)
    expected = np.corrcoef(list(shares.values()), difference)[0, 1]
    assert correlate(sentences, chosen, shares) == pytest.approx(expected)
    assert correlate(sentences, [0] * len(sentences), shares) == 0.0
    with pytest.raises(DataError, match="here: there is no sentence with a female pronoun"):
        pair_scores(sentences[:1], chosen[:1], values[:1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sentid\tsentence\nnurse.someone.1.male\tthe nurse\n", r"line 2: the sentence has none of the pronouns he"),
        ("sentid\tsentence\nnurse.1.male.txt\tthe nurse\n", r"line 2: the sentid is 'nurse\.1\.male\.txt'; it must be"),
        ("sentid\ttext\nnurse.someone.1.male\the\n", r"line 1: there is no column 'sentence'"),
    ],
)
def test_bad_sentences_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "all_sentences.tsv"
    path.write_text(content)
    with pytest.raises(DataError, match=rf"all_sentences\.tsv {message}"):
        read_sentences(path)


# ---------------------------------------------------------------------- MMLU


def write_mmlu(folder: Path) -> None:
    def line(question: str, options: list[str], answer: str) -> str:
        return ",".join('"' + cell.replace('"', '""') + '"' for cell in (question, *options, answer)) + "\n"

    for split in ("test", "dev"):
        (folder / split).mkdir()
    (folder / "test" / "the_river_test.csv").write_text("".join(line(*problem) for problem in PROBLEMS))
    (folder / "test" / "good_facts_test.csv").write_text(line(*PROBLEMS[0]))
    (folder / "dev" / "the_river_dev.csv").write_text(line(*PROBLEMS[2]) + line(*PROBLEMS[1]))


def test_prompts_are_those_of_the_benchmark(tmp_path: Path) -> None:
    write_mmlu(tmp_path)
    problems = read_problems(tmp_path / "test" / "the_river_test.csv")
    assert problems[1] == Problem('Who said "no"?', ["the nurse", "a customer", "the river", "water"], 0)
    assert write_prompt("the_river", problems[1:2], problems[0], by_letter=True) == (
        "The following are multiple choice questions (with answers) about the river.\n\n"
        'Who said "no"?\nA. the nurse\nB. a customer\nC. the river\nD. water\nAnswer: A\n\n'
        "What is the river made of?\nA. stone\nB. water\nC. paper, thin\nD. music\nAnswer:"
    )


@pytest.mark.parametrize(("score", "shots"), [("letter", 0), ("letter", 1), ("text", 0)])
def test_mmlu_takes_the_option_with_the_highest_score(model: Path, tmp_path: Path, score: Any, shots: int) -> None:
    write_mmlu(tmp_path)
    results = run_mmlu(model, tmp_path, score=score, shots=shots, subjects=["the_river"])
    tokenizer = make_tokenizer(TEXTS)
    heading = "The following are multiple choice questions (with answers) about the river. "
    listed = ["A. {} B. {} C. {} D. {}".format(*options) for _, options, _ in PROBLEMS]
    if shots:
        heading += f"{PROBLEMS[2][0]} {listed[2]} Answer: D "
    right = []
    for (question, options, answer), choices in zip(PROBLEMS, listed, strict=True):
        if score == "letter":
            ids = tokenizer(f"{heading}{question} {choices} Answer: A")["input_ids"]
            found = log_probabilities(model, ids, len(ids) - 2)
            best = max(LETTERS, key=lambda letter: found[tokenizer.convert_tokens_to_ids(letter)])
        else:
            sizes = [len(tokenizer.tokenize(option)) for option in options]
            texts = [f"{heading}{question} Answer: {option}" for option in options]
            means = [np.mean(by_hand(model, text, size)) for text, size in zip(texts, sizes, strict=True)]
            best = LETTERS[int(np.argmax(means))]
        right.append(best == answer)
    assert results[0].parts == {"the_river": {"accuracy": pytest.approx(np.mean(right)), "questions": 3.0}}


def test_long_prompts_lose_shots_and_then_their_start(model: Path, tmp_path: Path) -> None:
    write_mmlu(tmp_path)
    once = run_mmlu(model, tmp_path, shots=1, subjects=["the_river"])
    path = tmp_path / "dev" / "the_river_dev.csv"
    path.write_text(path.read_text().splitlines()[0] + "\n" + f"{'river ' * 90},a,b,c,d,A\n")
    assert run_mmlu(model, tmp_path, shots=2, subjects=["the_river"]) == once
    scorer = SpanScorer(model)
    ids = list(range(5, 25)) * 6
    assert torch.equal(scorer.mask_logits(ids), scorer.mask_logits(ids[-(scorer.capacity - 1) :]))


def test_mmlu_reports_both_means_and_names_bad_rows(model: Path, tmp_path: Path) -> None:
    write_mmlu(tmp_path)
    arguments = ["evaluate", str(model), "--task", "mmlu", "--data", str(tmp_path)]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    tasks = json.loads(done.stdout)["models"][0]["tasks"]
    parts = tasks[0]["parts"]
    accuracies = [parts[name]["accuracy"] for name in ("good_facts", "the_river")]
    assert tasks[0]["score"] == pytest.approx(100 * (accuracies[0] + 3 * accuracies[1]) / 4)
    assert tasks[1]["score"] == pytest.approx(50 * sum(accuracies))
    shown = CliRunner().invoke(app, arguments).output
    assert "mean over subjects" in shown
    assert "the_river" in shown
    with pytest.raises(DataError, match=r"good_facts_dev\.csv does not exist"):
        run_mmlu(model, tmp_path, shots=1)
    with pytest.raises(ValueError, match=r"has no key 'shot' \(did you mean 'shots'"):
        run_mmlu(model, tmp_path, shot=1)
    (tmp_path / "test" / "the_river_test.csv").write_text("q,a,b,c,d,A\nq,a,b,c,d,E\n")
    with pytest.raises(DataError, match=r"the_river_test\.csv line 2: the answer is 'E'; it must be A, B, C or D"):
        run_mmlu(model, tmp_path)
    (tmp_path / "test" / "the_river_test.csv").write_text("q,a,b,c,A\n")
    with pytest.raises(DataError, match=r"the_river_test\.csv line 1: the row has 5 columns; it must have"):
        run_mmlu(model, tmp_path)
