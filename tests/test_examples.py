"""Every example runs as it stands and prints what it promises."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from bertblocks.config.blocks import SLOTS
from bertblocks.training.optimizer_sections import OPTIMIZERS

EXAMPLES = Path(__file__).parents[1] / "examples"
#: Patterns that match the lines of each example's output, in order.
OUTPUTS = {
    "build": [
        r"bert-base: 4,\d{3},\d{3} parameters, output \(1, 4, 128\)",
        r"modernbert-base: 7,\d{3},\d{3} parameters, output \(1, 4, 128\)",
        r"An impossible choice: num_kv_heads is 5; .*",
    ],
    "convert": ["bert -> bertblocks -> bert", "103 of 103 tensors are identical"],
    "search": [
        r"How do I get my money back\? Refunds are paid .* \(0\.\d\d\)",
        r"When can I visit you\? Our shop opens at nine .* \(0\.\d\d\)",
        r"Somebody stole my credit card\. A lost card can be blocked .* \(0\.\d\d\)",
    ],
    "int8": [
        r"int8: .*",
        r"smallest cosine of int8 and fp32 embeddings: (0\.99\d|1\.000)",
        r"the file has [2-7]\d% of its size",
    ],
    "jax_encoder": [r"FlaxBertBlocksModel: hidden states \(2, 12, 384\)", "within 1e-5 of torch: yes"],
    "pretrain": [
        r"masked accuracy on unseen texts: 0\.[5-9]\d",
        r"the cat \[MASK\] at noon: (barks|purrs|sings|swims)",
    ],
    "optimizers": [r"soap: loss [01]\.\d\d, unigram 1\.\d\d", r"adamw_8bit: loss [01]\.\d\d, unigram 1\.\d\d"],
    "finetune_classify": [
        r"accuracy on the training examples: 1\.00",
        r"Fast delivery and great quality\. praise",
        r"It arrived late and it was broken\. complaint",
    ],
    "finetune_tag": [r"F1 of entities on held-out sentences: (0\.9\d|1\.00)", "PER: Anna", "LOC: Rome"],
    "finetune_answer": [r"F1 on held-out questions: (9\d|100)", r"Where is the lamp\? on the shelf"],
    "finetune_embed": [
        r"before: Falcon is closer to the premium plan by [+-]0\.\d\d",
        r"after: Falcon is closer to the premium plan by \+0\.[2-9]\d",
    ],
    "blocks/layer_scale": [
        r"the first layer changes its input by at most [1-9]e-0[5-9]",
        "one step changed 8 of 8 vectors of factors",
    ],
    "blocks/soft_capping": [
        r"cap 50: the weights of a query differ by up to a factor of \d(\.\d)?e\+\d\d",
        r"cap 1: the weights of a query differ by up to a factor of [1-7]\.\d",
        "one step lowers the loss: True",
    ],
    "blocks/exclusive_attention": [
        "outputs of attention are orthogonal to the token's own value: True",
        "one step lowers the loss: True",
    ],
    "blocks/entmax": [
        r"weights that are 0: [1-9]\d%",
        "sums of weights are 1: True",
        "one step lowers the loss: True",
    ],
    "blocks/cyclic_sharing": [
        "consecutive: AAABBB, 2 layers with weights",
        "cyclic: ABABAB, 2 layers with weights",
        "one step lowers the loss: True",
    ],
    "distributed": [r"accuracy after training on two processes: 1\.00"],
}
SLOW = {
    "distributed",
    "finetune_answer",
    "finetune_classify",
    "finetune_embed",
    "finetune_tag",
    "optimizers",
    "pretrain",
}
#: The packages of an extra that an example needs.
NEEDS = {"jax_encoder": ["flax"], "optimizers": ["bitsandbytes", "pytorch_optimizer"]}


def test_every_example_is_tested_and_listed() -> None:
    scripts = {path.relative_to(EXAMPLES).with_suffix("").as_posix() for path in EXAMPLES.rglob("*.py")}
    assert scripts == {*OUTPUTS, "minilm"}  # tests/cli/test_cli.py runs the latter
    pattern = r"^\| \[`([\w/]+)\.py`\]\(([\w/]+)\.py\) \|"
    listed = re.findall(pattern, (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in listed} == scripts
    assert all(name == target for name, target in listed)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in OUTPUTS]
)
def test_an_example_prints_what_it_promises(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS.get(name, ()):
        if not importlib.util.find_spec(package):
            pytest.skip(f"needs {package}")
    for registry in (*SLOTS.values(), OPTIMIZERS):  # removes what the example registers
        monkeypatch.setattr(registry, "_blocks", dict(registry._blocks))
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    torch.set_num_threads(1)
    lines = printed.getvalue().splitlines()
    assert len(lines) == len(OUTPUTS[name]), lines
    for line, pattern in zip(lines, OUTPUTS[name], strict=True):
        assert re.fullmatch(pattern, line)
    assert not list(tmp_path.iterdir()), "an example leaves nothing in the current folder"
