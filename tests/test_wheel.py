"""The wheel has prebuilt kernels, which run without a compiler and give the same numbers as those compiled here."""

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from bertblocks.core.c_library import find_compilers
from bertblocks.nn.ops.kernels import Kernel, find_kernel, runnable_targets
from bertblocks.nn.ops.targets import TARGETS

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[1]
#: The tag of wheels with kernels.
PLATFORM = (
    f"linux_{platform.machine()}" if platform.system() == "Linux" and platform.machine() in TARGETS["kernels.c"] else ""
)
#: Multiplies with the kernel of an unpacked wheel, and prints whether the wheel had it.
MULTIPLY = """
import sys
from pathlib import Path
import torch
from bertblocks.nn.ops import kernels
torch.manual_seed(0)
weight = torch.randint(-127, 128, (48, 40), dtype=torch.int8)
kernel = kernels.find_kernel()
assert isinstance(kernel, kernels.Kernel), kernel
torch.save(kernel.linear(torch.randn(5, 40), kernel.pack(weight, torch.rand(48), None)), sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not PLATFORM, reason="wheels elsewhere are pure")
@pytest.mark.skipif(not find_compilers(), reason="no C compiler")
def test_a_wheel_brings_its_kernels(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    wheel = next(tmp_path.glob("*.whl"))
    assert wheel.name.endswith(f"-py3-none-{PLATFORM}.whl")
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "installed")
    assert len(libraries) == sum(len(targets[platform.machine()]) for targets in TARGETS.values())
    if not isinstance(find_kernel(), Kernel):
        assert not runnable_targets()
        pytest.skip("this CPU does not run the kernel")
    # without PATH and CC there is no compiler, and the cache is empty
    environment = {"PYTHONPATH": str(tmp_path / "installed"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": ""}
    command = [sys.executable, "-c", MULTIPLY, str(tmp_path / "product.pt")]
    subprocess.run(command, cwd=tmp_path, check=True, env={**_without("CC"), **environment})
    assert not (tmp_path / "cache").exists()
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (48, 40), dtype=torch.int8)
    kernel, x = find_kernel(), torch.randn(5, 40)
    assert isinstance(kernel, Kernel)
    expected = kernel.linear(x, kernel.pack(weight, torch.rand(48), None))
    torch.testing.assert_close(torch.load(tmp_path / "product.pt"), expected, rtol=0, atol=0)


@pytest.mark.slow
def test_a_wheel_without_a_compiler_is_pure(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, env={**_without("CC"), "PATH": ""})
    assert next(tmp_path.glob("*.whl")).name.endswith("-py3-none-any.whl")


def _without(name: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != name}
