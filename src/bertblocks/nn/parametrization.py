"""How scales, initial weights and learning rates follow the width of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from bertblocks.core.keys import Key, Problem
from bertblocks.core.registry import Registry
from bertblocks.nn.linear import Linear

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

PARAMETRIZATIONS: Registry[Any] = Registry("parametrization", reserved=("standard",))
#: Roles of matrices with few outputs, however wide the model is.
OUTPUT_ROLES = ("classifier", "router")


@PARAMETRIZATIONS.register("mup")
class MaximalUpdate:
    """muP, the maximal update parametrization (Yang et al., 2022, table 8), under which the best learning rate does not
    depend on width. With r = hidden_size / mup_base_hidden_size, matrices inside the model start with their standard
    deviation divided by sqrt(r) and learn at the learning rate divided by r; routers and classifiers start with theirs
    divided by r. The decoder reads hidden states divided by r, and attention_scale is multiplied by
    sqrt(mup_base_head_dim / head_dim). At the base sizes nothing changes.
    """

    evidence = (
        "Positive for encoders in its paper (arXiv 2203.03466): a learning rate found at 13M parameters served "
        "BERT-large."
    )
    keys: ClassVar[dict[str, Key]] = {
        "mup_base_hidden_size": Key(
            int | None,
            None,
            "Required: the hidden_size at which muP equals the standard parametrization, the same in all models that "
            "share hyperparameters; usually that of the model in which they are found. Let intermediate_size and "
            "num_attention_heads or head_dim grow with hidden_size.",
            least=1,
            most=2**20,
        ),
        "mup_base_head_dim": Key(
            int, 64, "The head_dim at which attention is scaled as usual.", least=1, most=2**20, per_layer=True
        ),
        "mup_output_multiplier": Key(
            float, 1.0, "Factor on what the masked-LM decoder reads, which transfers between widths.", above=0
        ),
    }
    requires: ClassVar[dict[str, tuple[Any, str]]] = {
        "ngpt": (False, "nGPT normalises its weights and has scales of its own"),
        "qa_head": ("linear", "bilinear forms have no rule"),
        "output_embedding_size": (None, "the decoder must read a vector that grows with the model"),
        "mlm_head_size": (None, "the decoder must read a vector that grows with the model"),
    }

    @classmethod
    def check_model(cls, config: BertBlocksConfig) -> Iterator[Problem]:
        base = config.mup_base_hidden_size
        why = "parametrization 'mup' requires the hidden_size of the model in which hyperparameters were found"
        yield "mup_base_hidden_size", base is None, why
        differs = config.embedding_size != config.hidden_size
        why = (
            f"parametrization 'mup' requires hidden_size = {config.hidden_size}, so that embeddings grow with the model"
        )
        yield "embedding_size", differs, why


def width_ratio(config: BertBlocksConfig) -> float:
    """Return how many times wider a model is than its base; 1 in the standard parametrization."""
    return config.hidden_size / config.mup_base_hidden_size if config.parametrization == "mup" else 1.0


def get_attention_scale(config: BertBlocksConfig) -> float:
    """Return the factor on the products of queries and keys. With muP it falls with 1 / head_dim."""
    if config.parametrization == "standard":
        return config.attention_scale
    return config.attention_scale * (config.mup_base_head_dim / config.head_dim) ** 0.5


def get_decoder_scale(config: BertBlocksConfig) -> float:
    """Return the factor on what the masked-LM decoder reads."""
    if config.parametrization == "standard":
        return 1.0
    return config.mup_output_multiplier / width_ratio(config)


def fan_in_ratio(module: nn.Module, config: BertBlocksConfig) -> float:
    """Return how many times more inputs than in the base model an output of a module sums up.

    That is 1 for everything but matrices and convolutions, and for those with a fixed number of inputs, such as the
    second matrix of LoRA. The decoder is not meant: its input is scaled instead.
    """
    is_wide = isinstance(module, Linear) or (isinstance(module, nn.Linear) and module.in_features >= config.hidden_size)
    if isinstance(module, nn.Conv1d):
        is_wide = module.groups < module.in_channels
    return width_ratio(config) if is_wide else 1.0


def initial_factor(module: nn.Module, config: BertBlocksConfig) -> float:
    """Return the factor on the standard deviation that `init_kind` gives a matrix or a convolution."""
    ratio = fan_in_ratio(module, config)
    role = getattr(module, "role", None)
    follows = config.init_kind in FAN_IN_KINDS or (config.init_kind == "megatron" and role == "classifier")
    follows = follows and not isinstance(module, nn.Conv1d)
    return (1.0 if follows else ratio**-0.5) * (ratio**-0.5 if role in OUTPUT_ROLES else 1.0)


#: Values of `init_kind` whose standard deviation already falls with the root of the number of inputs.
FAN_IN_KINDS = ("fan_in", "mitchell", "xavier", "kaiming", "deepnet")
