"""Models as users see them: inputs, outputs, losses, and use with torch and transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

from bertblocks import (
    BertBlocksForMaskedLM,
    BertBlocksForQuestionAnswering,
    BertBlocksForSequenceClassification,
    BertBlocksForTokenClassification,
    BertBlocksModel,
    from_huggingface,
)
from bertblocks.models import TASK_MODELS
from bertblocks.nn.backends import SdpaBackend
from bertblocks.nn.position import BLOCK_POSITIONS, BlockPosition
from tests.helpers import pad_ids, ragged_ids, tiny_config

LENGTHS = [12, 5, 1, 0]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return pad_ids(ragged_ids(LENGTHS))


# ---------------------------------------------------------------------- a new RoPE theta


@pytest.mark.parametrize(
    "options",
    [
        {"local_rope_theta": 20.0, "local_attention": True, "layer_types": ["global", "local", "global"]},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}},
        {"num_hidden_groups": 1},
        {"layer_overrides": {1: {"rope_theta": 30.0}, 2: {"block_pos_enc_kind": "alibi"}}},
    ],
    ids=["local layers", "scaled", "shared layers", "overrides"],
)
def test_set_rope_theta_equals_a_model_built_with_that_theta(options: Any) -> None:
    options = {"block_pos_enc_kind": "rope", "local_rope_theta": 100.0, **options}
    model = BertBlocksForMaskedLM(tiny_config(rope_theta=100.0, **options)).eval()
    built = BertBlocksForMaskedLM(tiny_config(rope_theta=5000.0, **options)).eval()
    built.load_state_dict(model.state_dict())
    ids, mask = batch()
    before = model(ids, attention_mask=mask).logits
    model.set_rope_theta(5000)
    after = model(ids, attention_mask=mask).logits
    assert torch.equal(after, built(ids, attention_mask=mask).logits)
    assert not torch.allclose(after, before, atol=1e-3)
    assert model.config.to_dict() == built.config.to_dict()


def test_set_rope_theta_leaves_the_model_unchanged_when_it_raises() -> None:
    for kind, theta, message in (("alibi", 500.0, "no global layer with RoPE"), ("rope", 0.0, "larger than 0")):
        model = BertBlocksModel(tiny_config(block_pos_enc_kind=kind))
        before = model.config.to_dict()
        with pytest.raises(ValueError, match=message):
            model.set_rope_theta(theta)
        assert model.config.to_dict() == before


# ---------------------------------------------------------------------- input


@pytest.mark.parametrize("unpad", [True, False])
def test_all_forms_of_a_mask_give_the_same_output(unpad: Any) -> None:
    model = BertBlocksModel(tiny_config(unpad=unpad)).eval()
    ids, mask = batch()
    lowest = torch.finfo(torch.float32).min
    forms = {
        "bool": mask.bool(),
        "int": mask,
        "float": mask.float(),
        "additive -inf": torch.zeros(mask.shape).masked_fill(mask == 0, float("-inf")),
        "additive lowest": torch.zeros(mask.shape).masked_fill(mask == 0, lowest),
        "extended": torch.zeros(mask.shape).masked_fill(mask == 0, lowest)[:, None, None],
    }
    results = {name: model(ids, attention_mask=form).last_hidden_state for name, form in forms.items()}
    for name, result in results.items():
        assert torch.equal(result, results["bool"]), name


def test_inputs_embeds_give_the_output_of_ids() -> None:
    model = BertBlocksModel(tiny_config()).eval()
    ids, mask = batch()
    by_ids = model(ids, attention_mask=mask)
    by_embeddings = model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask)
    assert torch.equal(by_embeddings.last_hidden_state, by_ids.last_hidden_state)


def test_token_types_and_positions_change_the_output() -> None:
    model = BertBlocksModel(tiny_config()).eval()
    ids, mask = batch()
    plain = model(ids, attention_mask=mask).last_hidden_state
    types = torch.zeros_like(ids)
    torch.testing.assert_close(model(ids, mask, token_type_ids=types).last_hidden_state, plain, atol=1e-6, rtol=0)
    types[0, 3] = 1
    assert not torch.allclose(model(ids, mask, token_type_ids=types).last_hidden_state[0], plain[0], atol=1e-3)
    positions = torch.arange(ids.shape[1])[None]
    assert torch.equal(model(ids, mask, position_ids=positions).last_hidden_state, plain)
    assert not torch.allclose(model(ids, mask, position_ids=positions + 1).last_hidden_state, plain, atol=1e-3)


@pytest.mark.parametrize("kind", ["rope", "learned"])
def test_position_ids_are_used_by_rope_and_by_tables(kind: Any) -> None:
    """A sequence with positions 0, 2, 4 equals every second token of a longer one that cannot see the others."""
    options = {"block_pos_enc_kind": "rope", "embd_pos_enc_kind": "none"} if kind == "rope" else {}
    model = BertBlocksModel(tiny_config(**options, num_hidden_layers=1)).eval()
    ids = torch.tensor([[5, 6, 7]])
    holes = torch.tensor([[5, 9, 6, 9, 7]])
    spread = model(ids, position_ids=torch.tensor([[0, 2, 4]])).last_hidden_state
    masked = model(holes, attention_mask=torch.tensor([[1, 0, 1, 0, 1]])).last_hidden_state[:, ::2]
    torch.testing.assert_close(spread, masked, atol=1e-6, rtol=1e-5)


TWO = {"input_ids": torch.tensor([[1, 2]])}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of input_ids and inputs_embeds"),
        (
            {"input_ids": torch.tensor([[1, 60]])},
            "input_ids holds 60; it must be at least 0 and less than vocab_size = 60",
        ),
        ({"input_ids": torch.tensor([[1, -1]])}, "input_ids holds -1"),
        (
            {"input_ids": torch.tensor([[1, 2]], dtype=torch.uint8)},
            "input_ids has the dtype uint8; it must be int64 or int32",
        ),
        ({"input_ids": torch.ones(1, 65).long()}, "has 65 tokens; max_position_embeddings = 64 leaves room for 64"),
        ({"input_ids": torch.tensor([1, 2])}, r"Input has shape \[2\]"),
        ({"input_ids": torch.ones(2, 0).long()}, r"Input has shape \[2, 0\]"),
        ({"input_ids": torch.ones(0, 2).long()}, r"Input has shape \[0, 2\]"),
        ({**TWO, "token_type_ids": torch.tensor([[0, 2]])}, "token_type_ids holds 2"),
        ({**TWO, "position_ids": torch.tensor([[0, 64]])}, "position_ids holds 64"),
        ({**TWO, "attention_mask": torch.ones(1, 3)}, r"attention_mask has shape \[1, 3\]"),
        (
            {**TWO, "attention_mask": torch.ones(1, 2), "cu_seqlens": torch.tensor([0, 2])},
            "attention_mask and cu_seqlens",
        ),
        ({"input_ids": torch.ones(2, 2).long(), "cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens goes with flat input"),
        ({"input_ids": torch.tensor([1, 2]), "cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens is \[0, 3\]"),
    ],
)
def test_invalid_input_raises_one_clear_sentence(arguments: Any, message: Any) -> None:
    with pytest.raises(ValueError, match=message):
        BertBlocksModel(tiny_config())(**arguments)


@pytest.mark.parametrize("kind", ["alibi", "none"])
def test_position_ids_without_a_position_encoding_raise(kind: Any) -> None:
    model = BertBlocksModel(tiny_config(block_pos_enc_kind=kind, embd_pos_enc_kind="none"))
    with pytest.raises(ValueError, match="no position encoding that uses them"):
        model(torch.tensor([[1, 2]]), position_ids=torch.tensor([[0, 1]]))


def test_position_ids_of_flat_input_and_of_a_wrong_shape() -> None:
    model = BertBlocksModel(tiny_config()).eval()
    flat, bounds = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])
    given = model(flat, cu_seqlens=bounds, position_ids=torch.tensor([[0, 1, 0]])).last_hidden_state
    assert torch.equal(given, model(flat, cu_seqlens=bounds).last_hidden_state)
    with pytest.raises(ValueError, match=r"position_ids has shape \[1, 2\]; it must be \[3\]"):
        model(flat, cu_seqlens=bounds, position_ids=torch.tensor([[0, 1]]))


def test_positions_with_an_offset_count_real_tokens_only() -> None:
    """RoBERTa's rule, with a mask that has a hole."""
    model = BertBlocksModel(tiny_config(position_offset=2))
    positions = []
    model.embedding.position.table.register_forward_hook(lambda module, inputs, output: positions.append(inputs[0]))
    model(torch.tensor([[5, 6, 9, 7]]), attention_mask=torch.tensor([[1, 1, 0, 1]]))
    assert positions[0][[0, 1, 3]].tolist() == [2, 3, 4]


# ---------------------------------------------------------------------- output


def test_attentions_equal_transformers() -> None:
    config = BertConfig(  # type: ignore[call-arg]
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = BertModel(config).eval()
    ours = from_huggingface(theirs)
    ids, mask = pad_ids(ragged_ids([12, 5, 1]))
    expected = theirs(ids, attention_mask=mask, output_attentions=True).attentions
    for unpad in (True, False):
        ours.config.unpad = unpad
        actual = ours(ids, attention_mask=mask, output_attentions=True).attentions
        assert len(actual) == 2
        real = (mask[:, None, :, None] * mask[:, None, None, :]).bool().expand_as(expected[0])
        for weights, expected_weights in zip(actual, expected, strict=True):
            torch.testing.assert_close(weights[real], expected_weights[real], atol=1e-6, rtol=1e-5)
            if unpad:
                assert not weights[~real].any()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("unpad", [True, False])
def test_attentions_are_in_the_columns_of_their_tokens(side: Any, unpad: Any) -> None:
    model = BertBlocksModel(tiny_config(unpad=unpad)).eval()
    sequences = ragged_ids([6, 3])
    ids, mask = pad_ids(sequences, side)
    weights = model(ids, mask, output_attentions=True).attentions[0]
    for row, sequence in enumerate(sequences):
        alone = model(sequence[None], output_attentions=True).attentions[0][0]
        real = mask[row].bool()
        torch.testing.assert_close(weights[row][:, real][:, :, real], alone, atol=1e-6, rtol=1e-5)


def test_attentions_of_packed_input_are_one_per_sequence() -> None:
    model = BertBlocksModel(tiny_config()).eval()
    sequences = ragged_ids([6, 3])
    packed = model(torch.cat(sequences), cu_seqlens=torch.tensor([0, 6, 9]), output_attentions=True).attentions[0]
    assert packed.shape == (2, 4, 6, 6)
    alone = model(sequences[1][None], output_attentions=True).attentions[0][0]
    torch.testing.assert_close(packed[1, :, :3, :3], alone, atol=1e-6, rtol=1e-5)


def test_attentions_of_padding_only_are_zero() -> None:
    model = BertBlocksModel(tiny_config())
    for unpad in (True, False):
        model.config.unpad = unpad
        out = model(torch.ones(2, 3).long(), attention_mask=torch.zeros(2, 3).long(), output_attentions=True)
        assert out.attentions[0].shape == (2, 4, 3, 3)
        assert not out.attentions[0].any()
        assert not out.last_hidden_state.any()


def test_tuple_output() -> None:
    model = BertBlocksModel(tiny_config()).eval()
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(ids, return_dict=False)[0], model(ids).last_hidden_state)


def test_packed_shapes() -> None:
    ids, bounds = torch.cat(ragged_ids([4, 2, 3])), torch.tensor([0, 4, 6, 9])
    options = {"input_ids": ids, "cu_seqlens": bounds}
    config = tiny_config(num_labels=5)
    assert BertBlocksModel(config)(**options).last_hidden_state.shape == (9, 32)
    assert BertBlocksModel(config)(**options).pooler_output.shape == (3, 32)
    assert BertBlocksForMaskedLM(config)(**options).logits.shape == (9, 60)
    assert BertBlocksForSequenceClassification(config)(**options).logits.shape == (3, 5)
    assert BertBlocksForTokenClassification(config)(**options).logits.shape == (9, 5)
    assert BertBlocksForQuestionAnswering(config)(**options).start_logits.shape == (9,)
    one_row = {"input_ids": ids[None], "cu_seqlens": bounds}
    assert BertBlocksModel(config)(**one_row).last_hidden_state.shape == (1, 9, 32)


@pytest.mark.parametrize("task", [task for task in TASK_MODELS if task not in ("base", "masked-diffusion")])
def test_packed_losses_equal_padded_losses(task: Any) -> None:
    model = TASK_MODELS[task](tiny_config(num_labels=3)).eval()
    sequences = ragged_ids([6, 2, 9])
    ids, mask = pad_ids(sequences)
    real = mask == 1
    if task == "sequence-classification":
        padded = packed = {"labels": torch.tensor([0, 2, 1])}
    elif task == "question-answering":
        padded = packed = {"start_positions": torch.tensor([1, 0, 8]), "end_positions": torch.tensor([5, 1, 99])}
    else:
        labels = torch.where(torch.rand(ids.shape) < 0.7, torch.randint(0, 3, ids.shape), -100)
        padded, packed = {"labels": labels.masked_fill(~real, -100)}, {"labels": labels[real]}
    expected = model(ids, attention_mask=mask, **padded).loss
    bounds = torch.tensor([0, 6, 8, 17])
    torch.testing.assert_close(model(torch.cat(sequences), cu_seqlens=bounds, **packed).loss, expected)


@pytest.mark.parametrize("unpad", [True, False])
def test_a_question_aware_head_scores_padded_texts_like_each_text_alone(unpad: bool) -> None:
    config = tiny_config(qa_head="question_aware", question_token_id=7, unpad=unpad)
    model = BertBlocksForQuestionAnswering(config).eval()
    sequences = [torch.tensor(ids) for ids in ([5, 7, 6, 7, 8], [9, 8], [7, 3, 4])]
    ids, mask = pad_ids(sequences)
    ids[1, 2:] = 7  # hidden by the mask
    scores = model(ids, attention_mask=mask)
    for row, sequence in enumerate(sequences):
        alone = model(sequence[None])
        torch.testing.assert_close(scores.start_logits[row, : len(sequence)], alone.start_logits[0])
        torch.testing.assert_close(scores.end_logits[row, : len(sequence)], alone.end_logits[0])
    assert model(torch.zeros(2, 3, dtype=torch.long), attention_mask=torch.zeros(2, 3)).start_logits.shape == (2, 3)


def test_labels_of_a_wrong_shape_are_not_broadcast() -> None:
    model = BertBlocksForSequenceClassification(tiny_config(num_labels=1))
    with pytest.raises(ValueError, match=r"labels has shape \[1\]; for regression it must be \[2, 1\]"):
        model(torch.tensor([[1], [2]]), labels=torch.tensor([5.0]))


# ---------------------------------------------------------------------- masked LM


def test_training_sends_only_labelled_tokens_through_the_head() -> None:
    model = BertBlocksForMaskedLM(tiny_config()).train()
    ids, mask = batch()
    labels = torch.full_like(ids, -100)
    labels[0, 2], labels[0, 7], labels[1, 1] = 5, 6, 7
    labels[3, 0] = 8  # a label on padding is ignored
    sizes = []
    model.decoder.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    out = model(ids, attention_mask=mask, labels=labels)
    assert sizes == [3]
    assert out.logits is None
    full = model(ids, attention_mask=mask, labels=labels, return_logits=True)
    assert full.logits.shape == (4, 12, 60)
    torch.testing.assert_close(full.loss, out.loss)
    by_hand = torch.nn.functional.cross_entropy(full.logits[[0, 0, 1], [2, 7, 1]], torch.tensor([5, 6, 7]))
    torch.testing.assert_close(out.loss, by_hand)
    model.eval()
    assert model(ids, attention_mask=mask, labels=labels).logits.shape == (4, 12, 60)


def test_num_items_in_batch_divides_the_loss() -> None:
    """The losses of two halves, each divided by the labels of both, add up to the loss of the whole batch."""
    model = BertBlocksForMaskedLM(tiny_config()).train()
    ids, mask = pad_ids(ragged_ids([12, 5, 9, 2]))
    labels = torch.where((torch.rand(ids.shape) < 0.5) & (mask == 1), ids, -100)
    count = (labels != -100).sum()
    whole = model(ids, mask, labels=labels).loss
    halves = [model(ids[p], mask[p], labels=labels[p], num_items_in_batch=count).loss for p in (slice(2), slice(2, 4))]
    torch.testing.assert_close(halves[0] + halves[1], whole)


def test_a_batch_without_labels_has_a_loss_of_zero() -> None:
    model = BertBlocksForMaskedLM(tiny_config()).train()
    loss = model(torch.tensor([[1, 2]]), labels=torch.tensor([[-100, -100]])).loss
    loss.backward()
    assert loss == 0


def test_tied_and_untied_decoders() -> None:
    tied = BertBlocksForMaskedLM(tiny_config())
    assert tied.decoder.weight is tied.model.embedding.token.weight
    untied = BertBlocksForMaskedLM(tiny_config(tie_word_embeddings=False))
    assert untied.decoder.weight is not untied.model.embedding.token.weight


def test_output_attentions_can_be_set_in_the_config(tmp_path: Path) -> None:
    model = BertBlocksModel(tiny_config(attention_backend="sdpa"))
    model.config.output_attentions = True
    model.config.output_hidden_states = True
    out = model(torch.tensor([[1, 2, 3]]))
    assert (len(out.attentions), len(out.hidden_states)) == (3, 4)
    model.save_pretrained(tmp_path)
    assert BertBlocksModel.from_pretrained(tmp_path, output_attentions=False)(torch.tensor([[1, 2]])).attentions is None


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": False}, {"ngpt": True, "ngpt_logit_scale": True}])
def test_resize_token_embeddings(options: Any) -> None:
    model = BertBlocksForMaskedLM(tiny_config(**options)).eval()
    tie = not options
    ids = torch.tensor([[1, 2, 3]])
    before = model(ids).logits
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == 70
    assert (model.decoder.weight is model.model.embedding.token.weight) == tie
    after = model(torch.tensor([[1, 2, 3]])).logits
    torch.testing.assert_close(after[..., :60], before)
    assert model(torch.tensor([[69]])).logits.shape == (1, 1, 70)
    model.resize_token_embeddings(50)
    assert model(torch.tensor([[49]])).logits.shape == (1, 1, 50)
    model.config.mask_token_id = 45
    with pytest.raises(ValueError, match="mask_token_id is 45; a vocabulary of 40 does not contain it"):
        model.resize_token_embeddings(40)
    assert model.config.vocab_size == 50


# ---------------------------------------------------------------------- inside torch and transformers


@pytest.mark.parametrize("options", [{}, {"ngpt": True}, {"block_pos_enc_kind": "alibi", "local_attention": True}])
def test_gradient_checkpointing_keeps_gradients_equal(options: Any) -> None:
    ids, mask = batch()
    gradients = []
    model = BertBlocksForMaskedLM(tiny_config(**options)).train()
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


class LearnedBias(BlockPosition):
    """A position encoding with a parameter, as users may register."""

    has_bias = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 0.3))

    @classmethod
    def from_config(cls, config: Any, is_local: Any) -> Any:
        return cls()

    def bias(self, distance: Any) -> Any:
        return -self.weight.view(-1, *(1,) * distance.dim()) * distance.abs()


@pytest.mark.parametrize("local", [False, True])
def test_gradients_of_a_learned_bias(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal with eager and sdpa, with and without gradient checkpointing: a bias with parameters is not shared."""
    monkeypatch.setitem(BLOCK_POSITIONS._blocks, "own", LearnedBias)
    monkeypatch.setattr(SdpaBackend, "block_size", 3)
    model = BertBlocksModel(tiny_config(block_pos_enc_kind="own", local_attention=local)).double().train()
    ids, mask = pad_ids(ragged_ids([40, 9]))
    gradients = []
    for backend, checkpointing in (("eager", False), ("sdpa", False), ("sdpa", True)):
        model.config.attention_backend = backend
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, attention_mask=mask).last_hidden_state.square().sum().backward()
        gradients.append(torch.stack([layer.attention.position.weight.grad for layer in model.encoder.layers]))  # type: ignore[misc]
    assert gradients[0].abs().min() > 0
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {
            "norm_pos": "pre",
            "norm_fn": "rms",
            "block_pos_enc_kind": "rope",
            "local_attention": True,
            "num_global_tokens": 1,
        },
        pytest.param({"block_pos_enc_kind": "alibi", "num_kv_heads": 2}, marks=pytest.mark.slow),
        pytest.param({"ngpt": True}, marks=pytest.mark.slow),
    ],
    ids=["rope rms local", "alibi grouped", "ngpt"],
)
def test_compiles_without_a_graph_break(options: Any) -> None:
    torch._dynamo.reset()
    model = BertBlocksForMaskedLM(tiny_config(**options)).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for side in ("right", "left"):
        ids, mask = pad_ids(ragged_ids([40, 23, 1, 0]), side)
        expected = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(compiled(ids, attention_mask=mask).logits, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_compiles_with_inductor() -> None:
    torch._dynamo.reset()
    model = BertBlocksModel(tiny_config(norm_pos="pre", block_pos_enc_kind="rope", local_attention=True)).eval()
    ids, mask = batch()
    with torch.no_grad():
        actual = torch.compile(model)(ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(actual, model(ids, attention_mask=mask).last_hidden_state, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options", [{}, {"ngpt": True}, {"block_pos_enc_kind": "rope", "qk_norm": True, "norm_fn": "rms"}]
)
def test_half_precision_outputs_stay_half_and_close_to_fp32(dtype: Any, options: Any) -> None:
    model = BertBlocksModel(tiny_config(initializer_range=0.05, **options)).eval()
    ids, mask = batch()
    expected = model(ids, mask).last_hidden_state
    actual = model.to(dtype)(ids, mask).last_hidden_state
    assert actual.dtype == dtype
    assert (actual.float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_attn_implementation_sets_the_attention_backend(tmp_path: Path) -> None:
    model = BertBlocksModel(tiny_config())
    model.save_pretrained(tmp_path)
    loaded = BertBlocksModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config.attention_backend == "eager"
    loaded.set_attn_implementation("sdpa")
    assert loaded.config.attention_backend == "sdpa"
    with pytest.raises(
        ValueError, match=r"attention_backend is 'esdpa'; it must be one of auto, .* \(did you mean 'sdpa'\?\)"
    ):
        BertBlocksModel.from_pretrained(tmp_path, attn_implementation="esdpa")
    with pytest.raises(ValueError, match="attention_backend is 'flex_attention'"):
        loaded.set_attn_implementation("flex_attention")
    assert loaded.config.attention_backend == "sdpa"


def test_lora_trains_and_merges() -> None:
    peft = pytest.importorskip("peft")
    base = BertBlocksForSequenceClassification(tiny_config(num_labels=3))
    lora = peft.LoraConfig(
        task_type="SEQ_CLS", r=4, target_modules=["qkv", "out", "up", "down"], modules_to_save=["classifier"]
    )
    model = peft.get_peft_model(base, lora)
    ids, mask = pad_ids(ragged_ids([6, 3]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(20):
        loss = model(input_ids=ids, attention_mask=mask, labels=torch.tensor([0, 2])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    model.eval()
    expected = model(input_ids=ids, attention_mask=mask).logits
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids, attention_mask=mask).logits, expected, atol=1e-4, rtol=1e-4)


class Examples(torch.utils.data.Dataset):
    """Padded sequences whose labels follow from their tokens."""

    def __init__(self, task: str, count: int = 64) -> None:
        self.items = []
        for ids in ragged_ids([3 + index % 9 for index in range(count)]):
            padded, mask = pad_ids([ids], width=12)
            item = {"input_ids": padded[0], "attention_mask": mask[0]}
            if task == "sequence-classification":
                item["labels"] = (ids[0] % 2).long()
            elif task == "question-answering":
                item.update(start_positions=torch.tensor(0), end_positions=torch.tensor(len(ids) - 1))
            elif task == "token-classification":
                item["labels"] = torch.where(mask[0] == 1, padded[0] % 2, -100)
            else:
                item["input_ids"] = padded[0] % 3 + 5  # a model quickly learns that there are only three words
                item["labels"] = torch.where(mask[0] == 1, item["input_ids"], -100)
            if task == "pretraining":
                item["order_labels"] = item["input_ids"][0] % 2
            self.items.append(item)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict:
        return self.items[index]


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=() if task in ("masked-lm", "sequence-classification") else pytest.mark.slow)
        for task in TASK_MODELS
        if task != "base"
    ],
)
def test_hf_trainer_trains_evaluates_and_saves(task: Any, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = TASK_MODELS[task](tiny_config(num_hidden_layers=1, mask_token_id=3, initializer_range=0.05))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=30, per_device_train_batch_size=16, learning_rate=0.01, report_to=[],
        gradient_accumulation_steps=2, logging_steps=5, save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Examples(task), eval_dataset=Examples(task, 16))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert trainer.evaluate()["eval_loss"] < losses[0]
    trainer.save_model(str(tmp_path / "saved"))
    again = TASK_MODELS[task].from_pretrained(tmp_path / "saved")
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    from transformers import BertTokenizer

    words = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", ".", "!", "?", "##s", "good", "bad"]
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    return BertTokenizer(str(vocabulary))


def test_pipelines(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import pipeline

    config = tiny_config(vocab_size=len(tokenizer), num_labels=3)

    def make(task: str, model_class: Any) -> Any:
        folder = tmp_path / task
        model_class(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return pipeline(task, model=str(folder), tokenizer=str(folder))

    texts = ["the cat sat on the mat .", "a dog ran !"]
    filled = make("fill-mask", BertBlocksForMaskedLM)("the [MASK] sat", top_k=2)
    assert len(filled) == 2
    assert all(answer["token_str"] in tokenizer.get_vocab() for answer in filled)
    labels = make("text-classification", BertBlocksForSequenceClassification)(texts, batch_size=2)
    assert {label["label"] for label in labels} <= {"LABEL_0", "LABEL_1", "LABEL_2"}
    tags = make("token-classification", BertBlocksForTokenClassification)(texts, batch_size=2)
    assert [tag["word"] for tag in tags[1]] == ["a", "dog", "ran", "!"]
    features = make("feature-extraction", BertBlocksModel)(texts)
    assert [len(feature[0]) for feature in features] == [9, 6]


# ---------------------------------------------------------------------- attribution


def attributions(model: Any, ids: Any, mask: Any, **options: Any) -> Any:
    """Gradients of one logit with respect to every returned hidden state and attention, computed in two ways."""

    def forward() -> Any:
        out = model(ids, attention_mask=mask, output_hidden_states=True, output_attentions=True, **options)
        return out.logits[0, 0], [*out.hidden_states, *out.attentions]

    logit, returned = forward()
    gradients = torch.autograd.grad(logit, returned)
    logit, returned = forward()
    for tensor in returned:
        tensor.retain_grad()
    logit.backward()
    for tensor, gradient in zip(returned, gradients, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)
    return gradients


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("unpad", [True, False])
def test_gradients_of_hidden_states_and_attentions_equal_transformers(unpad: Any, side: Any) -> None:
    config = BertConfig(  # type: ignore[call-arg]
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, num_labels=3,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = BertForSequenceClassification(config).eval()
    ours = from_huggingface(theirs)
    ours.config.unpad = unpad
    ids, mask = pad_ids(ragged_ids([12, 5, 1]), side)
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}  # BERT counts padding on the left
    expected, actual = attributions(theirs, ids, mask, **positions), attributions(ours, ids, mask)
    assert [gradient.shape for gradient in actual] == [gradient.shape for gradient in expected]
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        real = mask.bool()[:, :, None] if gradient.dim() == 3 else (mask[:, None, :, None] * mask[:, None, None]).bool()
        torch.testing.assert_close(gradient * real, expected_gradient * real, atol=1e-6, rtol=1e-4)
    assert all(gradient.any() for gradient in actual[:-1])


@pytest.mark.parametrize("options", [{"norm_pos": "pre", "norm_fn": "rms"}, {"ngpt": True}, {"num_hidden_groups": 1}])
@pytest.mark.parametrize("task", ["masked-lm", "sequence-classification", "token-classification"])
def test_gradients_reach_the_hidden_states_in_every_task(task: Any, options: Any) -> None:
    model = TASK_MODELS[task](tiny_config(**options)).eval()
    out = model(torch.cat(ragged_ids([4, 2])), cu_seqlens=torch.tensor([0, 4, 6]), output_hidden_states=True)
    gradients = torch.autograd.grad(out.logits.flatten()[1], out.hidden_states)
    assert all(gradient.any() for gradient in gradients)
