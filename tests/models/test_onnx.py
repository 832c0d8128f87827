"""Models in ONNX Runtime equal those in torch, at shapes that the exporter has not seen. Needs the extra `bench`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bertblocks.models import TASK_MODELS
from tests.helpers import pad_ids, ragged_ids, tiny_config

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # an export takes several seconds

ROPE: dict[str, Any] = {"block_pos_enc_kind": "rope", "embd_pos_enc_kind": "none", "norm_fn": "rms"}
BATCHES = [[7, 1, 11], [1], [64, 30], [5, 5], [3, 2, 9, 4, 1]]


def batch(lengths: list[int]) -> dict[str, Tensor]:
    ids, mask = pad_ids(ragged_ids(lengths), side="left" if len(lengths) % 2 else "right")
    return {"input_ids": ids, "attention_mask": mask}


def check_in_onnx_runtime(model: Any, file: Path, batches: list[list[int]], **options: Any) -> None:
    """Exports a model by its first batch and compares its first output for all of them."""
    torch.onnx.export(model, (), file, kwargs=batch(batches[0]), dynamo=True, verbose=False, **options)
    session = onnxruntime.InferenceSession(file)
    for lengths in batches:
        inputs = batch(lengths)
        with torch.no_grad():
            expected = model(**inputs)[0]
        (actual, *_) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        torch.testing.assert_close(torch.from_numpy(actual), expected, atol=2e-5, rtol=1e-4, msg=str(lengths))


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("base", {"attention_backend": "eager"}),
        ("base", {"block_pos_enc_kind": "alibi"}),
        ("base", {"block_pos_enc_kind": "t5", "embd_pos_enc_kind": "none"}),
        ("base", {**ROPE, "mlp_type": "glu", "norm_pos": "pre", "local_attention": True, "num_kv_heads": 2}),
        ("base", {"ngpt": True, "block_pos_enc_kind": "rope", "embd_pos_enc_kind": "none"}),
        ("masked-lm", {"position_offset": 1, "max_position_embeddings": 65}),
        ("sequence-classification", {"classifier_pooling": "mean", "classifier_head": "dense"}),
        ("sequence-classification", {"classifier_pooling": "max", "classifier_head": "none"}),
        ("token-classification", {}),
        ("question-answering", {"embd_pos_enc_kind": "sinusoidal", "norm_fn": "group"}),
    ],
)
def test_a_dynamic_export_accepts_other_batches_and_lengths(tmp_path: Path, task: str, options: Any) -> None:
    model = TASK_MODELS[task](tiny_config(num_hidden_layers=2, **options)).eval()
    free = {0: "batch", 1: "length"}
    shapes = {"input_ids": free, "attention_mask": free}
    check_in_onnx_runtime(model, tmp_path / "model.onnx", BATCHES, dynamic_shapes=shapes)


@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_a_norm_of_zeros_is_zero_in_a_static_export(tmp_path: Path, eps: float) -> None:
    """The exporter drops constants below 1e-8, which are what keeps a norm of padding from dividing by 0."""
    model = TASK_MODELS["base"](tiny_config(num_hidden_layers=1, norm_eps=eps, **ROPE)).eval()
    check_in_onnx_runtime(model, tmp_path / "model.onnx", [[4, 2]])
