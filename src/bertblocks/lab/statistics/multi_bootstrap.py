"""The Multi-Bootstrap: resamples of seeds and examples together (Sellam et al., 2022, arXiv:2106.16163)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
#: Counts of examples are drawn for so many resamples at once, which bounds memory.
BLOCK = 50


def multi_bootstrap(
    baseline: Array, variant: Array, paired: bool = True, samples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """The 95% percentile interval of the mean of variant - baseline, both `[seeds, examples]`.

    Both variants see the same resample of examples, and the same resample of seeds if the seeds are paired. Where
    seeds differ more than examples, few of them make the interval too narrow: three seeds have ten different resamples.
    """
    if paired and len(baseline) != len(variant):
        raise ValueError(f"Paired variants need the same seeds, but there are {len(baseline)} and {len(variant)}.")
    generator = np.random.default_rng(seed)
    found = []
    for start in range(0, samples, BLOCK):
        size = min(BLOCK, samples - start)
        examples = _shares(generator, baseline.shape[1], size)
        base_seeds = _shares(generator, len(baseline), size)
        variant_seeds = base_seeds if paired else _shares(generator, len(variant), size)
        found.append(
            np.einsum("rs,rs->r", variant_seeds, examples @ variant.T)
            - np.einsum("rs,rs->r", base_seeds, examples @ baseline.T)
        )
    low, high = np.percentile(np.concatenate(found), [2.5, 97.5])
    return float(low), float(high)


def _shares(generator: np.random.Generator, count: int, size: int) -> Array:
    """How often each of `count` things is drawn with replacement, as a share: `[size, count]`."""
    drawn = generator.integers(0, count, (size, count))
    return np.stack([np.bincount(row, minlength=count) for row in drawn]) / count
