"""Compiled layers: one graph each, for all lengths; and selective checkpointing. On a CPU, without generated code."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bertblocks import BertBlocksForMaskedLM
from bertblocks.core.settings import RecipeError
from bertblocks.nn.backends.graph import ragged_attention
from bertblocks.nn.ops.gpu import Gpu
from bertblocks.training import compilation
from bertblocks.training.compilation import checkpoint_layers, compile_model, why_not_whole
from tests.helpers import EDGE_LENGTHS, tiny_config
from tests.training.helpers import make_recipe

MODERNBERT: dict[str, Any] = {
    "block_pos_enc_kind": "rope",
    "embd_pos_enc_kind": "none",
    "local_attention": True,
    "layer_types": ["local", "global", "local"],
    "norm_pos": "pre",
    "norm_fn": "rms",
    "mlp_type": "glu",
    "hidden_act": "silu",
    "num_kv_heads": 2,
    "qk_norm": True,
}
MODELS = {
    "bert": ({"num_hidden_layers": 1}, ()),
    "modernbert": (MODERNBERT, pytest.mark.slow),
    "ngpt": ({"ngpt": True}, pytest.mark.slow),
}


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Captures graphs with torch.compile and runs them as they are."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compile_(*args, **options, backend="aot_eager"))
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def step(model: Any, lengths: list[int]) -> list[Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, 60, (sum(lengths),))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    model.zero_grad()
    loss = model(ids, cu_seqlens=bounds, labels=ids, return_logits=False).loss
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


BATCHES = [EDGE_LENGTHS, [12, 30], [5] * 7, [50, 1, 9], [64]]


@pytest.mark.parametrize("options", [pytest.param(own, marks=mark, id=name) for name, (own, mark) in MODELS.items()])
def test_whole_layers_are_graphs_that_do_not_depend_on_lengths(options: Any, without_code: Any) -> None:
    torch.manual_seed(0)
    model = BertBlocksForMaskedLM(tiny_config(**options)).train()
    expected = [step(model, lengths) for lengths in BATCHES]
    compile_model(model, "fp32")
    counts = []
    for lengths, results in zip(BATCHES, expected, strict=True):
        for mine, reference in zip(step(model, lengths), results, strict=True):
            torch.testing.assert_close(mine, reference, atol=1e-4, rtol=1e-3)
        counts.append(without_code["stats"]["unique_graphs"])
    assert counts[0] > 0, "nothing was compiled"
    assert counts[1:] == [counts[1]] * 4, "a new shape after the second was compiled again"
    assert counts[1] <= 3, "layers of one kind share a graph"
    assert not without_code["graph_break"]


@pytest.mark.parametrize("reach", [-1, 0, 4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_operation_in_graphs_is_right_by_torchs_own_checks(reach: int, is_causal: bool) -> None:
    q = torch.randn(9, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(9, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    arguments = (q, k, v, torch.tensor([0, 3, 3, 9], dtype=torch.int32), 0.4, reach, is_causal)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ragged_attention, arguments, test_utils=checks)
    assert torch.autograd.gradcheck(ragged_attention, arguments)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"attention_dropout": 0.1}, "dropout"),
        ({"block_pos_enc_kind": "t5"}, "biases"),
        ({"attention_sinks": True}, "sinks"),
        ({"mlp_type": "moe"}, "experts"),
        ({"span_convolution": True}, "span_convolution"),
    ],
)
def test_other_layers_have_compiled_feed_forward_networks(options: Any, part: str, without_code: Any) -> None:
    model: Any = BertBlocksForMaskedLM(tiny_config(**options))
    layer = model.model.encoder.layers[0]
    assert part in (why_not_whole(layer, None, torch.float32) or "")
    compile_model(model, "fp32")
    assert not model.model.encoder.is_compiled
    networks = layer.mlp.experts if part == "experts" else [layer.mlp]
    assert all(network._compiled_call_impl is not None for network in networks)


def test_a_gpu_must_run_torchs_kernel() -> None:
    layer = BertBlocksForMaskedLM(tiny_config(hidden_size=64)).model.encoder.layers[0]
    assert why_not_whole(layer, Gpu((8, 0)), torch.bfloat16) is None
    assert "varlen_attn" in (why_not_whole(layer, Gpu((7, 0)), torch.bfloat16) or "")
    assert "varlen_attn" in (why_not_whole(layer, Gpu((8, 0)), torch.float32) or "")


def test_selective_checkpointing_keeps_products_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BertBlocksForMaskedLM(tiny_config(**MODERNBERT)).train()
    plain = step(model, [7, 12])
    kept: set[str] = set()
    policy = compilation._keep_products

    def record(context: Any, operation: Any, *args: Any, **options: Any) -> Any:
        decision = policy(context, operation, *args, **options)
        if decision == torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE:
            kept.add(str(operation))
        return decision

    monkeypatch.setattr(compilation, "_keep_products", record)
    checkpoint_layers(model, "selective")
    for mine, reference in zip(step(model, [7, 12]), plain, strict=True):
        torch.testing.assert_close(mine, reference)
    assert kept


def test_a_budget_of_memory_needs_compiled_layers() -> None:
    with pytest.raises(RecipeError, match=r"activation_memory_budget.*compile"):
        make_recipe("run.activation_memory_budget=0.5")
    assert make_recipe("run.activation_memory_budget=0.5", "run.compile=true").run.activation_memory_budget == 0.5
