"""The C kernels for ARM, cross-compiled and run by QEMU: products and activations, attention and its gradients.

Debian's packages gcc-aarch64-linux-gnu and qemu-user bring what this needs.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bertblocks.nn.ops.kernel_arguments import MemoryOrder, PackedLayer
from bertblocks.nn.ops.kernels import GELU, GELU_TANH, RELU, SILU, SOURCE
from bertblocks.nn.ops.targets import OPTIONS, TARGETS
from bertblocks.nn.quantized import multiply

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason="no cross compiler or emulator"),
]


class Driver:
    """Calls a kernel in an emulated process, with arrays as files."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.order = MemoryOrder(*map(int, self._run("order").split()))

    def _run(self, *arguments: Any) -> str:
        command = [EMULATOR, str(self.program), str(self.folder), *map(str, arguments)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

    def call(self, kernel: str, arrays: Sequence[Tensor], *numbers: int) -> list[Tensor]:
        for file in self.folder.iterdir():
            file.unlink()
        for index, array in enumerate(arrays):
            (self.folder / str(index)).write_bytes(array.contiguous().numpy().tobytes())
        self._run(kernel, *numbers)
        results = sorted(self.folder.glob("out*"))
        return [torch.from_numpy(np.fromfile(result, dtype=np.float32)) for result in results]


@pytest.fixture(scope="module", params=TARGETS["kernels.c"]["aarch64"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    program = tmp_path_factory.mktemp("driver") / "driver"
    options = [option for option in OPTIONS if option not in ("-fPIC", "-shared")]
    options += [*TARGETS["kernels.c"]["aarch64"][request.param].values(), "-static", f"-I{SOURCE.parent}"]
    source = Path(__file__).with_name("kernel_driver.c")
    subprocess.run([COMPILER, *options, str(source), "-o", str(program), "-lm"], check=True)
    return Driver(program, tmp_path_factory.mktemp("arrays"))


def arrays_of(weight: Tensor, scales: Tensor, bias: Tensor, order: MemoryOrder) -> list[Tensor]:
    packed = PackedLayer(weight, scales, bias, order)
    return [packed.weight, packed.sums, packed.scales, packed.bias]


@pytest.mark.parametrize("outputs", [1, 17, 64])
@pytest.mark.parametrize("inputs", [3, 64, 130])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_products(driver: Driver, rows: int, inputs: int, outputs: int) -> None:
    x, weight = torch.randn(rows, inputs), torch.randint(-127, 128, (outputs, inputs)).to(torch.int8)
    scales, bias = torch.rand(outputs), torch.randn(outputs)
    (out,) = driver.call("linear", [x, *arrays_of(weight, scales, bias, driver.order)], rows, inputs, outputs)
    expected = multiply(x, weight, scales, bias)
    torch.testing.assert_close(out.view(rows, outputs), expected, atol=1e-4, rtol=1e-5)


ACTIVATIONS = {RELU: F.relu, SILU: F.silu, GELU: F.gelu, GELU_TANH: lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_networks(driver: Driver, activation: int, gated: bool) -> None:
    rows, inputs, inner = 20, 40, 50
    width = inner * (2 if gated else 1)
    up, down = (torch.randint(-127, 128, size).to(torch.int8) for size in ((width, inputs), (inputs, inner)))
    up_scales, down_scales, zeros = torch.rand(width) / 500, torch.rand(inputs), torch.zeros(width)
    x = torch.randn(rows, inputs)
    layers = [
        *arrays_of(up, up_scales, zeros, driver.order),
        *arrays_of(down, down_scales, zeros[:inputs], driver.order),
    ]
    (out,) = driver.call("mlp", [x, *layers], rows, inputs, width, inner, inputs, activation, int(gated))
    hidden = multiply(x, up, up_scales, None)
    act = ACTIVATIONS[activation]
    hidden = act(hidden[:, :inner]) * hidden[:, inner:] if gated else act(hidden)
    expected = multiply(hidden, down, down_scales, None)
    assert F.cosine_similarity(out.view(rows, inputs), expected).min() > 0.9999


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_their_gradients(driver: Driver, activation: int, gated: bool) -> None:
    rows, size = 9, 21
    up, above = 3 * torch.randn(rows, size * (2 if gated else 1)), torch.randn(rows, size)
    exact = up.double().requires_grad_()
    hidden = ACTIVATIONS[activation](exact[:, :size])
    hidden = hidden * exact[:, size:] if gated else hidden
    (gradient,) = torch.autograd.grad(hidden, exact, above.double())
    found = driver.call("activation", [up, above], rows, size, activation, int(gated))
    for result, expected in zip(found, (hidden.detach(), gradient), strict=True):
        torch.testing.assert_close(result.view(expected.shape).double(), expected, atol=4e-6, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 17, 1030])
def test_cross_entropy(driver: Driver, size: int) -> None:
    logits, labels, weights = 5 * torch.randn(6, size), torch.randint(size, (6,)), torch.rand(6)
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, labels, reduction="none") + 0.01 * exact.logsumexp(-1).square()
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    found = driver.call("loss", [logits, labels, weights], 6, size)
    for result, expected in zip(found, (losses.detach(), gradient, weights.double() @ gradient), strict=True):
        torch.testing.assert_close(result.view(expected.shape).double(), expected, atol=1e-5, rtol=1e-5)


def test_dropout(driver: Driver) -> None:
    x = torch.rand(40_001) + 1
    factors = driver.call("dropout", [x], len(x))[0] / x
    kept = factors > 0
    torch.testing.assert_close(factors[kept], torch.full((int(kept.sum()),), 4 / 3))
    assert abs(float(kept.float().mean()) - 0.75) < 4 * math.sqrt(0.75 * 0.25 / len(x))


@pytest.mark.parametrize("half_window", [None, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(2, 2, 64), (4, 2, 32), (2, 1, 7)])
@pytest.mark.parametrize("lengths", [[1], [5, 6, 7], [31, 0, 33], [255, 2]], ids=str)
def test_attention_and_its_gradients(
    driver: Driver, lengths: list[int], heads: int, kv_heads: int, size: int, half_window: int | None
) -> None:
    tokens = sum(lengths)
    q, k, v = (torch.randn(tokens, count, size, requires_grad=True) for count in (heads, kv_heads, kv_heads))
    above, outputs = torch.randn(tokens, heads, size), []
    for query, key, value in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        key, value = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
        scores = torch.einsum("ihd,jhd->hij", query, key) / math.sqrt(size)
        if half_window is not None:
            index = torch.arange(len(query))
            scores = scores.masked_fill((index[:, None] - index).abs() > half_window, -math.inf)
        outputs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), value))
    exact = torch.cat(outputs)
    gradients = torch.autograd.grad(exact, (q, k, v), above.double())
    starts = torch.tensor([0, *lengths]).cumsum(0)
    arrays = [q.detach(), k.detach(), v.detach(), starts, above]
    window = -1 if half_window is None else half_window
    found = driver.call("attention", arrays, tokens, heads, kv_heads, size, window, len(lengths), max(lengths))
    for result, expected in zip(found, (exact.detach(), *gradients), strict=True):
        torch.testing.assert_close(result.view(expected.shape).double(), expected.double(), atol=5e-6, rtol=1e-4)
