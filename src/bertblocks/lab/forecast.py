"""What a study will take and what it can find, before anything runs: time, memory, minimum detectable effect."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bertblocks.core.cpu import allowed_cpus
from bertblocks.lab.budget import count_cost
from bertblocks.lab.plan import Arm, StudyPlan
from bertblocks.lab.results import STUDY_FILE, StudyResults
from bertblocks.lab.statistics.power import minimum_detectable_effect
from bertblocks.lab.statistics.verdicts import judge
from bertblocks.models import TASK_MODELS
from bertblocks.training.build import expected_config
from bertblocks.training.estimate import GPUS, estimate_run
from bertblocks.training.training_plan import TrainingPlan

#: The speed is measured with about this many FLOPs, in whole rows.
MEASURED_FLOPS = 2e10


@dataclass(frozen=True)
class Forecast:
    """What a study will take, and what it can find."""

    #: Finished and all trials, searches included.
    done: int
    trials: int
    #: FLOPs of the trials that are missing, their number at a time, and their time.
    flops: float
    at_a_time: int
    seconds: float
    #: Bytes of all trials that run at a time.
    memory: float
    #: The smallest difference in the deciding measure that is found with the study's power, None if the noise between
    #: seeds is unknown, and the same in standard deviations of paired differences.
    effect: float | None
    effect_in_deviations: float


def forecast(plan: StudyPlan, folder: Path, gpu: str | None = None, threads: int | None = None) -> Forecast:
    """Measures one training step on this machine or, for a kind of GPU, assumes the usual share of its peak."""
    study = plan.source.study
    arms, seeds = plan.arms, len(study.seed_list)
    results = StudyResults.load(folder) if (folder / STUDY_FILE).is_file() else None
    done = {(trial.variant, trial.seed, trial.size) for trial in results.trials} if results else set()
    missing = [arm for arm in arms for seed in study.seed_list if (arm.variant.name, seed, arm.size) not in done]
    searched = study.search.runs * study.search.share if study.search and not (results and results.searches) else 0
    flops = sum(arm.cost.flops for arm in missing)
    if searched:
        flops += searched * sum(count_cost(arm.searched).flops for arm in arms)
    is_timed = study.budget.equal == "seconds" and not torch.cuda.is_available()
    threads = threads or max(allowed_cpus() // (1 if is_timed else len(arms) * seeds), 1)
    slots = 1 if is_timed else torch.cuda.device_count() or max(allowed_cpus() // threads, 1)
    if gpu is not None:
        slots, speed = 1, GPUS[gpu].flops * GPUS[gpu].utilization
    else:
        speed = _measure_speed(arms[0], threads)
    seconds = flops / speed / min(slots, max(len(missing), 1))
    if study.budget.equal == "seconds":
        seconds = (study.budget.value or 0) * (len(missing) + searched * len(arms)) / slots
        flops = seconds * slots * speed
    comparisons = max(len(arms) - len(study.sizes or [None]), 1)
    deviations = minimum_detectable_effect(1.0, seeds, study.level / comparisons, study.power)
    noise = study.noise or _noise(results)
    searches = study.search.runs * len(arms) if study.search else 0
    return Forecast(
        done=len(arms) * seeds - len(missing),
        trials=len(arms) * seeds + searches,
        flops=flops,
        at_a_time=slots,
        seconds=seconds,
        memory=slots * max(estimate_run(arm.recipe, "h100", 1).memory for arm in arms),
        effect=None if noise is None else deviations * noise,
        effect_in_deviations=deviations,
    )


def _noise(results: StudyResults | None) -> float | None:
    """The typical standard deviation between seeds of the paired differences that a study has found so far."""
    if results is None:
        return None
    deciding = next(iter(results.measures))
    found = [
        statistics.stdev(comparison.by_seed)
        for comparison in judge(results)
        if comparison.measure == deciding and len(comparison.by_seed) > 1
    ]
    return statistics.median(found) if found else None


def _measure_speed(arm: Arm, threads: int) -> float:
    """FLOPs per second of a forward and backward pass of the baseline, on random tokens."""
    recipe = arm.recipe
    phase = TrainingPlan(recipe).phases[0]
    per_token = arm.cost.flops / arm.cost.tokens
    rows = min(max(round(MEASURED_FLOPS / per_token / phase.length), 1), phase.batches.rows)
    config = expected_config(recipe)
    model = TASK_MODELS["masked-lm"](config).train().to("cuda" if torch.cuda.is_available() else "cpu")
    ids = torch.randint(0, config.vocab_size, (rows * phase.length,), device=model.device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=model.device) * phase.length
    labels = torch.where(torch.rand(len(ids), device=model.device) < phase.objective.labelled_share, ids, -100)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(2):  # the first is a warm-up
            started = time.perf_counter()
            model(input_ids=ids, cu_seqlens=starts, labels=labels).loss.backward()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
    finally:
        torch.set_num_threads(before)
    return per_token * len(ids) / seconds
