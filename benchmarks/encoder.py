"""BertBlocks beside transformers (sdpa), same weights, same inputs, interleaved in one run.

Run with `make bench`, or `python benchmarks/encoder.py --layers 22 --rounds 10 --json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel

import bertblocks

MODELS = {"bert-base": (BertConfig, BertModel), "modernbert-base": (ModernBertConfig, ModernBertModel)}


def ragged_lengths(count: int, longest: int) -> list[int]:
    """Lognormal, as lengths of texts are, with the longest one given."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(count, generator=generator).mul(0.8).add(3.7).exp()
    lengths = [max(4, min(longest, int(length))) for length in draws]
    return [longest, *lengths[1:]]


CASES = {
    "ragged 32 x <=256": lambda: ragged_lengths(32, 256),
    "uniform 8 x 128": lambda: [128] * 8,
    "uniform 8 x 512": lambda: [512] * 8,
    "one of 2,048": lambda: [2048],
    "one of 8,192": lambda: [8192],
}


def make_batch(lengths: list[int], vocab_size: int) -> dict[str, torch.Tensor]:
    width = max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, vocab_size, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask}


def interleaved(first: Callable, second: Callable, rounds: int) -> tuple[float, float]:
    """Median seconds of both, taken turn by turn so that the machine's moods hit both."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds + 1):
        for function, record in zip((first, second), times, strict=True):
            start = time.perf_counter()
            function()
            if round_:  # the first round warms up
                record.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def measure(name: str, case: str, layers: int, rounds: int, backward: bool) -> dict | None:
    config_class, model_class = MODELS[name]
    lengths = CASES[case]()
    if name == "bert-base" and max(lengths) > 512:
        return None
    torch.manual_seed(0)
    theirs = model_class(config_class(num_hidden_layers=layers)).eval()
    ours = bertblocks.from_huggingface(theirs)
    batch = make_batch(lengths, theirs.config.vocab_size)
    real = batch["attention_mask"].bool()

    def run(model: torch.nn.Module) -> torch.Tensor:
        if not backward:
            with torch.inference_mode():
                return model(**batch).last_hidden_state
        model.zero_grad()
        hidden = model(**batch).last_hidden_state
        hidden[real].square().mean().backward()
        return hidden.detach()

    difference = (run(ours) - run(theirs))[real].abs().max().item()
    peer, own = interleaved(lambda: run(theirs), lambda: run(ours), rounds)
    return {
        "model": name,
        "case": case,
        "pass": "forward and backward" if backward else "forward",
        "padding": round(real.numel() / int(real.sum()), 2),
        "transformers_ms": peer * 1e3,
        "bertblocks_ms": own * 1e3,
        "ratio": peer / own,
        "max_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=3, help="layers of each model (default 3)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds per case (default 5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--backward", action="store_true", help="measure training steps in place of inference")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    rows = []
    for name in MODELS:
        for case in CASES:
            if (row := measure(name, case, options.layers, options.rounds, options.backward)) is not None:
                rows.append(row)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    setting = f"fp32, {options.layers} layers, {options.threads} threads"
    table = Table(title=f"{rows[0]['pass']}, {setting}, against transformers with sdpa")
    for column in ("model", "case", "padding", "transformers ms", "BertBlocks ms", "times as fast", "max difference"):
        table.add_column(column, justify="left" if column in ("model", "case") else "right")
    for row in rows:
        numbers = (f"{row['padding']:.2f}", f"{row['transformers_ms']:.0f}", f"{row['bertblocks_ms']:.0f}")
        table.add_row(row["model"], row["case"], *numbers, f"{row['ratio']:.2f}", f"{row['max_difference']:.1e}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
