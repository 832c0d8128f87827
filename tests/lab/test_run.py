"""Studies that run: paired trials, only what is missing, time limits, failures and interruptions."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bertblocks import load
from bertblocks.core.metrics_file import MetricsFile, read_metrics
from bertblocks.lab.archive import write_archive
from bertblocks.lab.local import Job, Listener, run_here
from bertblocks.lab.report import summarize, write_study_report
from bertblocks.lab.results import TRIALS, StudyResults
from bertblocks.lab.run import run_study
from bertblocks.lab.statistics.verdicts import UNDECIDED, judge
from bertblocks.training.build import init_by_name
from bertblocks.training.run_folder import RunFolderError
from tests.lab.helpers import Write, plan_of, run

#: Measures that do not depend on time.
EXACT = [{"kind": "held_out", "tokens": 1000}, {"kind": "pseudo_perplexity", "tokens": 60}]


def exact(results: StudyResults) -> list[tuple[Any, ...]]:
    """All that must not depend on how a study ran."""
    values = [
        (found.variant, found.seed, found.size, found.measure, found.value, found.examples.tolist())
        for found in results.measurements
        if found.examples is not None
    ]
    curves = [
        (trial.variant, trial.seed, [(point.step, point.loss) for point in trial.curve]) for trial in results.trials
    ]
    return [*values, *curves, ("missing", results.missing), ("rates", [search.chosen for search in results.searches])]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two variants and two seeds, in the folder `study`, and its file."""
    from tests.lab.conftest import tiny_values

    folder = tmp_path_factory.mktemp("finished")
    (folder / "study.yaml").write_text(json.dumps({**tiny_values(folder), "measures": EXACT}))
    run(folder / "study.yaml", folder / "study")
    return folder


def test_results_are_paired_and_complete(finished: Path) -> None:
    results = StudyResults.load(finished / "study")
    assert results.baseline == "rope"
    assert results.variants == {"rope": {}, "none": {"model.config.block_pos_enc_kind": "none"}}
    assert results.scale.endswith("1.3 k tokens, 2 seeds")
    assert list(results.measures) == ["held_out_loss", "held_out_accuracy", "pseudo_loss"]
    assert {(trial.variant, trial.seed) for trial in results.trials} == {
        (v, s) for v in ("rope", "none") for s in (0, 1)
    }
    assert not results.missing
    losses = [found for found in results.measurements if found.measure == "held_out_loss"]
    assert len({len(found.examples) for found in losses}) == 1
    for found in losses:
        assert found.value == pytest.approx(np.average(found.examples, weights=found.weights))
        assert found.weights.tolist() == losses[0].weights.tolist()
    by_trial = {(found.variant, found.seed): found.value for found in losses}
    for trial in results.trials:
        assert trial.steps == 10
        assert trial.curve[-1].step == 10
        assert trial.curve[-1].tokens == trial.tokens == 10 * 128
        assert (
            trial.parameters
            == load(finished / "study" / TRIALS / folder_of(finished, trial) / "run/model")[0].num_parameters()
        )
        # the run itself evaluates on fewer tokens of the same texts
        assert trial.curve[-1].loss == pytest.approx(by_trial[trial.variant, trial.seed], rel=0.2)
    assert json.dumps(results.to_json())


def folder_of(finished: Path, trial: Any) -> str:
    planned = json.loads((finished / "study" / "study.json").read_text())["trials"]
    return next(one["folder"] for one in planned if (one["variant"], one["seed"]) == (trial.variant, trial.seed))


def test_variants_share_weights_texts_and_masks(write_study: Write) -> None:
    """Trials of one seed start with equal weights where shapes agree, and read the same batches."""
    from bertblocks.models import BertBlocksForMaskedLM
    from bertblocks.training.build import expected_config

    variants = {
        "base": {},
        "mlp": {"model.config.mlp_type": "mlp"},
        "learned": {"model.config.embd_pos_enc_kind": "learned"},
    }
    plan = plan_of(write_study(variants=variants, budget={"equal": "tokens"}))
    models = [init_by_name(BertBlocksForMaskedLM(expected_config(arm.recipe)), 7).state_dict() for arm in plan.arms]
    for other in models[1:]:
        shared = [name for name, weight in other.items() if name in models[0] and weight.shape == models[0][name].shape]
        assert any("qkv" in name for name in shared)
        assert all(torch.equal(other[name], models[0][name]) for name in shared)
    another = init_by_name(BertBlocksForMaskedLM(expected_config(plan.arms[0].recipe)), 8).state_dict()
    assert not torch.equal(another["model.embedding.token.weight"], models[0]["model.embedding.token.weight"])
    trials = plan.trials({})
    recipes = [trial.run_recipe for trial in trials if trial.seed == 0]
    assert len({recipe.run.seed for recipe in recipes}) == 1
    assert len({str(recipe.corpus) for recipe in recipes}) == len({str(recipe.tokenizer) for recipe in recipes}) == 1


def test_initial_weights_have_the_distribution_of_the_config() -> None:
    from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM

    config = BertBlocksConfig.from_preset("mini", hidden_size=128, num_hidden_layers=2, init_kind="megatron")
    model = init_by_name(BertBlocksForMaskedLM(config), 0)
    drawn = {name: float(weight.detach().std()) for name, weight in model.named_parameters() if weight.dim() == 2}
    torch.manual_seed(1)
    for name, weight in BertBlocksForMaskedLM(config).named_parameters():
        if name in drawn:
            assert drawn[name] == pytest.approx(float(weight.detach().std()), rel=0.1), name


def test_only_what_is_missing_runs(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    shutil.copytree(finished / "study", folder)
    values = json.loads((finished / "study.yaml").read_text())
    path = tmp_path / "more.yaml"

    def run_with(**changes: Any) -> tuple[StudyResults, list[str]]:
        path.write_text(json.dumps({**values, **changes}))
        _, results, names = run(path, folder)
        return results, names

    before = exact(StudyResults.load(folder))
    results, names = run_with()
    assert (names, exact(results)) == ([], before)
    _, names = run_with(seeds=3)
    assert names == ["rope-seed2", "none-seed2"]
    _, names = run_with(variants={**values["variants"], "alibi": {"model.config.block_pos_enc_kind": "alibi"}})
    assert names == ["alibi-seed0", "alibi-seed1"]
    weights = {path: path.stat().st_mtime_ns for path in folder.rglob("model.safetensors")}
    results, names = run_with(measures=[*EXACT, {"kind": "memory"}])  # measured without training again
    assert len(names) == 4
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("model.safetensors")} == weights
    assert sum(found.measure == "memory" and found.value > 1e6 for found in results.measurements) == 4
    results, names = run_with()
    assert (names, exact(results)) == ([], before)


def test_a_study_folder_can_be_moved_and_continued(finished: Path, tmp_path: Path) -> None:
    write_archive(finished / "study", tmp_path / "study.tar.gz", with_models=True)
    with tarfile.open(tmp_path / "study.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "study"
    assert run(folder, folder)[2] == []
    assert exact(StudyResults.load(folder)) == exact(StudyResults.load(finished / "study"))
    lost = next(path for path in sorted((folder / TRIALS).iterdir()) if path.name.startswith("none-seed1"))
    shutil.rmtree(lost)
    assert run(folder, folder)[2] == ["none-seed1"]  # from the tokens in the folder
    assert exact(StudyResults.load(folder)) == exact(StudyResults.load(finished / "study"))


def test_a_loss_that_is_not_finite_is_recorded_and_not_repeated(write_study: Write, tmp_path: Path) -> None:
    variants = {"rope": {}, "wild": {"optimizer.lr": 1e30, "optimizer.clip": None}}
    path = write_study(variants=variants, seeds=1)
    outcome, results, _ = run(path, tmp_path / "study")
    assert outcome.failed == {}
    ((variant, seed, _, message),) = results.failures
    assert (variant, seed) == ("wild", 0)
    assert "is not taken" in message or "not taken" in message
    assert results.missing == [("wild", 0, None)]
    assert run(path, tmp_path / "study")[2] == []


def test_the_mean_of_the_last_checkpoints_is_measured(write_study: Write, tmp_path: Path) -> None:
    variants: dict[str, Any] = {"rope": {}}
    run(write_study(average={"checkpoints": 2, "over": 0.4}, seeds=1, variants=variants), tmp_path / "mean")
    kept = {"rope": {"run.checkpoints": {"every": 2, "keep": "all"}}}
    run(write_study(seeds=1, variants=kept), tmp_path / "kept")
    ((mean_run,), (kept_run,)) = (list((tmp_path / name / TRIALS).glob("*/run")) for name in ("mean", "kept"))
    assert not (mean_run / "checkpoints").exists()
    found = load_file(mean_run / "model" / "model.safetensors")
    last = [load_file(kept_run / "checkpoints" / f"step-{step:08d}" / "model.safetensors") for step in (8, 10)]
    assert set(found) == set(last[0])
    for name, weight in found.items():
        torch.testing.assert_close(weight, (last[0][name] + last[1][name]) / 2)


def test_foreign_folders_stay_untouched(write_study: Write, tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="do not belong to a study"):
        run(write_study(), tmp_path / "study")
    assert [path.name for path in (tmp_path / "study").iterdir()] == ["notes.txt"]


def test_equal_seconds_end_trials_and_their_schedules(write_study: Write, tmp_path: Path) -> None:
    """Each trial ends with the first step after its time, and its learning rate follows the time."""
    variants = {"rope": {}, "deep": {"model.config.num_hidden_layers": 6}}
    path = write_study(variants=variants, seeds=1, budget={"equal": "seconds", "amount": "0.4 seconds"})
    jobs: list[Job] = []

    def run_and_note(folder: Path, given: Sequence[Job], slots: int, listener: Listener) -> int | None:
        jobs.extend(given)
        return run_here(folder, given, slots, listener)

    run_study(plan_of(path), tmp_path / "study", run_and_note)
    assert [job.is_alone for job in jobs] == [False, True, True]  # the texts, and two trials
    results = StudyResults.load(tmp_path / "study")
    assert results.scale.endswith("0.4 seconds of training, 1 seed")
    for trial in results.trials:
        (run_folder,) = (tmp_path / "study" / TRIALS).glob(f"{trial.variant}-*/run")
        lines = [line for line in read_metrics(run_folder / "metrics.jsonl") if "learning_rate" in line]
        assert (trial.steps, trial.seconds) == (lines[-1]["step"], lines[-1]["seconds"])
        assert all(line["seconds"] < 0.4 for line in lines[:-1])
        assert trial.seconds >= 0.4
        assert trial.tokens == 128 * trial.steps
        assert trial.curve[-1].step == trial.steps
        for before, after in itertools.pairwise(lines):
            share = before["seconds"] / 0.4
            if share > 0.05:  # after the warm-up; the last 30 % decay
                expected = 2e-3 * (1 - math.sqrt(max(share - 0.7, 0) / 0.3))
                assert after["learning_rate"] == pytest.approx(expected, rel=1e-6)
    assert run(path, tmp_path / "study")[2] == []


def test_hopeless_variants_stop_early_and_stay_undecided(write_study: Write, tmp_path: Path) -> None:
    variants = {"rope": {}, "frozen": {"optimizer.lr": 1e-9}}
    path = write_study(variants=variants, seeds=4, early_stopping=True)
    _, results, names = run(path, tmp_path / "study")
    frozen = sum(name.startswith("frozen") for name in names)
    assert 2 <= frozen < 4
    assert results.settings["stopped"] == ["frozen"]
    assert not results.missing
    assert sum(trial.variant == "rope" for trial in results.trials) == 4
    losses = {(m.variant, m.seed): m.value for m in results.measurements if m.measure == "held_out_loss"}
    assert all(losses["frozen", seed] > losses["rope", seed] for seed in range(frozen))
    (found,) = (found for found in judge(results) if found.measure == "held_out_loss")
    assert (found.verdict, found.seeds) == (UNDECIDED, frozen)
    assert "stopped early" in found.reason
    assert run(path, tmp_path / "study")[2] == []  # the seeds that were left out stay so
    assert StudyResults.load(tmp_path / "study").settings["stopped"] == ["frozen"]


# ---------------------------------------------------------------------- processes, signals and kills


def start(path: Path, folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "bertblocks", "lab", "run", str(path), "--folder", str(folder), "--threads", "1"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def steps_done(folder: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in folder.glob(f"{TRIALS}/*/run/metrics.jsonl"))


def wait_for_steps(folder: Path, steps: int, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and steps_done(folder) < steps:
        time.sleep(0.02)


def run_until_killed(path: Path, folder: Path, lines: int) -> None:
    """Runs a study until it has written so many lines of metrics, then kills this process."""
    write, written = MetricsFile.write, []

    def write_and_count(self: MetricsFile, line: dict[str, Any]) -> None:
        write(self, line)
        written.append(line)
        if len(written) == lines:
            os.kill(os.getpid(), signal.SIGKILL)

    MetricsFile.write = write_and_count  # type: ignore[method-assign]
    torch.set_num_threads(1)
    run(path, folder)


def test_a_study_that_was_killed_continues_to_the_same_report(finished: Path, tmp_path: Path) -> None:
    """Its process dies by SIGKILL in the third of four trials, after a checkpoint."""
    folder, path = tmp_path / "study", finished / "study.yaml"
    # a fork saves the seconds that imports take; like a worker of torch's DataLoader, it uses one thread
    process = get_context("fork").Process(target=run_until_killed, args=(path, folder, 34))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL
    assert len(StudyResults.load(folder).trials) == 2
    _, results, names = run(path, folder)
    assert names == ["rope-seed1", "none-seed1"]  # finished trials do not run again
    (log,) = (folder / "logs").glob("rope-seed1-*.txt")
    assert "Resuming from" in log.read_text()
    undisturbed = StudyResults.load(finished / "study")
    assert exact(results) == exact(undisturbed)
    assert summarize(results)["comparisons"] == summarize(undisturbed)["comparisons"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with longer trials, so that they still run when a signal comes, and its report."""
    from tests.lab.conftest import tiny_values

    folder = tmp_path_factory.mktemp("undisturbed")
    values = {**tiny_values(folder), "measures": EXACT}
    settings = values["changes"]["run"]
    settings |= {"evaluation": {"every": 100, "tokens": 500}, "checkpoints": {"every": 10}}
    values["changes"]["phases"] = [{"duration": "400 steps", "length": 32, "batch_tokens": 128}]
    (folder / "study.yaml").write_text(json.dumps(values))
    outcome, results, _ = run(folder / "study.yaml", folder / "study")
    assert not results.missing
    write_study_report(results, outcome.folder)
    return folder


def finish(path: Path, folder: Path) -> None:
    process = start(path, folder)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output


def assert_same_report(folder: Path, undisturbed: Path) -> None:
    assert exact(StudyResults.load(folder)) == exact(StudyResults.load(undisturbed))
    for name in ("comparisons.csv", "comparisons.md", "comparisons.tex"):
        assert (folder / name).read_text() == (undisturbed / name).read_text()
    assert (folder / "report.html").is_file()


@pytest.mark.slow
def test_a_killed_and_a_stopped_study_end_like_an_undisturbed_one(undisturbed: Path, tmp_path: Path) -> None:
    folder, path = tmp_path / "study", undisturbed / "study.yaml"
    process = start(path, folder)
    wait_for_steps(folder, 5, process)
    process.kill()  # the study alone: its trials notice, save and end
    process.communicate(timeout=120)  # waits for them
    process = start(path, folder)
    wait_for_steps(folder, steps_done(folder) + 15, process)
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 143, output
    finish(path, folder)
    assert_same_report(folder, undisturbed / "study")


@pytest.mark.slow
def test_twenty_kills_leave_the_same_report(undisturbed: Path, tmp_path: Path) -> None:
    """Kills the study, all of its processes, or one trial, a random time after a random number of further steps."""
    folder, path = tmp_path / "study", undisturbed / "study.yaml"
    chance = random.Random(0)
    for number in range(20):
        process = start(path, folder)
        wait_for_steps(folder, steps_done(folder) + chance.randint(1, 12), process)
        time.sleep(chance.uniform(0.0, 0.3))
        assert process.poll() is None, f"the study ended before kill {number}: {process.communicate()[0]}"
        if number % 3 == 0:
            process.kill()
        elif number % 3 == 1:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            for child in processes_of(process.pid)[-1:]:
                with contextlib.suppress(ProcessLookupError):  # that trial has ended already
                    os.kill(child, signal.SIGKILL)
            process.terminate()
        process.communicate()  # also waits for trials that save and end
    finish(path, folder)
    assert_same_report(folder, undisturbed / "study")


def processes_of(group: int) -> list[int]:
    found = subprocess.run(["pgrep", "-g", str(group)], capture_output=True, text=True, check=False)
    return sorted(int(line) for line in found.stdout.split())
