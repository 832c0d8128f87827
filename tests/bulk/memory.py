"""Memory of a bulk job: `python -m tests.bulk.memory ROWS`.

Embeds ROWS rows, by default a million, with a tiny model, and prints the seconds and the peak memory of the process.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from tests.bulk.helpers import make_model, make_rows, run


def main(rows: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        part = make_rows(10_000)
        with open(folder / "in.jsonl", "w") as file:
            for first in range(0, rows, len(part)):
                file.writelines(json.dumps({**row, "id": first + row["id"]}) + "\n" for row in part)
        started = time.perf_counter()
        result = run(
            "embed",
            make_model(folder / "model"),
            [str(folder / "in.jsonl")],
            folder / "out",
            rows_per_shard=50_000,
            window=4096,
        )
        seconds = time.perf_counter() - started
    assert result.rows == rows
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"rows": rows, "shards": result.shards, "seconds": round(seconds, 1), "peak MiB": round(peak)}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
