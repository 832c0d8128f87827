"""Gates on the output of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bertblocks import BertBlocksModel, ConfigError
from bertblocks.analysis import analyze
from tests.helpers import tiny_config

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.mark.parametrize(("kind", "size"), [("headwise", 4), ("elementwise", 32)])
def test_gates_equal_their_formula(kind: str, size: int) -> None:
    """The output of attention is (y * sigmoid(x W)) O, with y of the same model without gates."""
    gated = BertBlocksModel(tiny_config(attention_gate=kind, num_hidden_layers=1)).eval().requires_grad_(False)
    plain = BertBlocksModel(tiny_config(num_hidden_layers=1)).eval().requires_grad_(False)
    plain.load_state_dict({key: value for key, value in gated.state_dict().items() if "gate" not in key})
    records: dict[str, Any] = {}
    for name, model in (("gated", gated), ("plain", plain)):
        attention = model.encoder.layers[0].attention
        attention.out.register_forward_pre_hook(lambda _, args, name=name: records.update({name: args[0]}))
        attention.qkv.register_forward_pre_hook(lambda _, args: records.update(x=args[0]))
        model(IDS)
    weight = gated.encoder.layers[0].attention.gate.projection.weight
    assert weight.shape == (size, 32)
    gates = torch.sigmoid(records["x"] @ weight.T).repeat_interleave(32 // size, dim=1)
    torch.testing.assert_close(records["gated"], records["plain"] * gates)


def test_gates_count_in_the_cost() -> None:
    plain, headwise, elementwise = (
        analyze(tiny_config(attention_gate=kind), "base", [10]) for kind in ("none", "headwise", "elementwise")
    )
    for analysis, size in ((headwise, 4), (elementwise, 32)):
        assert analysis.parameters["attention"] - plain.parameters["attention"] == 3 * 32 * size
        part = "attention projections"
        assert analysis.costs[0].flops[part] - plain.costs[0].flops[part] == 3 * 10 * 2 * 32 * size


def test_an_unknown_gate_raises() -> None:
    with pytest.raises(ConfigError, match="attention_gate is 'headwis'; it must be one of headwise, elementwise, none"):
        tiny_config(attention_gate="headwis")
