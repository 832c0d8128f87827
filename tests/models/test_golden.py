"""Our encoder with the weights of public NeoBERT implementations, tested against their outputs.

The files in `tests/golden` hold tiny random models in NeoBERT's own names, with their inputs and outputs in fp32. Each
test builds the config by hand, brings the weights into our layout, and compares on real tokens.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM

FOLDER = Path(__file__).parents[1] / "golden"
MODELS = ["neobert-rope_rms_swiglu", "neobert-learned_layer_gelu", "neobert-ngpt", "neobert-official_layout"]


def swiglu_width(intermediate_size: int) -> int:
    """Two thirds of the size, so that three matrices cost as much as two, rounded up to a multiple of 8."""
    return 8 * math.ceil(int(2 * intermediate_size / 3) / 8)


def read_config(reference: dict, weights: dict[str, Tensor], **options: Any) -> BertBlocksConfig:
    """What `config.json` does not name is as in the official NeoBERT: RoPE, RMSNorm, SwiGLU."""
    has_rope = reference.get("rope", True)
    has_rms = reference.get("rms_norm", True)
    is_ngpt = reference.get("ngpt", False)
    is_swiglu = reference.get("hidden_act", "swiglu") == "swiglu"
    inner = reference["intermediate_size"]
    choices = {
        "vocab_size": reference["vocab_size"],
        "hidden_size": reference["hidden_size"],
        "num_hidden_layers": reference["num_hidden_layers"],
        "num_attention_heads": reference["num_attention_heads"],
        "intermediate_size": swiglu_width(inner) if is_swiglu and not is_ngpt else inner,
        "mlp_type": "glu" if is_swiglu else "mlp",
        "hidden_act": "silu" if is_swiglu else "gelu",
        "type_vocab_size": 0,
        "pad_token_id": reference["pad_token_id"],
        "norm_fn": "rms" if has_rms else "layer",
        "norm_bias": not has_rms,
        "norm_eps": reference["norm_eps"],
        "norm_pos": "none" if is_ngpt else "pre",
        "embedding_norm": False,
        "final_norm": not is_ngpt,
        "ngpt": is_ngpt,
        "block_pos_enc_kind": "rope" if has_rope else "none",
        "rope_interleaved": has_rope,
        "embd_pos_enc_kind": "none" if has_rope else "learned",
        "position_offset": 0 if has_rope else 1,
        "max_position_embeddings": reference["max_length"] + (0 if has_rope else 1),
        "mlm_head_dense": False,
        "decoder_bias": "decoder.bias" in weights,
        # not by the flag in config.json: two of the models claim to be tied and were run with two matrices
        "tie_word_embeddings": torch.equal(weights["decoder.weight"], weights["model.encoder.weight"]),
        **dict.fromkeys(("attention_qkv_bias", "attention_out_bias", "mlp_in_bias", "mlp_out_bias"), False),
    }
    return BertBlocksConfig(**choices, **options)


def qkv_rows(weight: Tensor, heads: int) -> Tensor:
    """Reorders rows from [Q_h, K_h, V_h] per head to Q|K|V."""
    by_head = weight.view(heads, 3, -1, weight.shape[-1])
    return by_head.transpose(0, 1).reshape(weight.shape)


def second_half_first(x: Tensor) -> Tensor:
    first, second = x.chunk(2)
    return torch.cat((second, first))


def read_feed_forward(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts all forms of NeoBERT to ours, whose gate is the first half."""
    if "c_fc.weight" in layer:  # nGPT: the gate is its second half
        return {
            "mlp.up.weight": second_half_first(layer["c_fc.weight"]),
            "mlp.suv": second_half_first(layer["suv"]),
            "mlp.down.weight": layer["mlp_c_proj.weight"],
        }
    if "ffn.0.weight" in layer:  # gelu
        return {"mlp.up.weight": layer["ffn.0.weight"], "mlp.down.weight": layer["ffn.2.weight"]}
    if "ffn.w12.weight" in layer:
        return {"mlp.up.weight": layer["ffn.w12.weight"], "mlp.down.weight": layer["ffn.w3.weight"]}
    return {
        "mlp.up.weight": torch.cat((layer["ffn.w1.weight"], layer["ffn.w2.weight"])),
        "mlp.down.weight": layer["ffn.w3.weight"],
    }


def read_layer(layer: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    renamed = {
        "wo.weight": "attention.out.weight",
        "attention_norm.weight": "attention_residual.pre_norm.weight",
        "attention_norm.bias": "attention_residual.pre_norm.bias",
        "ffn_norm.weight": "mlp_residual.pre_norm.weight",
        "ffn_norm.bias": "mlp_residual.pre_norm.bias",
        "sqk": "attention.sqk",
        "attn_alpha": "attention_alpha",
        "mlp_alpha": "mlp_alpha",
    }
    ours = {renamed[name]: weight for name, weight in layer.items() if name in renamed}
    return {**ours, "attention.qkv.weight": qkv_rows(layer["qkv.weight"], heads), **read_feed_forward(layer)}


def read_weights(weights: dict[str, Tensor], config: BertBlocksConfig) -> dict[str, Tensor]:
    renamed = {
        "model.encoder.weight": "model.embedding.token.weight",
        "model.positional_embedding.weight": "model.embedding.position.table.weight",
        "model.layer_norm.weight": "model.encoder.final_norm.weight",
        "model.layer_norm.bias": "model.encoder.final_norm.bias",
        "decoder.weight": "decoder.weight",
        "decoder.bias": "decoder.bias",
    }
    ours = {renamed[name]: weight for name, weight in weights.items() if name in renamed}
    for index in range(config.num_hidden_layers):
        prefix = f"model.transformer_encoder.{index}."
        layer = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        for name, weight in read_layer(layer, config.num_attention_heads).items():
            ours[f"model.encoder.layers.{index}.{name}"] = weight
    return ours


def load(name: str, **options: Any) -> BertBlocksForMaskedLM:
    reference = json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))
    weights = load_file(FOLDER / name / "model.safetensors")
    config = read_config(reference, weights, **options)
    model = BertBlocksForMaskedLM(config)
    model.load_state_dict(read_weights(weights, config), strict=True)
    return model.eval()


def run(model: BertBlocksForMaskedLM, layout: str, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the hidden states and logits of real tokens in order."""
    lengths = mask.sum(1)
    flat = ids[mask]
    if layout == "cu_seqlens":
        inputs = {"input_ids": flat, "cu_seqlens": torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))}
    elif layout == "packed_seqlens":  # all sequences in one row, and some padding after them
        row = torch.cat((flat, torch.zeros(5, dtype=torch.long)))
        inputs = {"input_ids": row[None], "packed_seqlens": lengths[None]}
    else:
        inputs = {"input_ids": ids, "attention_mask": mask}
    out = model(**inputs, output_hidden_states=True)
    hidden, logits = out.hidden_states[-1], out.logits
    if layout == "cu_seqlens":
        return hidden, logits
    if layout == "packed_seqlens":
        return hidden[0, : len(flat)], logits[0, : len(flat)]
    return hidden[mask], logits[mask]


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("layout", ["padded", "ragged", "cu_seqlens", "packed_seqlens"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_hidden_states_and_logits_equal_the_reference(name: Any, layout: Any, backend: Any) -> None:
    model = load(name, attention_backend=backend, unpad=layout != "padded")
    reference = load_file(FOLDER / name / "reference.safetensors")
    ids, mask = reference["input_ids"], reference["attention_mask"].bool()
    hidden, logits = run(model, layout, ids, mask)
    torch.testing.assert_close(hidden, reference["last_hidden_state"][mask], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, reference["logits"][mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_batches_of_the_reference_are_ragged(name: Any) -> None:
    """With batches of equal lengths, the layouts above would be the same."""
    lengths = load_file(FOLDER / name / "reference.safetensors")["attention_mask"].sum(1).tolist()
    assert len(set(lengths)) == len(lengths)
    assert min(lengths) <= 2


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_logits_of_the_reference_come_from_the_decoder_in_its_file(name: Any) -> None:
    """They do not come from the token embeddings, although config.json has `tie_word_embeddings`."""
    weights = load_file(FOLDER / name / "model.safetensors")
    reference = load_file(FOLDER / name / "reference.safetensors")
    mask = reference["attention_mask"].bool()
    hidden, logits = reference["last_hidden_state"][mask], reference["logits"][mask]
    bias = weights.get("decoder.bias", torch.zeros(()))
    torch.testing.assert_close(hidden @ weights["decoder.weight"].T + bias, logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(hidden @ weights["model.encoder.weight"].T + bias, logits, atol=0.1)
    assert ("decoder.bias" in weights) == (name == "neobert-official_layout")
