"""MaxSim of one query against many ragged passages: `python -m benchmarks.maxsim`.

Both sides get the vectors as their encoders return them, one array for each passage; a third contender gets ours as one
array with lengths, as an index keeps them. Outputs are compared first, and all take turns in every round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Spread, interleaved, ratios
from bertblocks.nn.ops.maxsim import maxsim
from bertblocks.tasks.multi import score_multi

THEIRS, OURS, OURS_FLAT = "sentence-transformers maxsim", "BertBlocks score_multi", "BertBlocks maxsim, flat vectors"
QUERY_TOKENS, DIMENSIONS, LONGEST = 32, 128, 256


def passages(count: int) -> list[np.ndarray]:
    """Vectors of passages whose lengths are spread like those of real ones: a mean of 92 tokens, at most 256."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.4, 0.6, count).astype(int), 8, LONGEST)
    return [unit_rows(rng, length) for length in lengths.tolist()]


def unit_rows(rng: np.random.Generator, rows: int) -> np.ndarray:
    vectors = rng.standard_normal((rows, DIMENSIONS), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def contenders(count: int) -> dict[str, Callable[[], Tensor]]:
    from sentence_transformers.util.similarity import maxsim as their_maxsim

    documents = passages(count)
    query = unit_rows(np.random.default_rng(1), QUERY_TOKENS)
    tensors, lengths = [torch.from_numpy(own) for own in documents], [len(own) for own in documents]
    flat, query_tensor = torch.cat(tensors), torch.from_numpy(query)
    return {
        THEIRS: lambda: their_maxsim([query_tensor], tensors)[0],
        OURS: lambda: torch.from_numpy(score_multi(query, documents)),
        OURS_FLAT: lambda: maxsim(query_tensor, [QUERY_TOKENS], flat, lengths)[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.maxsim", description=__doc__)
    parser.add_argument("--passages", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    functions = contenders(arguments.passages)
    expected = functions[THEIRS]()
    for name, function in functions.items():
        difference = float((function() - expected).abs().max())
        if difference > 1e-4:
            raise SystemExit(f"{name} differs from {THEIRS} by {difference:.1e}.")
        print(f"{name}: the largest difference is {difference:.1e}")
    times = interleaved(functions, arguments.rounds)
    print(f"\n1 query of {QUERY_TOKENS} tokens, {arguments.passages:,} passages, {arguments.threads} threads")
    for name, seconds in times.items():
        faster, spent = ratios(times[THEIRS], seconds), Spread.of(seconds)
        print(
            f"{name:34} {1000 * spent.median:8.1f} ms   {faster.median:5.2f} x ({faster.low:.2f} to {faster.high:.2f})"
        )


if __name__ == "__main__":
    main()
