"""Writes docs/performance.md from docs/performance.json, the results of one run of the benchmarks.

`python -m benchmarks --write-docs` measures and then does this; `python docs/generate_performance.py` writes the page
again after a change of its text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

from benchmarks.report import (  # noqa: E402
    Sheet,
    accuracy_sheet,
    goals_sheet,
    growth_sheets,
    pretraining_sheet,
    profile_sheets,
    shapes_sheet,
    workload_sheet,
)

SOURCE = ROOT / "docs" / "performance.json"
TARGET = ROOT / "docs" / "performance.md"

INTRODUCTION = """\
# Performance

<!-- Written by docs/generate_performance.py from docs/performance.json. Change the text there, not this page. -->

How fast BertBlocks is on a plain CPU, beside transformers, ONNX Runtime, OpenVINO and sentence-transformers. All
numbers on this page come from one run of one command, but for a section that names its own. Yours will differ; measure
them:

```sh
make bench          # everything: tables, JSON and a picture in benchmarks/results
make bench-quick    # a part of it in 2 layers, in under two minutes
python -m benchmarks --only bert-ragged --layers 4 --rounds 5    # --list prints all names
```
"""

METHOD = """\
## How it is measured

- **Same weights, inputs and threads.** Models of transformers have random weights, the same in every run. BertBlocks
  reads them by `from_huggingface`; ONNX Runtime and OpenVINO get one ONNX export of them. Embeddings of texts use a
  real checkpoint, all-MiniLM-L6-v2, and real texts: those of the folder that `--data` or `BERTBLOCKS_BENCH_DATA` names,
  or else docstrings of Python's standard library.
- **Outputs first.** Before anything is timed, each result is compared with that of transformers. fp32 may differ by
  1e-4 of the largest number, for training in loss and gradient; tokens of int8 must have a mean cosine of 0.99.
  What differs more is not timed, and the run fails.
- **Interleaved.** In every round each contender runs once, in rotating order, and so does a matrix product of
  2,048 x 2,048 x 2,048 in fp32, by MKL or oneDNN, whichever is faster: the *sgemm* rate of the machine at that time.
  Times are medians with quartiles. Ratios are taken round by round, then their median.
- **Useful GFLOP/s** count matrix products of real tokens, and pairs of tokens that see each other, alone: padding is
  work, but no use.
- **Memory** is what the first call adds to the peak of a fresh process that holds nothing but the model.
- A contender that is not installed or cannot do the work is named with its reason.

Ratios mean little without what they stand against:

| Baseline | What it is |
| --- | --- |
| transformers sdpa, padded | `AutoModel` with its default attention, one batch padded to its longest text |
| transformers sdpa, sorted batches of 8 | the same, eight texts at a time, sorted by length, as a careful user does |
| sparse_prediction | an option of transformers' ModernBERT that scores labelled tokens alone |
| ONNX Runtime int8 (dynamic) | `quantize_dynamic`, weights per channel, activations per tensor on the fly |
| OpenVINO int8 (static) | NNCF's post-training quantisation, ranges of activations measured beforehand |
"""

GROWTH = """\
## Cost against length

Three layers of ModernBERT-base: local ones with a window of 128 tokens, global ones, or one global and two local. The
exponent is the slope of log time against log length: 1 is linear, 2 is quadratic.
"""

PROFILE = """\
## Where the time goes

Shares of one fp32 forward pass by operation. The last columns hold what the same matrix products would take at the
sgemm rate of a large square product, and how near the pass is to that: no fp32 pass can take less than this bound.
int8 goes below it because the CPU has units that multiply bytes.
"""

LIMITS = """\
## What bounds it, and what was tried

In fp32 nearly all of the time is matrix products of the linear layers, which already run at the rate that the profile
above shows beside sgemm; what is left is attention, activations and norms, a few per cent each. Where torch's products
go through MKL on a CPU that is not Intel's, they go through oneDNN here. A ratio against padded batches is bounded by
the padding factor times that gain: texts of equal length can only gain the latter.

At 8,192 tokens about half of the time is attention, nearly all of it in the global layers, where both libraries run
the same kernel of torch. Its products alone would take two thirds of its time at the sgemm rate; the rest goes into 805
million exponentials for a layer of 12 heads. So only the local layers and the linear layers can gain there.

Tried on this kind of CPU and left out, because they did not win:

- keys and values run on to multiples of 16 tokens: no gain;
- explicit blocks for long global attention: 10 to 15 % slower than torch's kernel;
- weights packed beforehand for oneDNN: about 5 % faster for twice the memory of the weights;
- RoPE as a complex product: the fastest alone, but it needs the rows of query and key weights in another order than
  checkpoints have them;
- bfloat16 inside the fp32 rows: it rounds. `Predictor` chooses it on CPUs with units for it, and says so.

Ratios of masked-LM training depend on how much transformers pads: the ragged rows here have a padding factor of 4.
Pretraining and fine-tuning give transformers the precision that BertBlocks takes by itself, bf16 on this CPU, from
which both gain.
"""


def render() -> str:
    """The page of the run that was recorded; a part that it left out has no section."""
    run = json.loads(SOURCE.read_text(encoding="utf-8"))
    parts = [INTRODUCTION, machine_section(run), "## Goals\n", goals_sheet(run).to_markdown() + "\n", METHOD]
    parts += ["## Workloads\n\n![Speeds of all contenders](performance.svg)\n"]
    parts += [section(workload_sheet(result)) for result in run["rows"].values()]
    if run["stacks"]:
        parts += [GROWTH, *(section(sheet) for sheet in growth_sheets(run["stacks"]))]
    if run["shapes"]:
        parts += ["## Uniform shapes\n", described(shapes_sheet(run["shapes"]))]
    if run["accuracy"]:
        parts += ["## Accuracy of int8\n", described(accuracy_sheet(run["accuracy"]))]
    if run["pretraining"]:
        parts += ["## Pretraining\n", described(pretraining_sheet(run["pretraining"]))]
        if command := run["pretraining"].get("command"):
            parts.append(f"Measured by itself, later than the rest: `{command}`.\n")
    if run["profiles"]:
        parts += [PROFILE, *(section(sheet) for sheet in profile_sheets(run["profiles"])), LIMITS]
    return "\n".join(parts)


def section(sheet: Sheet) -> str:
    """Its title up to the first bracket is the heading; what stands in brackets comes below it."""
    name, _, details = sheet.title.rstrip(")").rpartition(" (")
    heading, below = (name, f"{details}\n\n") if name else (details, "")
    return f"### {heading}\n\n{below}{sheet.to_markdown()}\n"


def described(sheet: Sheet) -> str:
    return f"{sheet.title}.\n\n{sheet.to_markdown()}\n"


def machine_section(run: dict[str, Any]) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in run["machine"].items())
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return (
        f"## This run\n\n- Machine: {machine}\n- Versions: {versions}\n- Command: `{run['command']}`, "
        f"{run['minutes']:.1f} minutes\n"
    )


def main() -> None:
    TARGET.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
