"""Compiled layers: one graph each, for all lengths; and selective checkpointing. On a CPU, without generated code."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bertblocks import (
    BertBlocksForMaskedDiffusion,
    BertBlocksForMaskedLM,
    BertBlocksForReplacedTokenDetection,
)
from bertblocks.core.settings import RecipeError
from bertblocks.models import GeneratorAndDiscriminator, RetroMAE
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
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "mask_token_id": 3}


def make_replaced_tokens() -> GeneratorAndDiscriminator:
    generator = BertBlocksForMaskedLM(tiny_config(**ONE_LAYER))
    return GeneratorAndDiscriminator(generator, BertBlocksForReplacedTokenDetection(tiny_config(**ONE_LAYER)))


MODELS = {
    "bert": lambda: BertBlocksForMaskedLM(tiny_config(**ONE_LAYER)),
    "modernbert": lambda: BertBlocksForMaskedLM(tiny_config(**MODERNBERT)),
    "ngpt": lambda: BertBlocksForMaskedLM(tiny_config(ngpt=True)),
    "causal": lambda: BertBlocksForMaskedLM(tiny_config(causal=True, **ONE_LAYER)),
    "masked diffusion": lambda: BertBlocksForMaskedDiffusion(tiny_config(timestep_embedding=True, **ONE_LAYER)),
    "replaced tokens": make_replaced_tokens,
    "retromae": lambda: RetroMAE(BertBlocksForMaskedLM(tiny_config(**ONE_LAYER))),
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
    loss = sum_losses(model, ids, bounds)
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def sum_losses(model: Any, ids: Tensor, bounds: Tensor) -> Tensor:
    labels = torch.where(torch.arange(len(ids)) % 3 == 0, ids, -100)
    masked = torch.where(labels == -100, ids, 3)
    if isinstance(model, GeneratorAndDiscriminator):
        out = model(masked, bounds, labels, torch.Generator().manual_seed(0))
        return out.generator_total + out.discriminator_total
    if isinstance(model, RetroMAE):
        seeds = torch.arange(int((bounds.diff() > 0).sum()))  # of sequences that are not empty
        out = model(masked, bounds, labels, ids, seeds, 0.5)
        return out.encoder_total + out.decoder_total
    if isinstance(model, BertBlocksForMaskedDiffusion):
        times = torch.linspace(0.2, 0.9, len(bounds) - 1)
        return model(masked, cu_seqlens=bounds, labels=labels, timesteps=times, return_logits=False).loss
    return model(ids, cu_seqlens=bounds, labels=ids, return_logits=False).loss


BATCHES = [EDGE_LENGTHS, [12, 30], [5] * 7, [50, 1, 9], [64]]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "bert" else pytest.mark.slow) for name in MODELS]
)
def test_whole_layers_are_graphs_that_do_not_depend_on_lengths(name: str, without_code: Any) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train()
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


@pytest.mark.slow
def test_a_smaller_budget_keeps_fewer_activations_and_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_, counts, results = torch.compile, [], []
    options = {"backend": "aot_eager_decomp_partition"}  # runs the partitioner that knows budgets
    monkeypatch.setattr(torch, "compile", lambda *args, **own: compile_(*args, **own, **options))
    with torch._functorch.config.patch(activation_memory_budget=1.0):  # restores it
        for budget in (None, 0.1):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = BertBlocksForMaskedLM(tiny_config(**ONE_LAYER)).train()
            compile_model(model, "fp32", budget)
            kept: list[int] = []

            def count(x: Tensor, kept: list[int] = kept) -> Tensor:
                kept.append(x.numel())
                return x

            with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
                results.append(step(model, [30, 20]))
            counts.append(sum(kept))
    torch._dynamo.reset()
    assert counts[1] < 0.9 * counts[0]
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
