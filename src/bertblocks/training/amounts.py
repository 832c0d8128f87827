"""Amounts of training, given in steps, in tokens or as a percentage of the whole, and times."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, PlainSerializer, PlainValidator, WithJsonSchema

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) *([kMBT]?) *(steps?|tokens?|%)?")


@dataclass(frozen=True)
class Amount:
    """A number of steps or tokens, or a percentage of the whole.

    Example:
        >>> Amount.read("3B tokens"), Amount.read(2000), str(Amount.read("10%"))
        (Amount(value=3000000000.0, unit='tokens'), Amount(value=2000, unit='steps'), '10%')
    """

    value: float
    unit: Literal["steps", "tokens", "%"]

    @classmethod
    def read(cls, text: Any) -> Amount:
        if isinstance(text, Amount):
            return text
        match = None if isinstance(text, bool) else _AMOUNT.fullmatch(str(text).strip())
        if match is None:
            raise ValueError(f"is {text!r}; it must be an amount such as 2000, '500 steps', '3B tokens' or '10%'")
        number, scale, unit = match.groups()
        value = float(number) * _UNITS[scale]
        if unit == "%":
            if scale or value > 100:
                raise ValueError(f"is {text!r}; a percentage must be at most 100%")
            return cls(value, "%")
        if (unit or "steps").startswith("step"):
            if value != int(value):
                raise ValueError(f"is {text!r}; the number of steps must be an integer")
            return cls(int(value), "steps")
        return cls(value, "tokens")

    def __str__(self) -> str:
        return f"{self.value:g}%" if self.unit == "%" else f"{self.value:.15g} {self.unit}"


AmountField = Annotated[
    Amount,
    PlainValidator(Amount.read),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": f"^{_AMOUNT.pattern}$"}]}),
]


_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
_TIME = re.compile(r"(\d+(?:\.\d+)?) *(second|minute|hour|day)s?")


def read_time(text: Any) -> float:
    """The seconds of a time.

    Example:
        >>> read_time("1.5 hours")
        5400.0
    """
    match = _TIME.fullmatch(str(text).strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"is {text!r}; it must be a time such as '90 seconds', '30 minutes', '24 hours' or '2 days'")
    return float(match[1]) * _SECONDS[match[2]]


TimeField = Annotated[
    float,
    PlainValidator(read_time),
    PlainSerializer(lambda seconds: f"{seconds:.15g} seconds", return_type=str),
    WithJsonSchema({"type": "string", "pattern": f"^{_TIME.pattern}$"}),
]


def _require_duration(amount: Amount) -> Amount:
    if amount.value <= 0 or amount.unit == "%":
        raise ValueError(f"is {str(amount)!r}; it must be more than 0, in steps or tokens")
    return amount


Duration = Annotated[AmountField, AfterValidator(_require_duration)]
