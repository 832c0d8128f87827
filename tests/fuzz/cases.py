"""Cases: a folder with damaged files and a command that reads them, both drawn from the case's number."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz.mutations import HOSTILE, hostile_value, mutate_bytes, mutate_file, mutate_text, mutate_value

TASKS = ["base", "masked-lm", "sequence-classification", "token-classification", "question-answering"]
TEXT = "plain words here"

#: Commands that work on an intact checkpoint of each kind.
MODEL_COMMANDS: dict[str, list[list[str]]] = {
    "own": [["fill-mask", "model", "plain [MASK] here"], ["embed", "model", TEXT, "--json"]],
    "diffusion": [["generate", "model", "plain", "--length", "4", "--steps", "2", "--seed", "0"]],
    "classifier": [["classify", "model", TEXT], ["classify", "model", TEXT, "--int8"]],
    "tagger": [["tag", "model", TEXT]],
    "reader": [["answer", "model", TEXT, "--question", "who"]],
    "modern": [["fill-mask", "model", "plain [MASK] here"], ["convert", "model", "out", "--to", "bertblocks"]],
    "sharded": [["embed", "model", TEXT], ["merge", "other", "model", "--output", "out"]],
    "sentence": [["embed", "model", TEXT, "--output", "out.npy"], ["embed", "model", TEXT, "--json"]],
    "int8": [["classify", "model", TEXT]],
}
#: Commands that read any checkpoint.
ANY_MODEL = [
    ["convert", "model", "out"],
    ["convert", "model", "out", "--to", "bertblocks"],
    ["quantize", "model", "out", "--min-cosine", "0"],
    ["merge", "other", "model", "--output", "out"],
    ["describe", "model"],
    ["embed", "model", TEXT],
    ["evaluate", "model", "--task", "pppl", "--data", "texts.txt"],
    ["data", "prepare", "out", "texts.txt", "--tokenizer", "model", "--workers", "1"],
]
#: Data files by what they hold, and the commands that read them; FILE stands for the file.
TUNE = ["epochs=0.1", "batch_size=4", "max_length=16"]
DATA_COMMANDS: dict[str, list[list[str]]] = {
    "rows": [
        ["classify", "classifier", "--file", "FILE", "--json"],
        ["classify", "classifier", "--file", "FILE", "--on-error", "skip"],
        ["classify", "classifier", "--file", "FILE", "--output", "out.csv"],
        ["embed", "sentence", "--file", "FILE", "--output", "out.parquet"],
        ["evaluate", "classifier", "--task", "classify", "--data", "FILE"],
        ["evaluate", "own", "--task", "pppl", "--data", "FILE"],
        ["finetune", "classify", "--model", "classifier", "--train", "FILE", "--output", "out", *TUNE],
        ["data", "prepare", "out", "FILE", "--tokenizer", "classifier", "--workers", "1", "--max-bad-share", "1"],
        ["data", "prepare", "out", "FILE", "--tokenizer", "classifier", "--workers", "1"],
        ["tokenizer", "train", "out", "FILE", "--vocab-size", "64", "--max-megabytes", "1", "--workers", "1"],
    ],
    "tagged": [
        ["evaluate", "tagger", "--task", "tag", "--data", "FILE"],
        ["finetune", "tag", "--model", "tagger", "--train", "FILE", "--output", "out", *TUNE],
    ],
    "questions": [
        ["answer", "reader", "--file", "FILE", "--json"],
        ["evaluate", "reader", "--task", "answer", "--data", "FILE"],
        ["finetune", "answer", "--model", "reader", "--train", "FILE", "--output", "out", *TUNE],
    ],
    "pairs": [
        ["evaluate", "sentence", "--task", "embed", "--data", "FILE"],
        ["finetune", "embed", "--model", "sentence", "--train", "FILE", "--output", "out", *TUNE],
    ],
    "texts": [
        ["embed", "sentence", "--file", "FILE"],
        ["quantize", "classifier", "out", "--texts", "FILE", "--min-cosine", "0"],
        ["tokenizer", "train", "out", "FILE", "--vocab-size", "64", "--kind", "bpe", "--workers", "1"],
        ["data", "prepare", "out", "FILE", "--tokenizer", "own", "--workers", "1", "--one-per", "line"],
        ["evaluate", "own", "--task", "pppl", "--data", "FILE"],
    ],
}
DATA_COMMANDS["squad"] = DATA_COMMANDS["questions"]

#: Command lines that work, to be changed; the files and models of a case are next to them.
COMMAND_LINES = [
    *(command for commands in MODEL_COMMANDS.values() for command in commands),
    *ANY_MODEL,
    *(["rows.csv" if part == "FILE" else part for part in command] for command in DATA_COMMANDS["rows"]),
    ["describe", "mini", "--length", "64", "--json"],
    ["compare", "mini", "modernbert-base", "--task", "masked-lm"],
    ["plan", "full.yaml", "--gpu", "a100", "--count", "2", "--utilization", "0.3"],
    ["plan", "demo", "optimizer.lr=2e-3", "phases.0.duration=10"],
    ["finetune", "classify", "list"],
    ["finetune", "tag", "--help"],
    ["schema"],
    ["families"],
    ["presets"],
    ["--version"],
    ["evaluate", "own", "--task", "needle", "lengths=[16]", "depths=[0]", "samples=1"],
]
#: Parts that do not belong into a command line.
HOSTILE_ARGUMENTS = [
    *("--", "-", "--json", "--help", "--nosuch", "-x", "--limit", "--limit=-1", "--limit=1e9", "--device=quantum"),
    *("--dtype=float32", "--dtype=float7", "--output=/nonexistent/out", "--output=.", "--file=.", "--threads=0"),
    *("--column=text=nosuch", "--column==", "--read=format=csv", "--read=encoding=rot13", "--read=quote=xx"),
    *("--read=delimiter=", "--too-long=error", "--int8", "--on-error=skip", "--task=nosuch", "--weights=1,nan"),
    *("--seed=99999999999999999999", "--length=0", "--top-p=-1", "--temperature=inf", "--vocab-size=17"),
    *("optimizer.lr=x", "phases.9.duration=1", "a=b", "=", "a.b.c=[1", "model.config.hidden_size=7", "epochs=-1"),
    *("run.seed=-1", "max_length=1", "lora_rank=0", "seed=1.5", "label=nosuch", "lengths=[0]", "depths=[2]"),
]


@dataclass(frozen=True)
class Case:
    """A command, run in a folder that `prepare` filled."""

    number: int
    kind: str
    arguments: list[str]
    stdin: bytes = b""
    #: What was changed, for the report of a failure.
    note: str = ""
    #: What a command that fails may leave, because it would resume from there.
    may_leave: tuple[str, ...] = field(default=())


def make_case(number: int, seeds: Path, folder: Path) -> Case:
    """Fill `folder` and draw a command. Any range of numbers holds all kinds."""
    draw = random.Random(number)
    kind = list(KINDS)[number % len(KINDS)]
    return KINDS[kind](number, draw, seeds, folder)


def _config(number: int, draw: random.Random, seeds: Path, folder: Path) -> Case:
    path = folder / "config.json"
    source = draw.choice(sorted((seeds / "configs").iterdir()))
    shutil.copy(source, path)
    mutate_file(draw, path)
    command = draw.choice([["describe", "config.json"], ["compare", "config.json", "mini"]])
    options = draw.choice([[], ["--json"], ["--task", draw.choice(TASKS)]])
    return Case(number, "config", [*command, *options], note=source.name)


def _checkpoint(number: int, draw: random.Random, seeds: Path, folder: Path) -> Case:
    kind = draw.choice(list(MODEL_COMMANDS))
    for name in ("model", "other"):
        shutil.copytree(seeds / "models" / kind, folder / name)
    shutil.copy(seeds / "data" / "texts.txt", folder)
    files = sorted(path for path in (folder / "model").rglob("*") if path.is_file())
    path = draw.choice(files)
    mutate_file(draw, path)
    command = draw.choice(MODEL_COMMANDS[kind] * 2 + ANY_MODEL)
    return Case(number, "checkpoint", command, note=f"{kind}: {path.relative_to(folder)}")


def _recipe(number: int, draw: random.Random, seeds: Path, folder: Path) -> Case:
    name = draw.choice(["full", "full", "short", "muon"])
    values = yaml.safe_load((seeds / "recipes" / f"{name}.yaml").read_text())
    shutil.copy(seeds / "data" / "texts.txt", folder)
    text = _to_yaml(mutate_value(draw, values), allow_unicode=draw.random() < 0.5)
    trick = draw.random()
    if trick < 0.1:
        text = text.replace(": ", f": {draw.choice(YAML_TRICKS)}", 1)
    elif trick < 0.15:
        text = draw.choice(YAML_TRICKS)
    data = mutate_text(draw, text) if draw.random() < 0.2 else text.encode("utf-8", "surrogatepass")
    (folder / "recipe.yaml").write_bytes(mutate_bytes(draw, data) if draw.random() < 0.1 else data)
    if name != "full" or draw.random() < 0.6:
        return Case(number, "recipe", ["plan", "recipe.yaml"], note=name)
    # a valid recipe may be large: the parts that say how large are as they were
    kept = {"model": values["model"], "phases": values["phases"]}
    overrides = [f"{key}={json.dumps(value)}" for key, value in kept.items()]
    overrides += ["corpus.sources.0.files=[texts.txt]", "corpus.workers=1", "run.folder=run"]
    return Case(number, "recipe", ["pretrain", "recipe.yaml", *overrides], note=name, may_leave=("run",))


def _to_yaml(value: Any, allow_unicode: bool) -> str:
    try:
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=allow_unicode)
    except RecursionError:  # JSON is YAML too
        return json.dumps(value)


YAML_TRICKS = [
    "!!python/object/apply:os.system [id]",
    "&a [*a]",
    "&a [x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: [*c,*c,*c,*c,*c,*c,*c,*c]",
    "? [1, 2]\n: 3\n",
    "[" * 5000 + "]" * 5000,
    "!!binary x",
    "2001-99-99",
    "!!set {a, b}",
    "<<: 3",
    "1e999",
    "0o777",
    "%YAML 9.9\n---\n",
    "--- a\n--- b\n",
    "!!timestamp x",
]


def _data(number: int, draw: random.Random, seeds: Path, folder: Path) -> Case:
    source = draw.choice(sorted((seeds / "data").iterdir()))
    kind = source.name.partition(".")[0]
    command = draw.choice(DATA_COMMANDS[kind])
    for model in {"classifier", "sentence", "own", "tagger", "reader"} & set(command):
        shutil.copytree(seeds / "models" / model, folder / model)
    path = folder / source.name
    shutil.copy(source, path)
    mutate_file(draw, path)
    resumes = ("out",) if command[0] in ("finetune", "data") else tuple(f"{part}.partial" for part in command)
    arguments = [path.name if part == "FILE" else part for part in command]
    return Case(number, "data", arguments, note=source.name, may_leave=resumes)


def _command_line(number: int, draw: random.Random, seeds: Path, folder: Path) -> Case:
    arguments = list(draw.choice(COMMAND_LINES))
    for _ in range(draw.choice([1, 1, 2, 3])):
        place = draw.randrange(len(arguments) + 1)
        part = draw.choice(HOSTILE_ARGUMENTS) if draw.random() < 0.6 else _hostile_text(draw)
        change = draw.randrange(4)
        if change == 0 and place < len(arguments):
            del arguments[place]
        elif change == 1 and place < len(arguments):
            arguments[place] = part
        elif change == 2 and place < len(arguments):
            arguments[place] = arguments[place][: draw.randrange(len(arguments[place]) + 1)]
        else:
            arguments.insert(place, part)
    for model in (seeds / "models").iterdir():
        if model.name in arguments:
            shutil.copytree(model, folder / model.name)
    if "model" in arguments:
        kind = draw.choice(list(MODEL_COMMANDS))
        for name in ("model", "other"):
            shutil.copytree(seeds / "models" / kind, folder / name)
    for path in (seeds / "data" / "texts.txt", seeds / "data" / "rows.csv", seeds / "recipes" / "full.yaml"):
        shutil.copy(path, folder)
    stdin = draw.choice([b"", b"plain words\n", b"\xff\xfe\x00\n" * 3, mutate_bytes(draw, b"two leading\nwords\n")])
    resumes = ("out", "out.csv", "out.parquet", "out.npy", "runs")
    return Case(number, "command line", arguments, stdin, may_leave=resumes)


def _hostile_text(draw: random.Random) -> str:
    """A text that the system allows as an argument."""
    value: Any = hostile_value(draw) if draw.random() < 0.3 else draw.choice(HOSTILE)
    text = repr(value) if isinstance(value, int) and value > 2**64 else str(value)
    text = text.replace("\x00", "").encode("utf-8", "replace").decode()
    return text[: draw.choice([20, 2000])]


KINDS: dict[str, Callable[[int, random.Random, Path, Path], Case]] = {
    "config": _config,
    "checkpoint": _checkpoint,
    "data": _data,
    "recipe": _recipe,
    "checkpoint again": _checkpoint,
    "data again": _data,
    "command line": _command_line,
}
