"""Runs the benchmarks: `python -m benchmarks --quick`, or `--only bert-ragged`, or everything.

Prints tables and writes bench.json, bench.svg and bench.html to the folder `--output`; `--write-docs` also writes
docs/performance.md. Fails if outputs differ from the reference.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from benchmarks import accuracy, catalogue, memory, profile, start, workload
from benchmarks.inputs import data_folder
from benchmarks.measure import can_measure_memory
from benchmarks.picture import draw, write_bench_page
from benchmarks.report import study_sheets, workload_sheet
from benchmarks.workload import Settings
from bertblocks.core.environment import PACKAGES, describe_machine, describe_versions
from bertblocks.core.registry import nearest
from bertblocks.nn.ops.cpu import flushed_denormals

ROOT = Path(__file__).parents[1]


def pretraining(settings: Settings) -> list[dict[str, Any]]:
    from benchmarks import pretrain  # the training stack, which nothing else here needs

    return pretrain.compare(min(settings.rounds, 3))


def finetuning(settings: Settings) -> list[dict[str, Any]]:
    from benchmarks import finetune

    return finetune.compare(settings, None)


def lora(settings: Settings) -> list[dict[str, Any]]:
    from benchmarks import finetune

    return finetune.compare(settings, finetune.LORA_RANK)


#: Studies that are not workloads.
STUDIES: dict[str, Callable[[Settings], Any]] = {
    "accuracy": accuracy.int8_accuracy,
    "pretraining": pretraining,
    "finetuning": finetuning,
    "lora": lora,
    "start": lambda settings: start.measure(settings.rounds),
    "profiles": profile.profiles,
}
GROUPS = {"rows": catalogue.ROWS, "stacks": catalogue.STACKS, "shapes": catalogue.SHAPES}
#: What the quick mode runs: some of each kind, with 2 layers.
QUICK = ("bert-ragged", "masked-lm-bert-ragged", "sentences", "mixed-???", "sweep-bert-8x[138]*")
QUICK_LAYERS, QUICK_TEXTS = 2, 100

#: Libraries that are compared.
PEERS = ("sentence-transformers", "onnxruntime", "onnx", "openvino", "nncf")

console = Console(width=160)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="some workloads with 2 layers, without memory, in under two minutes"
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="a group, workload or study, or a pattern")
    parser.add_argument("--list", action="store_true", help="print all names and exit")
    parser.add_argument("--rounds", type=int, help="measured rounds per workload, fewer if they are slow (7; quick: 3)")
    parser.add_argument("--seconds", type=float, help="time limit for the rounds of a workload (25; quick: 4)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (all cores)")
    parser.add_argument("--layers", type=int, help="layers of every model (depends on the workload; quick: 2)")
    parser.add_argument("--data", type=Path, help="folder with real texts: stsb/, banking77/, xquad/")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    parser.add_argument("--resume", action="store_true", help="continue the same command after an interruption")
    parser.add_argument("--write-docs", action="store_true", help="write docs/performance.md from this run")
    return parser.parse_args(arguments)


def select(patterns: Sequence[str]) -> list[str]:
    """Names of the selected workloads and studies, in the order of the catalogue."""
    names = [name for group in GROUPS.values() for name in group] + list(STUDIES)
    chosen = set()
    for pattern in patterns:
        found = list(GROUPS[pattern]) if pattern in GROUPS else fnmatch.filter(names, pattern)
        if not found:
            hint = nearest(pattern, [*GROUPS, *names])
            raise SystemExit(f"--only is {pattern!r}, which matches nothing{hint}; --list prints all names.")
        chosen.update(found)
    return [name for name in names if name in chosen]


def empty_run(command: str) -> dict[str, Any]:
    groups: dict[str, Any] = {group: {} for group in GROUPS} | {study: {} for study in STUDIES}
    return groups | {"command": command, "minutes": 0.0}


def continued_run(file: Path, command: str) -> dict[str, Any]:
    """The results of the interrupted run of the same command."""
    if not file.is_file():
        raise SystemExit(f"--resume: {file} does not exist, so there is nothing to continue.")
    run = json.loads(file.read_text(encoding="utf-8"))
    if run["command"] != command:
        raise SystemExit(f"--resume: {file} comes from `{run['command']}`, but this is `{command}`.")
    return run


def run_all(names: Sequence[str], settings: Settings, with_memory: bool, run: dict[str, Any], file: Path) -> None:
    """Adds the results that `run` does not have yet, and prints and writes each as it comes."""
    for name in names:
        group = next((group for group, members in GROUPS.items() if name in members), None)
        if run[name] if group is None else name in run[group]:
            continue
        start = time.perf_counter()
        with console.status(name):
            if group is None:
                run[name] = STUDIES[name](settings)
            else:
                run[group][name] = run_one(name, GROUPS[group][name], settings, with_memory)
                if group == "rows":
                    console.print(workload_sheet(run[group][name]).to_rich())
        seconds = time.perf_counter() - start
        run["minutes"] = round(run["minutes"] + seconds / 60, 2)
        file.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        console.print(f"[dim]{name}: {seconds:.0f} s[/dim]")


def run_one(name: str, build: catalogue.Builder, settings: Settings, with_memory: bool) -> dict[str, Any]:
    made = build(settings)
    result = workload.run(made, settings)
    if with_memory:
        for contender in made.memory:
            result["contenders"][contender]["memory"] = memory.in_fresh_process(name, contender, settings)
        for goal in result["goals"]:
            if goal["kind"] == "memory":
                own, other = (result["contenders"][goal[side]]["memory"] for side in ("contender", "against"))
                goal["reached"] = {"median": other / own}
    return result


def disagreeing(run: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {contender}"
        for group in GROUPS
        for name, result in run[group].items()
        for contender, found in result["contenders"].items()
        if "missing" in found and ("difference" in found or "cosine_mean" in found)
    ]


@flushed_denormals()
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        print("\n".join(select([*GROUPS, *STUDIES])))
        return 0
    patterns = options.only or (QUICK if options.quick else [*GROUPS, *STUDIES])
    names = select(patterns)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    file, command = options.output / "bench.json", shown_command(options)
    run = continued_run(file, command) if options.resume else empty_run(command)
    run |= {"machine": describe_machine() | {"threads": options.threads}}
    run |= {"versions": describe_versions((*PACKAGES, *PEERS))}
    with tempfile.TemporaryDirectory() as scratch:
        settings = Settings(
            options.rounds or (3 if options.quick else 7),
            options.seconds or (4.0 if options.quick else 25.0),
            options.threads,
            options.layers or (QUICK_LAYERS if options.quick else None),
            Path(scratch),
            data_folder(options.data),
            QUICK_TEXTS if options.quick else 1000,
        )
        run_all(names, settings, can_measure_memory() and not options.quick, run, file)
    finish(run, options)
    for failed in disagreeing(run):
        console.print(f"[red]Outputs differ from the reference, so these were not timed: {failed}[/red]")
    return 1 if disagreeing(run) else 0


def shown_command(options: argparse.Namespace) -> str:
    """The command line without the folders of this machine."""
    flags = [f"--{name.replace('_', '-')}" for name in ("quick", "write_docs") if getattr(options, name)]
    numbers = [f"--{name} {value:g}" for name in ("rounds", "seconds", "layers") if (value := getattr(options, name))]
    only = [f"--only '{pattern}'" for pattern in options.only or []]
    return " ".join(["python -m benchmarks", *flags, *only, *numbers, f"--threads {options.threads}"])


def finish(run: dict[str, Any], options: argparse.Namespace) -> None:
    """Prints the tables over several workloads, and writes the charts and the pages."""
    for sheet in study_sheets(run):
        console.print(sheet.to_rich())
    (options.output / "bench.svg").write_text(draw(run), encoding="utf-8")
    write_bench_page(run, options.output / "bench.html")
    console.print(f"Wrote bench.json, .svg and .html to {options.output}; {run['minutes']:.1f} minutes in all.")
    if options.write_docs:
        for suffix in ("json", "svg"):
            shutil.copyfile(options.output / f"bench.{suffix}", ROOT / "docs" / f"performance.{suffix}")
        subprocess.run([sys.executable, ROOT / "docs" / "generate_performance.py"], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
