"""`python -m tests.fuzz 1234` or `python -m tests.fuzz 0:5000`: runs cases and shows those that fail."""

from __future__ import annotations

import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", JAX_PLATFORMS="cpu")

from tests.fuzz.run import run_cases, seeds_folder


def main() -> None:
    numbers: list[int] = []
    for argument in sys.argv[1:]:
        start, colon, stop = argument.partition(":")
        step = stop.partition(":")[2]
        numbers += range(int(start), int(stop.partition(":")[0]), int(step or 1)) if colon else [int(start)]
    failed = 0
    seconds: dict[str, list[float]] = {}
    with seeds_folder() as seeds:
        for outcome in run_cases(numbers, seeds):
            failed += bool(outcome.problems)
            command = next(iter(outcome.case.arguments), "")
            seconds.setdefault(command, []).append(outcome.seconds)
            if outcome.problems or len(numbers) < 20:
                print(outcome, flush=True)
    for command, times in sorted(seconds.items(), key=lambda item: -sum(item[1]))[:10]:
        print(f"{sum(times):7.1f} s of CPU time: {len(times):4} x {ascii(command)[:40]}")
    print(f"{len(numbers)} cases, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
