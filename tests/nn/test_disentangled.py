"""Disentangled attention against its formula, its buckets against DeBERTa's, and what it costs."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM, BertBlocksModel, ConfigError
from bertblocks.analysis.flops import count_flops
from bertblocks.nn.backends import cpu
from bertblocks.nn.convolution import InputConvolution
from bertblocks.nn.disentangled import DisentangledPosition, RelativeEmbedding, log_buckets
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.ops import relative as relative_ops
from bertblocks.nn.ops.attention import AttentionChunk, SequenceBatch, attend_chunks
from bertblocks.nn.relative import RelativeVectors
from tests.helpers import pad_ids, ragged_ids, tiny_config

V3 = {
    "block_pos_enc_kind": "disentangled",
    "embd_pos_enc_kind": "none",
    "disentangled_num_buckets": 8,
    "disentangled_max_distance": 20,
    "disentangled_norm": True,
    "disentangled_share_projections": True,
}


@pytest.mark.parametrize(("buckets", "distance"), [(256, 512), (32, 320), (8, 20), (7, 50), (2, 4)])
def test_buckets_equal_deberta(buckets: int, distance: int) -> None:
    distances = torch.arange(-2 * distance, 2 * distance + 1)
    expected = make_log_bucket_position(distances, buckets, distance).long()
    assert torch.equal(log_buckets(distances, buckets, distance), expected)


@pytest.mark.parametrize(("buckets", "distance"), [(None, 10), (8, 20)])
@pytest.mark.parametrize("reach", [0, 1, 4, 5, 9, 10, 11, 40])
def test_only_rows_within_reach_are_used(buckets: Any, distance: int, reach: int) -> None:
    embedding = RelativeEmbedding(3, distance, buckets)
    vectors, indices = embedding(reach)
    indices = torch.arange(2 * reach + 1) if indices is None else indices
    assert indices.min() == 0
    assert indices.max() == len(vectors) - 1
    expected = embedding.indices(torch.arange(-reach, reach + 1))
    assert torch.equal(vectors[indices], embedding.table.weight[expected])


def naive_weights(model: BertBlocksModel, x: Tensor, scores: list[str], buckets: int | None) -> Tensor:
    """The weights `[heads, length, length]` of the first layer for one sequence, one head, query and key at a time."""
    config, attention = model.config, model.encoder.layers[0].attention
    heads, kv_heads, size = config.num_attention_heads, config.num_kv_heads, config.head_dim
    embedding, position = model.encoder.position, attention.position
    vectors = embedding.table.weight if embedding.norm is None else embedding.norm(embedding.table.weight)
    most, span = config.disentangled_max_distance, buckets or config.disentangled_max_distance

    def project(rows: Tensor) -> list[Tensor]:
        parts = attention.qkv(rows).split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
        return [part.view(len(rows), -1, size) for part in parts]

    q, k, _ = project(x)
    if config.disentangled_share_projections:
        position_q, position_k, _ = project(vectors)
    else:
        position_q, position_k = q, k
        if "p2c" in scores:
            position_q = position.query(vectors).view(-1, heads, size)
        if "c2p" in scores:
            position_k = position.key(vectors).view(-1, kv_heads, size)
    weights = torch.zeros(heads, len(x), len(x), dtype=x.dtype)
    for head in range(heads):
        kv = head * kv_heads // heads
        for i in range(len(x)):
            for j in range(len(x)):
                distance = torch.tensor(i - j)
                bucket = int(make_log_bucket_position(distance, buckets, most)) if buckets else i - j
                row = min(max(bucket + span, 0), 2 * span - 1)
                score = q[i, head] @ k[j, kv]
                if "c2p" in scores:
                    score = score + q[i, head] @ position_k[row, kv]
                if "p2c" in scores:
                    score = score + position_q[row, head] @ k[j, kv]
                weights[head, i, j] = score / math.sqrt(size * (1 + len(scores)))
    return weights.softmax(dim=-1)


@pytest.mark.parametrize("scores", [["c2p"], ["p2c"], ["c2p", "p2c"]], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("buckets", [None, 8])
def test_weights_equal_the_formula(scores: Any, kv_heads: int, shared: bool, buckets: Any) -> None:
    config = tiny_config(
        block_pos_enc_kind="disentangled",
        disentangled_scores=scores,
        disentangled_share_projections=shared,
        disentangled_num_buckets=buckets,
        disentangled_max_distance=9,
        disentangled_norm=buckets is not None,
        num_kv_heads=kv_heads,
        num_hidden_layers=1,
        pooler=False,
    )
    model = BertBlocksModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        ids = ragged_ids([13])[0][None]
        out = model(ids, output_attentions=True, output_hidden_states=True)
        expected = naive_weights(model, out.hidden_states[0][0], scores, buckets)
    torch.testing.assert_close(out.attentions[0][0], expected, atol=1e-12, rtol=1e-9)


# ---------------------------------------------------------------------- the kernel of the cpu backend


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("block", [2, 64])
def test_gradients_of_chunks_equal_finite_differences(
    dropout: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole sequence, parts of one with their own keys, and a batch of rows, with distances beyond the reach."""
    monkeypatch.setattr(relative_ops, "BLOCK", block)
    chunks = [
        AttentionChunk(slice(0, 3), slice(0, 3)),
        AttentionChunk(slice(3, 5), slice(3, 7)),
        AttentionChunk(slice(5, 7), slice(4, 7)),
        SequenceBatch(slice(7, 11), 2, 2),
    ]
    torch.manual_seed(0)
    q, k, v = (torch.randn(11, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    keys, queries = (torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def attend(*inputs: Tensor) -> Tensor:
        torch.manual_seed(1)
        q, k, v, keys, queries = inputs
        return attend_chunks(q, k, v, chunks, 0.7, dropout, RelativeVectors(keys, queries, 2))

    assert torch.autograd.gradcheck(attend, (q, k, v, keys, queries), fast_mode=True)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor of each dtype that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.sizes[tensor.dtype] = max(self.sizes.get(tensor.dtype, 0), size)
        return result


@pytest.mark.parametrize("backend", ["eager", "sdpa", "cpu"])
def test_indices_are_linear_in_the_length(backend: str) -> None:
    model = BertBlocksModel(tiny_config(attention_backend=backend, num_hidden_layers=1, **V3)).train()
    with LargestTensor() as largest:
        model(torch.randint(1, 60, (1, 400))).last_hidden_state.sum().backward()
    assert largest.sizes[torch.int64] < 4 * 400


@pytest.mark.parametrize("options", [{}, {"local_attention": True}], ids=["global", "local"])
def test_memory_of_the_cpu_backend_is_linear_in_the_length(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients too: no tensor grows with the square of the length."""
    monkeypatch.setattr(cpu, "RELATIVE_BLOCK", 16)
    monkeypatch.setattr(relative_ops, "BLOCK", 16)
    config = tiny_config(attention_backend="cpu", num_hidden_layers=1, pooler=False, **V3, **options)
    model = BertBlocksModel(config).train()
    sizes = []
    for length in (200, 400):
        with LargestTensor() as largest:
            model(torch.randint(1, 60, (1, length))).last_hidden_state.sum().backward()
        sizes.append(largest.sizes[torch.float32])
    assert sizes[1] < 2.2 * sizes[0]


# ---------------------------------------------------------------------- costs, other layers, errors


def test_flops_count_distances_and_convolution() -> None:
    """4 heads of 8: two more products per pair, and 15 vectors of distances within reach of 8 tokens."""
    options: dict[str, Any] = {"num_hidden_layers": 1, "block_pos_enc_kind": "disentangled"}
    plain = count_flops(BertBlocksForMaskedLM(tiny_config(num_hidden_layers=1)), 8)
    own = count_flops(BertBlocksForMaskedLM(tiny_config(**options, input_conv_size=3)), 8)
    shared = count_flops(BertBlocksForMaskedLM(tiny_config(**options, disentangled_share_projections=True)), 8)
    assert own["attention over keys"] == 2 * plain["attention over keys"]
    assert own["attention projections"] - plain["attention projections"] == 2 * 2 * 15 * 32 * 32
    assert shared == {**own, "feed-forward": plain["feed-forward"], "total": shared["total"]}
    assert own["feed-forward"] - plain["feed-forward"] == 2 * 8 * 32 * 32 * 3


def test_all_layers_share_one_table() -> None:
    model = BertBlocksModel(tiny_config(**V3))
    assert [name for name, _ in model.named_parameters() if "table" in name] == ["encoder.position.table.weight"]
    positions = [layer.attention.position for layer in model.encoder.layers]
    assert all(isinstance(position, DisentangledPosition) for position in positions)
    assert all(position.embedding is model.encoder.position for position in positions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disentangled_scores": ["c2c"]}, "disentangled_scores is ['c2c']; it must list c2p or p2c, or both"),
        ({"disentangled_scores": []}, "disentangled_scores is []; it must list c2p or p2c, or both"),
        ({"disentangled_num_buckets": 64, "disentangled_max_distance": 33}, "it must be more than 33"),
        ({"attention_key_bias": True, "attention_qkv_bias": False}, "it requires attention_qkv_bias true"),
        ({"input_conv_size": 4}, "input_conv_size is 4; it must be odd"),
        ({"input_conv_size": 3, "input_conv_groups": 5}, "it must divide hidden_size = 768"),
        ({"embedding_norm_after_projection": True}, "it requires embedding_norm and embedding_projection true"),
        ({"layer_overrides": {1: {"block_pos_enc_kind": "t5"}}}, "layers can share one table only"),
    ],
)
def test_contradictions_raise_an_error_that_names_the_key(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        BertBlocksConfig(**{"block_pos_enc_kind": "disentangled", **options})


@pytest.mark.parametrize(("kernel", "groups"), [(3, 1), (5, 2), (1, 4)])
def test_convolution_equals_that_of_each_sequence(kernel: int, groups: int) -> None:
    layer = InputConvolution(8, kernel, groups, "gelu", torch.nn.LayerNorm(8), 0.0).double().eval()
    ids, mask = pad_ids(ragged_ids([1, 2, 0, 7]))
    for unpad in (True, False):
        layout = SequenceLayout.from_mask(mask, unpad)
        x, y = (torch.randn(4, 7, 8, dtype=torch.float64) for _ in range(2))
        actual = layout.scatter(layer(layout.gather(x), layout.gather(y), layout))
        for row, length in enumerate([1, 2, 0, 7]):
            if length:
                alone = torch.nn.functional.conv1d(
                    x[row, :length].t()[None], layer.conv.weight, layer.conv.bias, padding=kernel // 2, groups=groups
                )[0].t()
                expected = layer.norm(y[row, :length] + torch.nn.functional.gelu(alone))
                torch.testing.assert_close(actual[row, :length], expected, atol=1e-12, rtol=1e-9)
    assert ids.shape == mask.shape
