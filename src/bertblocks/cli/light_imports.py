"""Imports models without the packages that transformers imports at its top and prediction never uses."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

#: True in the process of the `bertblocks` command, where nobody else uses transformers.
is_own_process = False
#: The versions of torch and transformers whose imports are known; others import what they want.
KNOWN = ("2.13.", "5.22.")
#: The answers by which transformers decides to import accelerate, scipy.optimize, and torch.distributed.tensor with
#: sympy: for training, for object detection, and for models on several devices.
CHECKS = ("is_accelerate_available", "is_scipy_available", "is_torch_distributed_available")
#: Decorators that mark functions for torch.compile. To do so they import all of torch's compiler.
MARKS = ("allow_in_graph", "assume_constant_result", "disable")


@contextlib.contextmanager
def without_unused() -> Iterator[None]:
    """While transformers' models are imported inside this block, those packages count as missing, and marks do nothing.

    These packages take longer to import than all the rest. The modules of transformers that this process imports here
    keep the answer, so it is given only where prediction is the one thing that happens.
    """
    if not is_own_process or "transformers.modeling_utils" in sys.modules:
        yield
        return
    import torch
    import transformers.utils
    from transformers.utils import import_utils

    if not (torch.__version__.startswith(KNOWN[0]) and transformers.__version__.startswith(KNOWN[1])):
        yield
        return
    replaced = [(module, name, _is_missing) for module in (transformers.utils, import_utils) for name in CHECKS]
    replaced += [(torch.compiler, name, _unchanged) for name in MARKS]
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, function in replaced:
        setattr(module, name, function)
    stand_in = sys.modules["torch._dynamo"] = torch._dynamo = _Compiler(torch)
    try:
        yield
    finally:
        for (module, name, _), function in zip(replaced, before, strict=True):
            setattr(module, name, function)
        stand_in.leave()


class _Compiler(types.ModuleType):
    """Stands in for torch's compiler until something other than marks and single modules of it is needed."""

    def __init__(self, torch: types.ModuleType) -> None:
        super().__init__("torch._dynamo")
        self.__path__ = [os.path.join(path, "_dynamo") for path in torch.__path__]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in MARKS:
            return _unchanged
        self.leave()
        return getattr(importlib.import_module("torch._dynamo"), name)

    def leave(self) -> None:
        """Lets the next import find the compiler itself; torch imports it when its attribute is asked for."""
        if sys.modules.get("torch._dynamo") is self:
            del sys.modules["torch._dynamo"], vars(sys.modules["torch"])["_dynamo"]


def _is_missing() -> bool:
    return False


def _unchanged(function: Any = None, **_: Any) -> Any:
    return function or _unchanged
