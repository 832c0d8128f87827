"""What the package sets up for the CPU."""

import os
import platform
import subprocess
import sys

import pytest

from bertblocks.nn.ops.cpu import is_onednn_faster

#: Prints the memory in MB after 2,000 forward passes over batches that all differ.
RAGGED = """
import random
import torch
from pathlib import Path
from bertblocks import BertBlocksConfig, BertBlocksModel

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 10**6

draw = random.Random(0)
model = BertBlocksModel(BertBlocksConfig.from_preset("bert-base", num_hidden_layers=1, hidden_size=48)).eval()
with torch.inference_mode():
    for _ in range(2000):
        lengths = torch.tensor([draw.randint(1, 120) for _ in range(draw.randint(1, 8))])
        ids = torch.randint(5, 1000, (int(lengths.sum()),))
        model(ids, cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]))
print(resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(not is_onednn_faster(), reason="MKL multiplies in fp32 on this CPU")
def test_ragged_batches_take_less_memory_than_with_the_default_of_onednn() -> None:
    """oneDNN keeps a compiled operation for every shape: with its default of 1,024, 170 MB more.

    What memory grows by beyond that is the C library's heap, which operations that come and go leave in pieces.
    """
    bounded, default = (
        int(subprocess.run([sys.executable, "-c", RAGGED], env=env, capture_output=True, check=True).stdout)
        for env in (os.environ, {**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024"})
    )
    assert bounded < default - 80


#: Allocates, fills and frees 200 MB three times, and prints the page faults of the last time and the memory held then
#: and after the block.
FILL = """
import resource
from pathlib import Path
from bertblocks.core.cpu import kept_memory
def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
with kept_memory():
    for _ in range(3):
        before = faults()
        block = bytearray(b"1") * (200 * 2**20)
        del block
    print(faults() - before, held())
print(held())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_kept_memory_is_used_again_and_returned_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", FILL], capture_output=True, text=True, check=True)
    faults, inside, after = map(int, done.stdout.split())
    assert faults < 50
    assert inside > 200 > 100 > after
