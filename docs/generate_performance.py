"""Writes docs/performance.md from docs/performance.json, the results of one run of the benchmarks.

`python -m benchmarks --write-docs` measures and then runs this script. Run `python docs/generate_performance.py` after
you change the text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks are not part of the installed package

from benchmarks.report import (  # noqa: E402
    RACES,
    Sheet,
    accuracy_sheet,
    goals_sheet,
    growth_sheets,
    profile_sheets,
    race_sheet,
    shapes_sheet,
    start_sheet,
    workload_sheet,
)

SOURCE = ROOT / "docs" / "performance.json"
TARGET = ROOT / "docs" / "performance.md"

INTRODUCTION = """\
# Performance

<!-- Written by docs/generate_performance.py from docs/performance.json. Change the text there, not this page. -->

This page compares BertBlocks on a plain CPU with transformers, ONNX Runtime, OpenVINO and sentence-transformers. All
numbers come from one run of one command, unless a section names another. Your numbers will differ, so measure them:

```sh
make bench          # everything: tables, JSON and a chart in benchmarks/results
make bench-quick    # some workloads with 2 layers, in under two minutes
python -m benchmarks --only bert-ragged --layers 4 --rounds 5    # --list prints all names
```
"""

WITHOUT_VNNI = """\
The goals of int8 against fp32 libraries are for CPUs with instructions for products of bytes (VNNI), whose int8
products are four times as fast as fp32 ones. This CPU has none, so its int8 products can be at most twice as fast; its
goals for bf16 cannot be measured.
"""

METHOD = """\
## How it is measured

- **Same weights, inputs and threads.** The transformers models have random weights, the same in every run. BertBlocks
  reads them with `from_huggingface`. ONNX Runtime and OpenVINO share one ONNX export. The embedding workloads use a
  published checkpoint, all-MiniLM-L6-v2, and real texts: those in the folder given by `--data` or
  `BERTBLOCKS_BENCH_DATA`, or docstrings of Python's standard library.
- **Outputs first.** Before anything is timed, each output is compared with that of transformers. In fp32 the difference
  may be at most 1e-4 of the largest number; in training this applies to the loss and the gradient. With int8 the mean
  cosine of tokens must be at least 0.99. If a contender differs more, it is not timed and the run fails.
- **Interleaved.** In every round each contender runs once, in rotating order. So does a matrix product of
  2,048 x 2,048 x 2,048 in fp32, by MKL or oneDNN, whichever is faster. It gives the *sgemm* rate of the machine at that
  time. Times are medians with quartiles. Ratios are computed per round, and then their median is taken.
- **Useful GFLOP/s** count only the matrix products of real tokens and the pairs of tokens that see each other. Work on
  padding does not count.
- **oneDNN** keeps its default of 1,024 compiled products for every contender. By itself BertBlocks keeps 256, to save
  memory.
- **Memory** is what the first call adds to the peak of a new process that holds nothing but the model.
- If a contender is not installed or cannot do the work, the table says why.

The baselines of the ratios:

| Baseline | What it is |
| --- | --- |
| transformers sdpa, padded | `AutoModel` with its default attention, one batch padded to its longest text |
| transformers sdpa, sorted batches of 8 | the same, but eight texts at a time, sorted by length |
| sparse_prediction | an option of transformers' ModernBERT that scores only labelled tokens |
| ONNX Runtime int8 (dynamic) | `quantize_dynamic`: weights per channel, activations per tensor at run time |
| OpenVINO int8 (static) | NNCF's post-training quantization, with activation ranges measured beforehand |
"""

GROWTH = """\
## Cost and length

Three layers of ModernBERT-base: all local with a window of 128 tokens, all global, or one global and two local. The
exponent is the slope of log time over log length: 1 is linear, 2 is quadratic.
"""

PROFILE = """\
## Where the time goes

The share of each operation in one fp32 forward pass. The last columns show how long the same matrix products would take
at the sgemm rate of a large square product, and how close the pass comes to that. No fp32 pass can be faster than this
bound. int8 can, because the CPU has units that multiply bytes.
"""

LIMITS = """\
## What limits the speed, and what was tried

In fp32 nearly all of the time goes into the matrix products of the linear layers, which already run close to the sgemm
rate, as the profile shows. Attention, activations and norms take a few per cent each. On CPUs with AVX512 from other
vendors than Intel, torch's products go through MKL; BertBlocks uses oneDNN there, which is faster. The speed-up over
padded batches is at most the padding factor times this gain. Texts of equal length gain only the second part.

At 8,192 tokens most of the time is attention in the global layers. A C kernel of blocks of keys keeps the scores in the
caches and computes exponentials in vectors; on a 2-core Zen 5 (AVX512) it makes three layers 1.5 times as fast as
torch's kernel does, and batches of shorter texts 1.0 to 1.14 times as fast as plain products. What is left are the
products of queries and keys themselves, at about 70 % of the sgemm rate. On a 2-core Zen 3 (AVX2) both kernels are
equally fast within the noise of 10 %.

An int8 layer is one call of C. With VNNI about three quarters of its time are int8 products, which run at about four
times the rate of fp32 products, as the hardware allows; attention takes most of the rest. With AVX2 alone they run at
1.4 to 1.9 times the fp32 rate; the hardware allows 2. Before, buffers of more than 32 MB,
such as queries, keys and values of 8 x 512 tokens, halved the speed of a product: malloc returns such memory to the
system, so every call touched new pages. Layers now work on groups of up to 1,024 tokens in memory that they share.

These ideas were tried on this kind of CPU and dropped, because they did not help:

- padding keys and values to multiples of 16 tokens: no gain;
- explicit blocks for long global attention with torch operations: 10 to 15 % slower than torch's kernel;
- packing weights for oneDNN in advance: about 5 % faster, but twice the memory for weights;
- RoPE as a complex product: the fastest on its own, but it needs query and key weights in another order than
  checkpoints have them;
- bfloat16 in the fp32 workloads: it rounds. `Predictor` chooses it on CPUs that support it, and reports it.

With bf16, training on ragged batches lost more to oneDNN than to anything else: it compiles a product for every count
of rows, which takes 0.2 to 0.3 ms on a 2-core Zen 5, and every step met new counts. Rows are now filled up to one of 16
counts between two powers of two. That took the pretraining benchmark from 23,100 to 29,200 tokens/s. Before, C kernels
for rotation and attention in bf16, gated units and the loss had taken it from 19,200 to 23,100.

Fine-tuning MiniLM on the same machine spends half of a step in products, which run at 600 to 650 GFLOP/s there and at
950 alone: weights, gradients and moments of 10.6 million parameters pass through the memory in every step, and the
products wait for it. Casting weights and gradients takes another 12 to 15 %, AdamW and clipping 8 %, attention 5 %,
activations 4 %.

The JAX model's products run as fast as oneDNN's; what surrounds them bounds it. Its texts fill 8 rows of 256 tokens,
which takes packing them by the subsets that fill a row best: by first fit they need 9 rows, and 292 ms became 250
together with attention that puts heads before tokens and divides by the sum of the weights after the product. XLA adds
biases and activations in passes of their own: 3 of 26 ms for an up projection. Attention with one product per head is
another 10 % faster, which is 2 % of the whole, and was left out.

On one core of a Zen 3 with AVX2, in fp32 and before the C kernel ran there, a step of the pretraining benchmark spends
two thirds of its time in the products of linear layers and of the decoder, 18 % in attention, 5 % in rotary positions,
4 % in gated units, and 1 % each in norms and the optimizer; less than 1 % is outside the step. Fine-tuning MiniLM on
banking77 spends 68 % in products, 18 % in attention, 3 % in GELU, 3 % in the optimizer and 2 % in dropout. What was
tried there and dropped:

- oneDNN in place of MKL ran forward products 0.8 to 1.15 times as fast, and gradients of weights 0.6 to 0.8 times, so
  CPUs without AVX512 keep MKL;
- transposing weights once per step made no product faster;
- LoRA's product added in place took 7 % off an adapted layer of 496 x 384 x 1,536, and off a step nothing beyond noise;
- a gated unit as one function that writes both gradients into one tensor took 6 % less, which is a quarter of a percent
  of a step;
- the masked-LM loss with 1, 2, 4 and 8 million logits at a time took 145, 129, 124 and 128 ms: 8 million stay;
- clipping inside the fused AdamW would save 2 of 650 ms, and other optimizers cannot do it;
- rotating queries and keys in one call saved 0.2 of 2.5 ms per layer.

All of this is recorded on an AMD CPU. On an Intel CPU with AMX, where torch's fp32 products run as fast as BertBlocks',
an earlier commit missed these goals: sentences 1.63, 2.47 and 6.56 times sentence-transformers in fp32, bf16 and int8
(goals 2.6, 4 and 7), bf16 on ragged ModernBERT 1.53 times fp32 (1.6), 8,192 tokens in int8 5.85 times transformers (6)
and reranking in fp32 2.98 times (3). A query of up to 16 tokens ran at 0.85 times transformers' speed in fp32.

The speed-up in masked-LM training depends on how much transformers pads: the ragged workloads here have a padding
factor of 4. In pretraining and fine-tuning, transformers runs in the same precision that BertBlocks chooses: bf16 on
CPUs with units for it, from which both gain, and fp32 elsewhere.
"""


def render() -> str:
    """The page for the recorded run, without sections for parts that it did not measure."""
    run = json.loads(SOURCE.read_text(encoding="utf-8"))
    parts = [INTRODUCTION, machine_section(run), "## Goals\n", goals_sheet(run).to_markdown() + "\n"]
    parts += [METHOD] if "vnni" in run["machine"]["instructions"] else [WITHOUT_VNNI, METHOD]
    parts += ["## Workloads\n\n![Speeds of all contenders](performance.svg)\n"]
    parts += [section(workload_sheet(result)) for result in run["rows"].values()]
    if run["stacks"]:
        parts += [GROWTH, *(section(sheet) for sheet in growth_sheets(run["stacks"]))]
    if run["shapes"]:
        parts += ["## Uniform shapes\n", described(shapes_sheet(run["shapes"]))]
    if run["accuracy"]:
        parts += ["## Accuracy of int8\n", described(accuracy_sheet(run["accuracy"]))]
    if any(run[study] for study in RACES):
        parts += ["## Training\n", *(described(race_sheet(found)) for study in RACES for found in run[study])]
    if run["start"]:
        parts += ["## Start\n", described(start_sheet(run["start"]))]
    if run["profiles"]:
        parts += [PROFILE, *(section(sheet) for sheet in profile_sheets(run["profiles"])), LIMITS]
    return "\n".join(parts)


def section(sheet: Sheet) -> str:
    """A section whose heading is the title without its parentheses; their content comes below it."""
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
