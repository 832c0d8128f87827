"""Every block in JAX matches torch: hidden states to 1e-4 and gradients to 1e-3."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertblocks import BertBlocksConfig, BertBlocksModel, ConfigError
from bertblocks.flax import from_torch
from bertblocks.flax.inputs import Inputs
from bertblocks.flax.nn import softmax
from bertblocks.flax.validation import check_supported
from tests.flax.helpers import assert_near, assert_same_gradients, hidden_and_gradients, segments_of
from tests.helpers import EDGE_LENGTHS, pad_ids, ragged_ids, tiny_config
from tests.nn.test_invariance import configs
from tests.nn.test_matrix import (
    APART,
    ATTENTION,
    CHOICES,
    FACTORISED,
    GATES,
    GROUPED,
    NGPT,
    NORM_SCALING,
    NORMS,
    OTHERS,
    QK_NORMS,
    SCALES,
    SHARED,
    SINKS,
    SPANS,
    label,
    pack_rows,
)

SEQUENCES = ragged_ids(EDGE_LENGTHS)
ROWS, PACKED = pack_rows(SEQUENCES)
SEGMENTS = segments_of(PACKED, ROWS.shape[1])


#: A third of each product has each of its values; the rest is for `make test-slow`.
QUICK = [
    *NORMS[::3],
    *ATTENTION[::3],
    *NGPT[::3],
    *OTHERS,
    *SCALES,
    *NORM_SCALING[:1],
    *GATES,
    *SINKS[:1],
    *GROUPED[:1],
    *SPANS[:1],
    *APART,
    *QK_NORMS,
    *FACTORISED,
    *SHARED,
]


def few_layers(choice: dict) -> dict:
    """One layer of the products, whose layers are alike; else two, unless the options name a third."""
    if {"layer_types", "num_hidden_groups"} & set(choice):
        return choice
    return {"num_hidden_layers": 1 if choice in (*NORMS, *ATTENTION, *NGPT) else 2, **choice}


def exists_in_jax(config: BertBlocksConfig) -> bool:
    try:
        check_supported(config)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(choice, id=label(choice), marks=() if choice in QUICK else pytest.mark.slow)
        for choice in CHOICES
        if exists_in_jax(tiny_config(**choice))
    ],
)
def test_packed_rows_match_torch(choice: Any) -> None:
    model = BertBlocksModel(tiny_config(pooler=False, **few_layers(choice))).train()
    weights = torch.randn(*ROWS.shape, model.config.hidden_size)
    expected = model(ROWS, packed_seqlens=PACKED).last_hidden_state
    (expected * weights).sum().backward()

    inputs = Inputs(input_ids=jnp.asarray(ROWS.numpy()), segment_ids=jnp.asarray(SEGMENTS))
    hidden, gradients = hidden_and_gradients(from_torch(model), inputs, weights.numpy())
    assert_near(hidden, expected)
    assert_same_gradients(gradients, model)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(
    configs().filter(exists_in_jax),
    st.lists(st.integers(0, 29), min_size=9, max_size=9).filter(any),
    st.sampled_from(["left", "right", "holes"]),
    st.integers(0, 1000),
)
def test_padded_rows_of_random_configs_match_torch(config: Any, lengths: Any, padding: Any, seed: Any) -> None:
    torch.manual_seed(seed)
    config.attention_backend = "eager"
    model = BertBlocksModel(config).train()
    ids, mask = pad_ids(ragged_ids(lengths, seed=seed), "left" if padding == "left" else "right", width=29)
    if padding == "holes":
        mask = mask * (torch.rand(mask.shape) < 0.8)
    weights = torch.randn(*ids.shape, config.hidden_size)
    expected = model(ids, attention_mask=mask).last_hidden_state
    (expected * weights).sum().backward()

    inputs = Inputs(input_ids=jnp.asarray(ids.numpy()), attention_mask=jnp.asarray(mask.numpy() > 0))
    hidden, gradients = hidden_and_gradients(from_torch(model), inputs, weights.numpy())
    assert not hidden[mask.numpy() == 0].any()
    assert_near(hidden, expected)
    assert_same_gradients(gradients, model)


@pytest.mark.parametrize(
    "choice",
    [
        {"block_pos_enc_kind": "rope", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {
            "block_pos_enc_kind": "rope",
            "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
        },
        {"block_pos_enc_kind": "rope", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"block_pos_enc_kind": "t5", "relative_attention_shared": False, "embedding_size": 8},
        {"position_offset": 1, "max_position_embeddings": 80, "token_dropout": True, "mask_token_id": 7},
    ],
    ids=label,
)
def test_blocks_that_depend_on_the_sequence_match_torch(choice: Any) -> None:
    """Covers lengths beyond the 16 positions at which RoPE's scaling starts, mask tokens, and a position offset."""
    embedding = "learned" if "position_offset" in choice else "none"
    options = {"embd_pos_enc_kind": embedding, "max_position_embeddings": 16, "pooler": False, **choice}
    model = BertBlocksModel(tiny_config(num_hidden_layers=2, **options)).eval()
    ids, mask = pad_ids(SEQUENCES)
    ours = from_torch(model)
    assert_near(ours(ids, attention_mask=mask).last_hidden_state, model(ids, attention_mask=mask).last_hidden_state)
    packed = model(ROWS, packed_seqlens=PACKED).last_hidden_state
    assert_near(ours(ROWS, segment_ids=SEGMENTS).last_hidden_state, packed)


@pytest.mark.parametrize(
    ("choice", "max_scores"),
    [
        pytest.param({}, 1, marks=pytest.mark.slow),  # one block at a time
        pytest.param({"local_attention": True}, 1000, marks=pytest.mark.slow),  # several at a time
        ({"local_attention": True}, 2**26),  # by blocks because of the window alone
        ({"local_attention": True, "num_global_tokens": 2}, 4000),
    ],
)
def test_attention_by_blocks_of_queries_equals_attention_at_once(
    choice: Any, max_scores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers one block of queries and several at a time."""
    model = BertBlocksModel(tiny_config(num_hidden_layers=1, pooler=False, block_pos_enc_kind="alibi", **choice))
    weights = torch.randn(*ROWS.shape, 32)
    expected = model(ROWS, packed_seqlens=PACKED).last_hidden_state
    (expected * weights).sum().backward()
    monkeypatch.setattr(softmax, "BLOCK_SIZE", 3)
    monkeypatch.setattr(softmax, "MAX_SCORES", max_scores)
    inputs = Inputs(input_ids=jnp.asarray(ROWS.numpy()), segment_ids=jnp.asarray(SEGMENTS))
    hidden, gradients = hidden_and_gradients(from_torch(model), inputs, weights.numpy())
    assert_near(hidden, expected)
    assert_same_gradients(gradients, model)


def test_every_activation_matches_torch() -> None:
    from bertblocks.flax.nn.activation import ACTIVATIONS, get_activation
    from bertblocks.nn.activation import get_activation as get_torch_activation

    x = np.linspace(-12, 12, 97, dtype=np.float32)
    for name in ACTIVATIONS:
        expected = get_torch_activation(name)(torch.from_numpy(x)).detach()
        np.testing.assert_allclose(get_activation(name)(jnp.asarray(x)), expected, atol=2e-6, rtol=2e-5, err_msg=name)
