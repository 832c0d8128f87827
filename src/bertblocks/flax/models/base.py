"""The base class of all models: calls compiled code, and converts to torch and to files."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bertblocks.config import BertBlocksConfig
from bertblocks.core.registry import nearest
from bertblocks.flax.inputs import Inputs, Options
from bertblocks.flax.nn.head import Decoder
from bertblocks.flax.nn.linear import Linear, Table
from bertblocks.flax.outputs import Output
from bertblocks.flax.reading import check_shapes, pad_to_bucket, read_types, read_values
from bertblocks.flax.validation import check_supported
from bertblocks.flax.weights import named_weights, new_torch_model, set_weights, to_torch, torch_weights
from bertblocks.models import BertBlocksPreTrainedModel


class StaticConfig:
    """A config that can be compared and hashed, as JAX requires of static arguments."""

    def __init__(self, config: BertBlocksConfig) -> None:
        self.config = copy.deepcopy(config)
        self.text = json.dumps(config.to_dict(), sort_keys=True, default=str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticConfig) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


class FlaxBertBlocksPreTrainedModel(nnx.Module):
    """Base of all models. Parameters have the names and shapes of the torch model, and there is no other state.

    Without `weights` they are initialized like the torch model after `torch.manual_seed(seed)`.
    """

    task: ClassVar[str]
    #: The names of the labels that the model accepts.
    label_names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        config: BertBlocksConfig,
        seed: int = 0,
        weights: Mapping[str, Any] | None = None,
        dtype: Any = None,
    ) -> None:
        config.validate()
        check_supported(config)
        self.static_config = StaticConfig(config)
        self.build(self.config)
        if weights is None:
            weights = torch_weights(new_torch_model(self.task, config, seed))
        set_weights(self, weights, None if dtype is None else jnp.dtype(dtype).name)

    @property
    def config(self) -> BertBlocksConfig:
        return self.static_config.config

    def build(self, config: BertBlocksConfig) -> None:
        """Builds the modules; their weights are set afterwards."""
        raise TypeError(f"{type(self).__name__} must define build(config)")

    def forward(self, inputs: Inputs, options: Options) -> Any:
        """The compiled function, from arrays to an `Output`."""
        raise TypeError(f"{type(self).__name__} must define forward(inputs, options)")

    # ------------------------------------------------------------------ calls

    def __call__(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        position_ids: Any = None,
        inputs_embeds: Any = None,
        segment_ids: Any = None,
        *,
        max_segments: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        dropout_key: jax.Array | None = None,
        **labels: Any,
    ) -> Any:
        """Runs padded rows with an `attention_mask`, or packed rows with `segment_ids` that number the sequences.

        Values are checked and rows padded to the length of a bucket, for which the code is compiled once. Inside a
        function that the caller compiles, neither is possible: shapes stay as they are, and an id outside of the
        vocabulary gives NaN. Dropout is active only with a `dropout_key`.
        """
        labels = {name: value for name, value in labels.items() if value is not None}
        for name in labels:
            if name not in self.label_names:
                raise TypeError(f"{type(self).__name__} does not accept {name!r}{nearest(name, self.label_names)}.")
        inputs = Inputs(
            input_ids=_array(input_ids),
            attention_mask=_array(attention_mask),
            token_type_ids=_array(token_type_ids),
            position_ids=_array(position_ids),
            inputs_embeds=_array(inputs_embeds),
            segment_ids=_array(segment_ids),
            labels={name: _array(value) for name, value in labels.items()},
            dropout_key=dropout_key,
        )
        check_shapes(inputs, self.config)
        states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        attentions = self.config.output_attentions if output_attentions is None else output_attentions
        options = Options(max_segments, bool(states), bool(attentions))
        if inputs.is_traced():
            return self.forward(read_types(inputs, self.config), options)
        if inputs.is_spread():
            if inputs.is_in_reach():
                self._read(inputs, max_segments)
            return _run(self, read_types(inputs, self.config), options)
        read, max_segments = self._read(inputs, max_segments)
        output: Output = _run(self, pad_to_bucket(read), options._replace(max_segments=max_segments))
        return output.crop(read.shape[1])

    def _read(self, inputs: Inputs, max_segments: int | None) -> tuple[Inputs, int | None]:
        read, max_segments = read_values(inputs, self.config, max_segments)
        return read.replace(labels=self.read_labels(inputs.labels, read)), max_segments

    def read_labels(self, labels: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
        """Checks the values of labels, which compiled code cannot do."""
        return {name: np.asarray(value) for name, value in labels.items()}

    # ------------------------------------------------------------------ weights

    def astype(self, dtype: Any) -> Any:
        """Returns the model with its weights in another precision, in which it then computes.

        Inside a loss function this gives mixed precision: gradients have the precision of the original weights.
        """
        return jax.tree.map(lambda weight: weight.astype(dtype), self)

    def renormalize_weights(self) -> None:
        """Projects nGPT's matrices back onto the unit sphere along the hidden dimension; call it after each step.

        Does nothing unless `ngpt` and `ngpt_renormalize` are set in the config.
        """
        if not (self.config.ngpt and self.config.ngpt_renormalize):
            return
        for _, module in nnx.iter_modules(self):
            if isinstance(module, (Linear, Table, Decoder)) and module.weight is not None:
                axis = 0 if isinstance(module, Linear) and module.writes else 1
                weight = module.weight[...]
                length = jnp.linalg.norm(weight, axis=axis, keepdims=True)
                module.weight[...] = weight / jnp.maximum(length, 1e-8)

    def to_torch(self) -> BertBlocksPreTrainedModel:
        """Returns the torch model with these weights, in evaluation mode; it converts to any family."""
        model = new_torch_model(self.task, copy.deepcopy(self.config), seed=0)
        weights = {name: to_torch(weight) for name, weight in named_weights(self).items()}
        weights |= {tied: weights[source] for tied, source in model.all_tied_weights_keys.items()}
        model.to(next(iter(weights.values())).dtype).load_state_dict(weights)
        return model.eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes `config.json` and safetensors, which both torch and JAX models load."""
        self.to_torch().save_pretrained(folder)


def _array(values: Any) -> Any:
    """Converts lists and tensors to NumPy; JAX arrays stay where they are."""
    return values if values is None or isinstance(values, jax.Array) else np.asarray(values)


@partial(jax.jit, static_argnames="options")
def _run(model: FlaxBertBlocksPreTrainedModel, inputs: Inputs, options: Options) -> Output:
    return model.forward(inputs, options)
