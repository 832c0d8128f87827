"""The cost of blocks compared with plain BERT layers: `python -m benchmarks.blocks`.

Each block changes one key of BERT-base. Its outputs are first compared with those of the reference backend on padded
texts. Then all blocks run in turns on the same ragged batch, forward and as a training step, and a table shows the
slowdown in each round next to the growth of FLOPs and parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.inputs import Batch, make_batch, ragged_lengths
from benchmarks.measure import Spread, interleaved, ratios
from benchmarks.workload import agreement
from bertblocks import BertBlocksConfig, BertBlocksModel
from bertblocks.analysis import count_flops

PLAIN = "plain"
BLOCKS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "headwise gate": {"attention_gate": "headwise"},
    "elementwise gate": {"attention_gate": "elementwise"},
    "sinks": {"attention_sinks": True},
    "span convolution, half the heads": {"span_convolution": True, "num_attention_heads": 6, "head_dim": 64},
    "grouped mlp, 2 groups": {"mlp_type": "grouped"},
    "8 experts, 2 per token": {"mlp_type": "moe"},
    "8 narrow experts, 2 per token": {"mlp_type": "moe", "intermediate_size": 1536},
    "input mixing": {"input_mixing": True},
    "value embeddings": {"value_embedding": True},
}


def build(options: dict[str, Any], layers: int) -> BertBlocksModel:
    torch.manual_seed(0)
    return BertBlocksModel(BertBlocksConfig(**{"num_hidden_layers": layers, "pooler": False, **options})).eval()


def hidden_states(model: BertBlocksModel, batch: Batch) -> torch.Tensor:
    with torch.inference_mode():
        return model(**batch).last_hidden_state


def train_step(model: BertBlocksModel, batch: Batch) -> None:
    model.zero_grad()
    model(**batch).last_hidden_state.square().mean().backward()


def check(name: str, model: BertBlocksModel, batch: Batch) -> float:
    """Raises an error unless the outputs equal those of the reference backend with padding. Returns the difference."""
    reference = BertBlocksModel(BertBlocksConfig(**{**model.config.to_dict(), "attention_backend": "eager"})).eval()
    reference.load_state_dict(model.state_dict())
    reference.config.unpad = False
    real = batch["attention_mask"].bool()
    results = [hidden_states(either, batch)[real] for either in (model, reference)]
    near, agrees = agreement(results[0], results[1], exact=True)
    if not agrees:
        raise SystemExit(f"{name}: outputs differ from the reference's by {near['difference']:.2g}.")
    return near["difference"]


def measure(layers: int, rounds: int, lengths: list[int]) -> Table:
    batch = make_batch(lengths, 30000)
    models = {name: build(options, layers) for name, options in BLOCKS.items()}
    differences = {name: check(name, model, batch) for name, model in models.items()}
    kinds: dict[str, Callable[[BertBlocksModel, Batch], object]] = {"forward": hidden_states, "training": train_step}
    slowdowns: dict[str, dict[str, Spread]] = {}
    for kind, work in kinds.items():
        functions = {name: lambda model=model, work=work: work(model, batch) for name, model in models.items()}
        for function in functions.values():
            function()
        times = interleaved(functions, rounds)
        slowdowns[kind] = {name: ratios(seconds, times[PLAIN]) for name, seconds in times.items()}
    table = Table(title=f"{len(lengths)} ragged texts of {sum(lengths):,} tokens, {layers} layers, {rounds} rounds")
    for column in ("block", "difference", *(f"{kind}, times {PLAIN}" for kind in kinds), "FLOPs", "parameters"):
        table.add_column(column)
    flops, sizes = {}, {}
    for name, model in models.items():
        flops[name] = sum(count_flops(model, length)["total"] for length in lengths)
        sizes[name] = sum(parameter.numel() for parameter in model.parameters())
        cells = [
            f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"
            for spread in (slowdowns[kind][name] for kind in kinds)
        ]
        growth = [f"{counts[name] / counts[PLAIN]:.2f}" for counts in (flops, sizes)]
        table.add_row(name, f"{differences[name]:.1e}", *cells, *growth)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocks", description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=32, help="texts in the batch")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest text")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    Console(width=140).print(measure(options.layers, options.rounds, ragged_lengths(options.rows, options.longest)))


if __name__ == "__main__":
    main()
