"""Properties over random configs and batches: what the output of a token must not depend on."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertblocks import BertBlocksForSequenceClassification, BertBlocksModel
from bertblocks.nn.backends import SdpaBackend
from tests.helpers import WINDOW, pad_ids, ragged_ids, tiny_config


@st.composite
def configs(draw: Any) -> Any:
    options = {
        "norm_fn": draw(st.sampled_from(["layer", "rms", "group", "dynamic_tanh", "deep"])),
        "norm_eps": 1e-5,
        "mlp_type": draw(st.sampled_from(["mlp", "glu", "moe"])),
        "hidden_act": draw(st.sampled_from(["gelu", "silu", "relu", "tanh"])),
        "embd_pos_enc_kind": draw(st.sampled_from(["learned", "sinusoidal", "none"])),
        "block_pos_enc_kind": draw(st.sampled_from(["rope", "alibi", "t5", "disentangled", "none"])),
        "num_kv_heads": draw(st.sampled_from([1, 2, 4])),
        "qk_norm": draw(st.booleans()),
        "attention_sinks": draw(st.booleans()),
        "span_convolution": draw(st.booleans()),
        "parallel_block": draw(st.booleans()),
        "local_attention": draw(st.booleans()),
        "attention_backend": draw(st.sampled_from(["eager", "sdpa"])),
        "unpad": draw(st.booleans()),
    }
    positions = ["post"] if options["norm_fn"] == "deep" else ["pre", "post", "pre_and_post", "sandwich", "none"]
    options["norm_pos"] = draw(st.sampled_from(positions))
    options["norm_scaling"] = options["norm_pos"] in ("pre", "sandwich") and draw(st.booleans())
    if options["qk_norm"]:
        options["qk_norm_fn"] = draw(st.sampled_from(["rms", "layer"]))
        options["qk_norm_across_heads"] = draw(st.booleans())
    if options["local_attention"]:
        options["global_attention_every_n_layers"] = draw(st.sampled_from([None, 1, 2]))
        options["num_global_tokens"] = draw(st.sampled_from([0, 1, 3]))
    if options["block_pos_enc_kind"] == "disentangled":
        options["disentangled_num_buckets"] = draw(st.sampled_from([None, 6]))
        options["disentangled_max_distance"] = draw(st.sampled_from([5, 20]))
        options["disentangled_share_projections"] = draw(st.booleans())
    if options["block_pos_enc_kind"] == "rope":
        options["rope_interleaved"] = draw(st.booleans())
    if options["block_pos_enc_kind"] == "rope" and draw(st.booleans()):
        options["rope_scaling"] = {"rope_type": draw(st.sampled_from(["linear", "dynamic"])), "factor": 2.0}
        options["max_position_embeddings"] = 64
    if draw(st.integers(0, 5)) == 0:
        shared = ("embd_pos_enc_kind", "block_pos_enc_kind", "local_attention", "attention_backend", "unpad")
        options = {"ngpt": True, **{key: options[key] for key in shared}}
    return tiny_config(num_hidden_layers=2, initializer_range=0.2, pooler=False, **options)


lengths = st.lists(st.integers(0, 4 * WINDOW), min_size=1, max_size=5).filter(any)


@settings(max_examples=120, deadline=None)
@given(configs(), lengths, st.sampled_from(["left", "right"]), st.integers(0, 7), st.integers(0, 1000))
def test_a_token_depends_on_its_own_sequence_only(config: Any, lengths: Any, side: Any, extra: Any, seed: Any) -> None:
    """The output does not depend on other sequences, on the side or amount of padding, or on the order of the batch."""
    torch.manual_seed(seed)
    before, SdpaBackend.block_size = SdpaBackend.block_size, 3
    try:
        model = BertBlocksModel(config).double().eval()
        sequences = ragged_ids(lengths, seed=seed)
        ids, mask = pad_ids(sequences, side, max(lengths) + extra)
        with torch.no_grad():
            together = model(ids, attention_mask=mask).last_hidden_state
            for row, sequence in enumerate(sequences):
                if len(sequence):
                    alone = model(sequence[None]).last_hidden_state[0]
                    scale = alone.abs().max()
                    torch.testing.assert_close(
                        together[row][mask[row] == 1], alone, atol=1e-9 * float(scale), rtol=1e-9
                    )
                assert not together[row][mask[row] == 0].any()
    finally:
        SdpaBackend.block_size = before


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=4),
    st.sampled_from(["eager", "sdpa"]),
    st.sampled_from(["rope", "alibi", "t5", "disentangled", "none"]),
    st.integers(0, 1000),
)
def test_tokens_masked_inside_a_sequence_do_not_affect_others(
    rows: Any, backend: Any, position: Any, seed: Any
) -> None:
    """A mask with holes: the token under a hole has no effect, but distances count it."""
    torch.manual_seed(seed)
    config = tiny_config(
        local_attention=True, num_global_tokens=1, block_pos_enc_kind=position, attention_backend=backend, pooler=False
    )
    model = BertBlocksModel(config).double().eval()
    mask = torch.tensor(rows)
    ids = torch.randint(1, 60, mask.shape)
    other = torch.where(mask, ids, torch.randint(1, 60, mask.shape))
    with torch.no_grad():
        one = model(ids, attention_mask=mask).last_hidden_state
        two = model(other, attention_mask=mask).last_hidden_state
    assert torch.equal(one, two)
    assert torch.isfinite(one).all()
    assert not one[~mask].any()


@settings(max_examples=30, deadline=None)
@given(lengths, st.sampled_from(["cls", "last", "mean", "max"]), st.integers(0, 1000))
def test_a_sequence_label_depends_on_its_own_sequence_only(lengths: Any, pooling: Any, seed: Any) -> None:
    torch.manual_seed(seed)
    config = tiny_config(classifier_pooling=pooling, classifier_head="dense", num_labels=3, num_hidden_layers=1)
    model = BertBlocksForSequenceClassification(config).double().eval()
    sequences = ragged_ids(lengths, seed=seed)
    ids, mask = pad_ids(sequences)
    with torch.no_grad():
        together = model(ids, attention_mask=mask).logits
        for row, sequence in enumerate(sequences):
            if len(sequence):
                torch.testing.assert_close(together[row], model(sequence[None]).logits[0], atol=1e-9, rtol=1e-9)
    assert torch.isfinite(together).all()
