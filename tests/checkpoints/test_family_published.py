"""Published layouts without a class in transformers, against a few lines that compute one sequence from them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertblocks import ConfigError, from_huggingface, load, save_huggingface
from bertblocks.checkpoints.families import read_config
from tests.helpers import pad_ids, ragged_ids

VOCAB, HIDDEN, HEADS, INNER, LAYERS = 90, 48, 6, 40, 2
LENGTHS = [60, 33, 2, 1]
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
#: For each family: its config, the names of a layer's parts, and the names around the layers.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "new": (
        {"model_type": "new", "rope_theta": 500.0, "rope_scaling": {"type": "ntk", "factor": 2.0}},
        {"qkv": ["attention.qkv_proj"], "out": "attention.o_proj", "norm1": "attn_ln", "norm2": "mlp_ln"}
        | {"up": "mlp.up_gate_proj", "down": "mlp.down_proj"},
        {"prefix": "new.", "layer": "encoder.layer", "norm": "embeddings.LayerNorm"}
        | {"dense": "lm_head.dense", "head_norm": "lm_head.norm", "bias": "lm_head.decoder.bias", "class": "New"},
    ),
    "mosaic-bert": (
        {"model_type": "bert", "alibi_starting_size": 512},
        {"qkv": ["attention.self.Wqkv"], "out": "attention.output.dense", "norm1": "attention.output.LayerNorm"}
        | {"norm2": "mlp.layernorm", "up": "mlp.gated_layers", "down": "mlp.wo"},
        {"prefix": "bert.", "layer": "encoder.layer", "norm": "embeddings.LayerNorm", "class": "Bert"}
        | {"dense": "cls.predictions.transform.dense", "head_norm": "cls.predictions.transform.LayerNorm"}
        | {"bias": "cls.predictions.decoder.bias"},
    ),
    "jina-bert-v2": (
        {"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"},
        {"qkv": [f"attention.self.{part}" for part in ("query", "key", "value")], "out": "attention.output.dense"}
        | {"norm1": "attention.output.LayerNorm", "norm2": "mlp.layernorm", "up": "mlp.gated_layers", "down": "mlp.wo"},
        {"prefix": "bert.", "layer": "encoder.layer", "norm": "embeddings.LayerNorm", "class": "JinaBert"}
        | {"dense": "cls.predictions.transform.dense", "head_norm": "cls.predictions.transform.LayerNorm"}
        | {"bias": "cls.predictions.bias"},
    ),
    "jina_embeddings_v3": (
        {"model_type": "xlm-roberta", "position_embedding_type": "rotary", "rotary_emb_base": 500.0}
        | {"lora_adaptations": ["query", "passage"], "lora_alpha": 3, "lora_rank": 2},
        {"qkv": ["mixer.Wqkv"], "out": "mixer.out_proj", "norm1": "norm1", "norm2": "norm2"}
        | {"up": "mlp.fc1", "down": "mlp.fc2"},
        {"prefix": "roberta.", "layer": "encoder.layers", "norm": "emb_ln", "class": "XLMRoberta"}
        | {"dense": "lm_head.dense", "head_norm": "lm_head.layer_norm", "bias": "lm_head.bias"},
    ),
}


def make_tensors(family: str) -> dict[str, Tensor]:
    """Random weights of a masked-LM model under the published names."""
    _, part, around = LAYOUTS[family]
    torch.manual_seed(0)
    tensors = {}
    for name, rows in (("word_embeddings", VOCAB), ("token_type_embeddings", BASE["type_vocab_size"])):
        tensors[f"{around['prefix']}embeddings.{name}.weight"] = torch.randn(rows, HIDDEN)

    def add(name: str, rows: int, columns: int | None, bias: bool = True) -> None:
        weight = 1 + 0.2 * torch.randn(rows) if columns is None else 0.2 * torch.randn(rows, columns)
        tensors.update({f"{name}.weight": weight} | ({f"{name}.bias": 0.2 * torch.randn(rows)} if bias else {}))

    add(around["prefix"] + around["norm"], HIDDEN, None)
    is_gated = part["up"] != "mlp.fc1"
    for index in range(LAYERS):
        stem = f"{around['prefix']}{around['layer']}.{index}."
        for name in part["qkv"]:
            add(stem + name, 3 * HIDDEN // len(part["qkv"]), HIDDEN)
        add(stem + part["out"], HIDDEN, HIDDEN)
        add(stem + part["up"], 2 * INNER if is_gated else INNER, HIDDEN, bias=not is_gated)
        add(stem + part["down"], HIDDEN, INNER)
        add(stem + part["norm1"], HIDDEN, None)
        add(stem + part["norm2"], HIDDEN, None)
    add(around["dense"], HIDDEN, HIDDEN)
    add(around["head_norm"], HIDDEN, None)
    tensors[around["bias"]] = torch.randn(VOCAB)
    return tensors


def compute(family: str, tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The logits of one sequence."""
    config, part, around = LAYOUTS[family]

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    prefix, length, size = around["prefix"], len(ids), HIDDEN // HEADS
    words = tensors[f"{prefix}embeddings.word_embeddings.weight"]
    x = norm(prefix + around["norm"], words[ids] + tensors[f"{prefix}embeddings.token_type_embeddings.weight"][0])
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])  # four heads, then every second of eight
    theta, factor = 500.0, 2.0 if family == "new" else 1.0
    pairs = torch.arange(size // 2, dtype=torch.float64)
    frequencies = 1 / (theta * factor) ** (2 * pairs / size) / factor ** (2 / size)
    angles = (torch.arange(length)[:, None] * frequencies)[:, None]  # [length, 1, size / 2]

    def rotate(x: Tensor) -> Tensor:
        first, second = x.double().chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).float()

    for index in range(LAYERS):
        stem = f"{prefix}{around['layer']}.{index}."
        qkv = torch.cat([linear(stem + name, x) for name in part["qkv"]], -1)
        q, k, v = (heads.view(length, HEADS, size) for heads in qkv.chunk(3, -1))
        if "rope_theta" in config or "rotary_emb_base" in config:
            q, k = rotate(q), rotate(k)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
        if config["model_type"] == "bert":
            scores = scores - slopes[:, None, None] * distance
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, HIDDEN)
        x = norm(stem + part["norm1"], x + linear(stem + part["out"], mixed))
        up = linear(stem + part["up"], x)
        if part["up"] == "mlp.fc1":
            inner = F.gelu(up)
        else:
            first, second = up.chunk(2, -1)
            inner = first * F.gelu(second) if family == "new" else F.gelu(first) * second
        x = norm(stem + part["norm2"], x + linear(stem + part["down"], inner))
    x = norm(around["head_norm"], F.gelu(linear(around["dense"], x)))
    return x @ words.T + tensors[around["bias"]]


def add_adapters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The published names of weights that adapters change, and two adapters for each of them."""
    changed = [name for name, tensor in tensors.items() if tensor.dim() == 2 and name.startswith("roberta.")]
    parts = {name: tensor for name, tensor in tensors.items() if name not in changed}
    for name in changed:
        rows, columns = tensors[name].shape
        stem, is_table = name.removesuffix(".weight") + ".parametrizations.weight.", "embeddings." in name
        parts[stem + "original"] = tensors[name]
        parts[stem + "0.lora_A"] = 0.3 * torch.randn(2, *((rows, 2) if is_table else (2, columns)))
        parts[stem + "0.lora_B"] = 0.3 * torch.randn(2, *((2, columns) if is_table else (rows, 2)))
    return parts


def write(folder: Path, family: str, tensors: dict[str, Tensor], **options: Any) -> Path:
    folder.mkdir()
    config, _, around = LAYOUTS[family]
    values = {**BASE, **config, "architectures": [f"{around['class']}ForMaskedLM"], **options}
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_same(model: Any, family: str, tensors: dict[str, Tensor]) -> None:
    sequences = ragged_ids(LENGTHS, vocab_size=VOCAB)
    ids, mask = pad_ids(sequences)
    expected = torch.cat([compute(family, tensors, sequence) for sequence in sequences])
    for unpad in (True, False):
        model.config.unpad = unpad
        with torch.no_grad():
            actual = model(ids, attention_mask=mask).logits[mask == 1]
        torch.testing.assert_close(actual, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)


@pytest.mark.parametrize("family", LAYOUTS)
def test_published_weights_give_the_outputs_of_the_formula(tmp_path: Path, family: Any) -> None:
    tensors = make_tensors(family)
    model = from_huggingface(write(tmp_path / "theirs", family, tensors))
    assert type(model).__name__ == "BertBlocksForMaskedLM"
    assert model.config.family == family
    assert_same(model, family, tensors)


@pytest.mark.parametrize("family", [name for name in LAYOUTS if name != "jina_embeddings_v3"])
def test_published_layouts_go_out_as_they_came_in(tmp_path: Path, family: Any) -> None:
    tensors = make_tensors(family)
    model = from_huggingface(write(tmp_path / "theirs", family, tensors))
    assert save_huggingface(model, tmp_path / "back") == family
    again = load_file(tmp_path / "back" / "model.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(again[name], tensor), name
    # BERT's heads have two names for one bias
    assert set(again) - set(tensors) <= {"cls.predictions.decoder.bias"}
    values = json.loads((tmp_path / "back" / "config.json").read_text())
    for key, value in {**BASE, **LAYOUTS[family][0]}.items():
        assert values[key] == value, key
    assert_same(from_huggingface(tmp_path / "back"), family, tensors)


@pytest.mark.parametrize("adapter", [None, "query", "passage"])
def test_an_adapter_of_jina_v3_is_merged(tmp_path: Path, adapter: Any) -> None:
    plain = make_tensors("jina_embeddings_v3")
    parts = add_adapters(plain)
    folder = write(tmp_path / "theirs", "jina_embeddings_v3", parts)
    if adapter is not None:
        number = ["query", "passage"].index(adapter)
        for name in [name for name in parts if name.endswith("original")]:
            stem = name.removesuffix("original")
            a, b = parts[stem + "0.lora_A"][number], parts[stem + "0.lora_B"][number]
            product = a @ b if "embeddings." in name else b @ a
            plain[stem.removesuffix(".parametrizations.weight.") + ".weight"] += 1.5 * product
    assert_same(from_huggingface(folder, adapter=adapter), "jina_embeddings_v3", plain)


def test_an_unknown_adapter_is_an_error_that_names_the_known_ones(tmp_path: Path) -> None:
    parts = add_adapters(make_tensors("jina_embeddings_v3"))
    folder = write(tmp_path / "jina", "jina_embeddings_v3", parts)
    with pytest.raises(ValueError, match=r"adapter is 'queri'; the checkpoint has query, passage.*mean 'query'"):
        from_huggingface(folder, adapter="queri")
    folder = write(tmp_path / "new", "new", make_tensors("new"))
    with pytest.raises(ValueError, match=r"adapter is 'query'; checkpoints of the new family have no adapters"):
        from_huggingface(folder, adapter="query")


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("new", {"layer_norm_type": "rms_norm"}, "layer_norm_type is 'rms_norm' in this new config"),
        ("new", {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "'ntk' does not take 'mixed_b'"),
        ("jina-bert-v2", {"feed_forward_type": "original"}, "feed_forward_type is 'original' in this jina-bert-v2"),
        ("mosaic-bert", {"hidden_act": "relu"}, "hidden_act is 'relu' in this mosaic-bert config"),
    ],
)
def test_unsupported_values_raise_an_error_that_names_them(family: Any, options: Any, message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config({**BASE, **LAYOUTS[family][0], **options})


def test_a_published_base_model_opens_with_load(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in make_tensors("jina-bert-v2").items() if name.startswith("bert.")}
    plain = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    model, _ = load(write(tmp_path / "jina", "jina-bert-v2", plain, architectures=["JinaBertModel"]))
    assert type(model).__name__ == "BertBlocksModel"
    assert not model.config.pooler
