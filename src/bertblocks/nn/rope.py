"""Rotary position embedding and its config keys."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bertblocks.core.keys import Key, Problem
from bertblocks.core.registry import nearest
from bertblocks.nn.layout import SequenceLayout, is_capturing, to_device
from bertblocks.nn.numerics import upcast
from bertblocks.nn.ops.gpu import own_kernels
from bertblocks.nn.ops.rotary import apply_rotary
from bertblocks.nn.position import BlockPosition, register_position

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

#: Precisions to which the frequencies can be rounded.
FREQUENCY_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# ---------------------------------------------------------------------- scaling

#: The kinds of scaling in transformers and "ntk", with the keys that each requires.
ROPE_SCALINGS: dict[str, tuple[str, ...]] = {
    "ntk": ("factor",),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
#: Keys that each kind accepts in addition.
OPTIONAL_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": ("original_max_position_embeddings",),
    "longrope": ("original_max_position_embeddings", "attention_factor", "factor"),
}


def read_scaling(scaling: Any) -> Any:
    """Replace transformers' older spelling of the kind; the default kind is no scaling."""
    if not isinstance(scaling, dict):
        return scaling
    if "type" in scaling and "rope_type" not in scaling:
        scaling = {"rope_type": scaling["type"], **{key: value for key, value in scaling.items() if key != "type"}}
    return None if scaling == {"rope_type": "default"} else scaling


def check_scaling(scaling: dict[str, Any]) -> str | None:
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        return f"its rope_type must be one of {', '.join(ROPE_SCALINGS)}{nearest(str(kind), ROPE_SCALINGS)}"
    needed, known = ROPE_SCALINGS[kind], {*ROPE_SCALINGS[kind], *OPTIONAL_SCALING_KEYS.get(kind, ())}
    if not set(needed) <= set(scaling):
        return f"rope_type {kind!r} requires {' and '.join(needed)}"
    for name, value in scaling.items():
        if name == "rope_type":
            continue
        if name not in known:
            return f"rope_type {kind!r} does not take {name!r}{nearest(name, known)}"
        if not all(
            isinstance(number, int | float | None) for number in (value if isinstance(value, list) else [value])
        ):
            return f"its {name} must be a number"
        if name == "factor" and not value > 0:
            return "its factor must be greater than 0"
    return None


# ---------------------------------------------------------------------- block


@register_position("rope")
class RotaryPosition(BlockPosition):
    """Rotary embedding (Su et al., 2021), optionally partial, interleaved or scaled; fp32 tables of any length.

    Dynamic scaling depends only on the length of each sequence, so a text's result never depends on its batch.
    """

    keys: ClassVar[dict[str, Key]] = {
        "rope_theta": Key(float, 10_000.0, "Base of RoPE's wavelengths.", above=0, per_layer=True, layer_type="global"),
        "local_rope_theta": Key(
            float,
            None,
            "rope_theta of local layers. Implied: rope_theta.",
            above=0,
            per_layer=True,
            layer_type="local",
            implied=lambda config: config.rope_theta,
        ),
        "partial_rotary_factor": Key(
            float, 1.0, "Share of each head's units that RoPE rotates.", above=0, most=1, per_layer=True
        ),
        "rope_interleaved": Key(
            bool,
            False,
            "Whether RoPE pairs units (2k, 2k + 1), as in NeoBERT, instead of (k, k + d/2).",
            per_layer=True,
        ),
        "rope_frequency_dtype": Key(
            str,
            "float32",
            "Precision to which RoPE's frequencies are rounded: float32, bfloat16, or float16, as in some ESM-2 "
            "checkpoints.",
            choices=tuple(FREQUENCY_DTYPES),
        ),
        "rope_scaling": Key(
            dict[str, Any] | None,
            None,
            'RoPE scaling of global layers, as in transformers: {"rope_type": "yarn", "factor": 4.0}, or GTE\'s "ntk".',
            per_layer=True,
            layer_type="global",
            read=read_scaling,
            check=check_scaling,
        ),
        "local_rope_scaling": Key(
            dict[str, Any] | None,
            None,
            "RoPE scaling of local layers.",
            per_layer=True,
            layer_type="local",
            read=read_scaling,
            check=check_scaling,
        ),
    }

    def __init__(
        self,
        head_dim: int,
        theta: float,
        partial_factor: float = 1.0,
        interleaved: bool = False,
        scaling: dict[str, Any] | None = None,
        max_positions: int = 512,
        frequency_dtype: torch.dtype = torch.float32,
        kernel_backend: str = "torch",
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.partial_factor = partial_factor
        self.rotary_dim = int(head_dim * partial_factor)
        self.interleaved = interleaved
        self.scaling = scaling
        self.max_positions = max_positions
        self.frequency_dtype = frequency_dtype
        self.kernel_backend = kernel_backend
        self._scaling_key = json.dumps(scaling, sort_keys=True)

    @classmethod
    def check(cls, config: BertBlocksConfig) -> Iterator[Problem]:
        turned = int(config.head_dim * config.partial_rotary_factor)
        uneven = turned % 2 or not turned
        yield (
            "partial_rotary_factor",
            uneven,
            f"it must select an even number of units, and head_dim is {config.head_dim}",
        )
        for key in ("rope_scaling", "local_rope_scaling"):
            rounded = getattr(config, key) is not None and config.rope_frequency_dtype != "float32"
            yield "rope_frequency_dtype", rounded, f"it must be 'float32' with {key}"

    @classmethod
    def from_config(cls, config: BertBlocksConfig, is_local: bool) -> RotaryPosition:
        return cls(
            config.head_dim,
            config.local_rope_theta if is_local else config.rope_theta,
            partial_factor=config.partial_rotary_factor,
            interleaved=config.rope_interleaved,
            scaling=config.local_rope_scaling if is_local else config.rope_scaling,
            max_positions=config.max_position_embeddings,
            frequency_dtype=FREQUENCY_DTYPES[config.rope_frequency_dtype],
            kernel_backend=config.kernel_backend,
        )

    def frequencies(self, length: int | None = None) -> tuple[Tensor, float]:
        """Return each pair's angle per position and the factor on the tables, for a sequence of `length`."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        if self.scaling is None:
            return (1.0 / (self.theta**exponents)).to(self.frequency_dtype).float(), 1.0
        if self.scaling["rope_type"] == "ntk":
            # as in GTE: the highest frequency falls too (Su, 2023, kexue.fm/archives/9706)
            factor = self.scaling["factor"]
            return 1.0 / ((self.theta * factor) ** exponents * factor ** (2 / self.rotary_dim)), 1.0
        parameters = {**self.scaling, "rope_theta": self.theta, "partial_rotary_factor": self.partial_factor}
        parameters.setdefault("original_max_position_embeddings", self.max_positions)
        # transformers' own formulas, given only the config values they read
        config = SimpleNamespace(
            rope_parameters=parameters,
            head_dim=self.head_dim,
            hidden_size=self.head_dim,
            num_attention_heads=1,
            max_position_embeddings=self.max_positions,
            standardize_rope_params=lambda: None,
        )
        return ROPE_INIT_FUNCTIONS[self.scaling["rope_type"]](config, None, seq_len=length)

    def longest_unchanged(self) -> float:
        """Return the length up to which frequencies do not depend on the sequence's length."""
        kind = None if self.scaling is None else self.scaling["rope_type"]
        if self.scaling is not None and kind == "longrope":
            return self.scaling.get("original_max_position_embeddings", self.max_positions)
        return self.max_positions if kind == "dynamic" else math.inf

    def _angles(self, layout: SequenceLayout) -> tuple[Tensor, float]:
        if layout.max_length <= self.longest_unchanged():
            inverse, factor = self.frequencies()
            return layout.positions[:, None].float() * to_device(inverse, layout.device), factor
        lengths = layout.read_lengths()
        by_length = {length: self.frequencies(length) for length in set(lengths)}
        factor = next(iter(by_length.values()))[1]
        inverse = torch.stack([by_length[length][0] for length in lengths])  # [sequences, pairs]
        inverse = to_device(inverse, layout.device)[layout.sequence_ids]
        return layout.positions[:, None].float() * inverse, factor

    def tables(self, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        """Return cosines `[tokens, 1, rotary_dim]` and sines `[tokens, 1, pairs]`.

        Layers with equal settings share them.
        """

        def compute() -> tuple[Tensor, Tensor]:
            angles, factor = self._angles(layout)
            cos, sin = angles.cos() * factor, angles.sin() * factor
            cos = cos.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((cos, cos), dim=-1)
            return cos[:, None], sin[:, None]

        settings = (self.rotary_dim, self.theta, self._scaling_key, self.max_positions, self.frequency_dtype)
        return layout.memo(("rope", *settings, self.interleaved), compute)

    def prepare(self, layout: SequenceLayout) -> None:
        self.tables(layout)

    def rotate(self, q: Tensor, k: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        cos, sin = self.tables(layout)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if (kernels := own_kernels(self.kernel_backend, x)) is not None:
            return kernels.rotate(x, cos, sin, self.interleaved)
        if x.device.type == "cpu" and x.dtype == cos.dtype and not is_capturing():
            return apply_rotary(x, cos, sin, self.interleaved)
        part = upcast(x[..., : self.rotary_dim])
        if self.interleaved:
            crossed = torch.stack((-part[..., 1::2] * sin, part[..., 0::2] * sin), dim=-1).flatten(-2)
        else:
            a, b = part.chunk(2, dim=-1)
            crossed = torch.cat((-b * sin, a * sin), dim=-1)
        rotated = (part * cos + crossed).to(x.dtype)
        return rotated if self.rotary_dim == self.head_dim else torch.cat((rotated, x[..., self.rotary_dim :]), dim=-1)

    def extra_repr(self) -> str:
        return f"{self.rotary_dim}, theta={self.theta:g}, interleaved={self.interleaved}, scaling={self.scaling}"
