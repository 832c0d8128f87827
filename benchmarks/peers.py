"""Other runtimes with the same weights: graphs exported from a transformers model, in fp32 and int8."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.inputs import Batch, make_batch, ragged_lengths
from benchmarks.workload import Unavailable
from bertblocks.nn.ops.cpu import has_bf16_units

INPUTS = ("input_ids", "attention_mask")


def need(*packages: str) -> None:
    """Raises an error that names the packages a contender lacks."""
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise Unavailable(f"not installed: {', '.join(missing)}")


def need_bf16() -> None:
    """Raises an error unless this CPU multiplies bf16 numbers faster than fp32 ones."""
    if not has_bf16_units(torch.device("cpu")):
        raise Unavailable("this CPU has no fast products in bf16")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Hides what exporters and quantizers print and warn about."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


class HiddenStates(nn.Module):
    """A transformers encoder with ids and mask as input and hidden states as output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


class Graphs:
    """One model exported to ONNX with dynamic batch size and length, and what other runtimes build from it."""

    inputs: tuple[str, ...] = INPUTS
    #: What makes the graph's output of a model.
    wrapper: type[nn.Module] = HiddenStates

    def __init__(
        self, model: PreTrainedModel, name: str, folder: Path, threads: int, calibration: Batch | None = None
    ) -> None:
        self.model, self.name, self.folder, self.threads = model, name, folder, threads
        #: Texts for the activation ranges of static int8.
        self.calibration = calibration or make_batch(ragged_lengths(8, 128), model.config.vocab_size)

    @cached_property
    def file(self) -> Path:
        need("onnx", "onnxscript")
        target = self.folder / f"{self.name}.onnx"
        batch = make_batch([24, 40, 32], self.model.config.vocab_size)
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
        free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        with quietly():
            torch.onnx.export(
                self.wrapper(self.model).eval(),
                tuple(batch[name] for name in self.inputs),
                target,
                dynamo=True,
                dynamic_shapes=(free,) * len(self.inputs),
                input_names=self.inputs,
                output_names=["output"],
                verbose=False,
            )
        return target

    @cached_property
    def onnxruntime(self) -> Callable[[Batch], Tensor]:
        need("onnxruntime")
        return self._session(self.file)

    @cached_property
    def onnxruntime_int8(self) -> Callable[[Batch], Tensor]:
        """Weights are quantized per output channel, activations at run time."""
        need("onnxruntime")
        from onnxruntime.quantization import QuantType, quantize_dynamic

        target = self.file.with_suffix(".int8.onnx")
        with quietly():
            quantize_dynamic(self.file, target, per_channel=True, weight_type=QuantType.QInt8)
        return self._session(target)

    def _session(self, file: Path) -> Callable[[Batch], Tensor]:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        # its threads must not spin while another contender is timed
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return lambda batch: torch.from_numpy(session.run(None, {name: batch[name].numpy() for name in self.inputs})[0])

    @cached_property
    def openvino(self) -> Callable[[Batch], Tensor]:
        need("openvino")
        import openvino

        return self._compiled(openvino.Core().read_model(self.file))

    @cached_property
    def openvino_int8(self) -> Callable[[Batch], Tensor]:
        """Static int8: NNCF measures the activation ranges beforehand."""
        need("openvino", "nncf")
        import nncf
        import openvino

        samples = nncf.Dataset([tuple(self.calibration[name].numpy() for name in self.inputs)])
        with quietly():
            quantized = nncf.quantize(
                openvino.Core().read_model(self.file),
                samples,
                model_type=nncf.ModelType.TRANSFORMER,
                subset_size=1,
            )
        return self._compiled(quantized)

    def _compiled(self, graph: object) -> Callable[[Batch], Tensor]:
        import openvino

        options = {
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
        }
        compiled = openvino.Core().compile_model(graph, "CPU", options)
        return lambda batch: torch.from_numpy(compiled([batch[name].numpy() for name in self.inputs])[0])
