"""Servers under load: `python -m benchmarks.serve`, or one measure: `--only throughput --server ours`.

Starts each server in turn on this machine, compares its vectors with those of sentence-transformers, and asks it for
embeddings of all-MiniLM-L6-v2. Server and client share the CPUs. Results of all measures are collected in serve.json
(or serve-quick.json) in the folder `--output`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console

from benchmarks.inputs import data_folder
from benchmarks.load import PlainConnection, closed_loop
from benchmarks.sentences import checkpoint_folder, sentence_transformer
from benchmarks.serve_measures import MEASURES, Bench, run_loop
from benchmarks.serve_peers import LONGEST, SERVERS, Place, Server, copy_checkpoint, free_port, running
from benchmarks.serve_report import goals_sheet, measure_sheet
from benchmarks.serve_texts import Texts, load_texts
from bertblocks.core.environment import PACKAGES, describe_machine, describe_versions

ROOT = Path(__file__).parents[1]
COMPARED = 64
#: Requests before the first measured one.
WARM_UP = 300

console = Console(width=160)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument("--only", action="append", choices=MEASURES, help="a measure (all)")
    parser.add_argument("--server", action="append", choices=SERVERS, help="a server (all)")
    parser.add_argument("--quick", action="store_true", help="short runs that show that everything works")
    parser.add_argument("--seconds", type=float, help="length of a run of planned arrivals (8; quick: 2)")
    parser.add_argument("--steps", type=int, help="rates to try for the throughput (7; quick: 3)")
    parser.add_argument("--bound", type=float, default=250.0, help="p99 for the throughput, in milliseconds")
    parser.add_argument("--queries", type=int, help="short queries per run of the lanes and overhead (600; quick: 60)")
    parser.add_argument("--requests", type=int, help="requests of the memory measure (100,000; quick: 2,000)")
    parser.add_argument("--threads", type=int, default=2, help="CPUs for server and client, and threads of each model")
    parser.add_argument("--data", type=Path, help="folder with real texts: stsb/, banking77/, xquad/")
    parser.add_argument("--environments", type=Path, default=cache_folder(), help="folder for the peers' environments")
    parser.add_argument("--options", default="", help="further options of bertblocks serve, as one string")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    for name, full, quick in (("seconds", 8, 2), ("steps", 7, 3), ("queries", 600, 60), ("requests", 100_000, 2_000)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    return options


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bertblocks-bench"


def shown_command(options: argparse.Namespace) -> str:
    """The command line without the folders of this machine."""
    lists = [f"--{name} {value}" for name in ("only", "server") for value in getattr(options, name) or []]
    numbers = [f"--{name} {getattr(options, name):g}" for name in ("seconds", "bound", "threads")]
    further = [f"--options {shlex.quote(options.options)}"] if options.options else []
    quick = ["--quick"] if options.quick else []
    return " ".join(["python -m benchmarks.serve", *quick, *lists, *numbers, *further])


def share_cpus(count: int) -> None:
    """Limits this process, and so all servers that it starts, to `count` CPUs; and allows many connections."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def reference(texts: Sequence[str]) -> np.ndarray:
    model: Any = sentence_transformer()
    model.max_seq_length = LONGEST
    return model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)


def compare(server: Server, port: int, texts: Sequence[str], expected: np.ndarray) -> float:
    """The least cosine of the server's vectors to the expected ones; raises SystemExit if it is too low."""
    vectors = []
    with PlainConnection(port) as connection:
        for start in range(0, len(texts), 8):
            status, body = connection.ask(server.request(texts[start : start + 8]))
            if status != 200:
                raise SystemExit(f"{server.title} answers {status}: {body[:500]!r}")
            vectors += [item["embedding"] for item in sorted(json.loads(body)["data"], key=lambda item: item["index"])]
    found = np.asarray(vectors, np.float32)
    cosine = float(((found * expected).sum(1) / np.linalg.norm(found, axis=1)).min())
    if cosine < server.agreement:
        raise SystemExit(f"{server.title}: the least cosine to sentence-transformers is {cosine:.5f}.")
    return cosine


def measure_server(
    key: str, measures: Sequence[str], texts: Texts, place: Place, options: argparse.Namespace, expected: np.ndarray
) -> dict[str, dict[str, Any]]:
    """Starts a server and runs the measures that apply to it."""
    server = SERVERS[key]
    chosen = [measure for measure in measures if server.is_ours or not MEASURES[measure].is_ours_only]
    if not chosen:
        return {}
    found: dict[str, dict[str, Any]] = {}
    with running(server, place, place.model.parent / f"{key}.log") as pid:
        cosine = compare(server, place.port, texts.mixed[:COMPARED], expected)
        console.print(f"{server.title}: least cosine to sentence-transformers {cosine:.6f}")
        requests = [server.request(text) for text in texts.mixed]
        run_loop(closed_loop(place.port, requests, lambda run: run.sent < WARM_UP))
        bench = Bench(server, place, pid, texts, options, console)
        for measure in chosen:
            started = time.perf_counter()
            found[measure] = {"cosine": cosine, "load_before": os.getloadavg()[0], **MEASURES[measure].run(bench)}
            console.print(f"[dim]{server.title}, {measure}: {time.perf_counter() - started:.0f} s[/dim]")
    return found


def merge(file: Path, found: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Adds results to those of other measures and servers in the file."""
    results = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for measure, servers in found.items():
        results.setdefault(measure, {}).update(servers)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    transformers.logging.disable_progress_bar()
    share_cpus(options.threads)
    torch.set_num_threads(options.threads)
    measures, keys = options.only or list(MEASURES), options.server or list(SERVERS)
    about = {"command": shown_command(options), "machine": describe_machine() | {"threads": options.threads}}
    about |= {"versions": describe_versions((*PACKAGES, "sentence-transformers", "uvicorn", "starlette"))}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = copy_checkpoint(Path(checkpoint_folder()), Path(scratch))
        texts = load_texts(data_folder(options.data), model)
        console.print(about["command"], about["machine"], about["versions"])
        console.print(f"Mixed texts ({texts.source}): {texts.mean_tokens:.0f} tokens on average")
        expected = reference(texts.mixed[:COMPARED])
        for key in keys:
            place = Place(model, free_port(), options.threads, options.environments, shlex.split(options.options))
            found = measure_server(key, measures, texts, place, options, expected)
            records = {measure: {key: record | about} for measure, record in found.items()}
            results = merge(options.output / ("serve-quick.json" if options.quick else "serve.json"), records)
    for measure in measures:
        if results.get(measure):
            console.print(measure_sheet(measure, results[measure]).to_rich())
    console.print(goals_sheet(results).to_rich())
    return 0


if __name__ == "__main__":
    sys.exit(main())
