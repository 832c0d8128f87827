"""Linear layers that know their place in the model."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """A linear layer with a role, which decides how it starts and along which side nGPT normalises it.

    Roles are "qkv" (its last `value_rows` rows make values), "up", "out" (it writes to the residual stream), "head" and
    "classifier".
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, role: str, value_rows: int = 0) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.role = role
        self.value_rows = value_rows
