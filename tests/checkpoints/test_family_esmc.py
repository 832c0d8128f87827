"""ESM C in the layout that its authors published, against a few lines that compute one sequence from it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertblocks import from_huggingface, load, save_huggingface
from bertblocks.checkpoints.families import read_config
from tests.helpers import pad_ids, ragged_ids

WIDTH, HEADS, LAYERS, INNER, VOCAB = 24, 4, 3, 256, 64
LENGTHS = [40, 17, 2, 1]
#: The arguments of the authors' class, and the config of ESM++, which has the same tensors.
CONFIGS: dict[str, dict[str, Any]] = {
    "authors": {"model_type": "esmc", "d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS},
    "ESM++": {
        "model_type": "ESMplusplus",
        "architectures": ["ESMplusplusForMaskedLM"],
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "dropout": 0.0,
    },
}


def make_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = {"embed.weight": torch.randn(VOCAB, WIDTH)}

    def add(name: str, rows: int, columns: int | None, bias: bool = False) -> None:
        weight = 1 + 0.2 * torch.randn(rows) if columns is None else 0.2 * torch.randn(rows, columns)
        tensors.update({f"{name}.weight": weight} | ({f"{name}.bias": 0.2 * torch.randn(rows)} if bias else {}))

    for index in range(LAYERS):
        stem = f"transformer.blocks.{index}."
        add(stem + "attn.layernorm_qkv.0", WIDTH, None, bias=True)
        add(stem + "attn.layernorm_qkv.1", 3 * WIDTH, WIDTH)
        add(stem + "attn.q_ln", WIDTH, None)
        add(stem + "attn.k_ln", WIDTH, None)
        add(stem + "attn.out_proj", WIDTH, WIDTH)
        add(stem + "ffn.0", WIDTH, None, bias=True)
        add(stem + "ffn.1", 2 * INNER, WIDTH)
        add(stem + "ffn.3", WIDTH, INNER)
    add("transformer.norm", WIDTH, None)
    add("sequence_head.0", WIDTH, WIDTH, bias=True)
    add("sequence_head.2", WIDTH, None, bias=True)
    add("sequence_head.3", VOCAB, WIDTH, bias=True)
    return tensors


def compute(tensors: dict[str, Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
    """The embeddings and logits of one sequence."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    size = WIDTH // HEADS
    angles = torch.arange(len(ids))[:, None] / 10_000 ** (torch.arange(0, size, 2) / size)  # [length, size / 2]

    def rotate(x: Tensor) -> Tensor:
        first, second = x.view(len(ids), HEADS, size).chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    x, scale = tensors["embed.weight"][ids], math.sqrt(LAYERS / 36)
    for index in range(LAYERS):
        stem = f"transformer.blocks.{index}."
        q, k, v = linear(stem + "attn.layernorm_qkv.1", norm(stem + "attn.layernorm_qkv.0", x)).chunk(3, -1)
        q, k = rotate(norm(stem + "attn.q_ln", q)), rotate(norm(stem + "attn.k_ln", k))
        weights = (torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(size)).softmax(-1)
        attended = torch.einsum("hij,jhd->ihd", weights, v.reshape(len(ids), HEADS, size)).flatten(1)
        x = x + linear(stem + "attn.out_proj", attended) / scale
        gate, up = linear(stem + "ffn.1", norm(stem + "ffn.0", x)).chunk(2, -1)
        x = x + linear(stem + "ffn.3", F.silu(gate) * up) / scale
    x = norm("transformer.norm", x)
    return x, linear("sequence_head.3", norm("sequence_head.2", F.gelu(linear("sequence_head.0", x))))


def save(folder: Path, layout: str) -> dict[str, Tensor]:
    folder.mkdir(exist_ok=True)
    tensors = make_tensors()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIGS[layout]))
    return tensors


@pytest.mark.parametrize("layout", CONFIGS)
@torch.no_grad()
def test_the_published_layout_gives_its_formula(tmp_path: Path, layout: str) -> None:
    tensors = save(tmp_path, layout)
    model, _ = load(tmp_path)
    assert type(model).__name__ == "BertBlocksForMaskedLM"
    sequences = [ids.clamp(min=2) for ids in ragged_ids(LENGTHS, vocab_size=VOCAB)]
    ids, mask = pad_ids(sequences)
    logits = model(ids, attention_mask=mask).logits
    hidden = from_huggingface(tmp_path, task="base")(ids, attention_mask=mask).last_hidden_state
    for row, sequence in enumerate(sequences):
        expected_hidden, expected = compute(tensors, sequence)
        torch.testing.assert_close(hidden[row, : len(sequence)], expected_hidden, atol=1e-5, rtol=1e-5)
        size = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(logits[row, : len(sequence)], expected, atol=1e-5 * size, rtol=1e-5)


def test_the_published_layout_is_written_as_transformers_stores_it(tmp_path: Path) -> None:
    tensors = save(tmp_path / "published", "authors")
    assert save_huggingface(from_huggingface(tmp_path / "published"), tmp_path / "written") == "esmc"
    written = load_file(tmp_path / "written" / "model.safetensors")
    parts = [written[f"esmc.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(torch.cat(parts), tensors["transformer.blocks.1.attn.layernorm_qkv.1.weight"])
    again = from_huggingface(tmp_path / "written").state_dict()
    for name, tensor in from_huggingface(tmp_path / "published").state_dict().items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize(("width", "heads", "layers", "inner"), [(960, 15, 30, 2560), (1152, 18, 36, 3072)])
def test_the_sizes_of_the_published_models_follow_from_the_arguments(
    width: int, heads: int, layers: int, inner: int
) -> None:
    config = read_config({"model_type": "esmc", "d_model": width, "n_heads": heads, "n_layers": layers})
    sizes = config.hidden_size, config.num_attention_heads, config.num_hidden_layers, config.intermediate_size
    assert sizes == (width, heads, layers, inner)
    assert config.residual_scale == pytest.approx(math.sqrt(36 / layers))
