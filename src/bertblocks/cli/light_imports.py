"""Imports models without what torch and transformers import at their top and prediction never uses."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

#: True in the process of the `bertblocks` command, where nobody else uses torch and transformers.
is_own_process = False
#: The versions whose imports are known; others import what they want.
KNOWN = {"torch": "2.13.", "transformers": "5.22."}
#: Modules that run when one of their names is first used: transformers reads the sources of all of its models to list
#: their classes, and torch registers what its compiler knows about each operator.
DEFERRED = ("transformers", "transformers.models", "torch.export", "torch._meta_registrations", "torch._dynamo")
#: The modules of transformers' names that models use.
HOMES = {
    "AddedToken": "tokenization_utils_base",
    "AutoConfig": "models.auto.configuration_auto",
    "AutoTokenizer": "models.auto.tokenization_auto",
    "PreTrainedConfig": "configuration_utils",
    "PreTrainedModel": "modeling_utils",
    "PreTrainedTokenizerBase": "tokenization_utils_base",
    "PreTrainedTokenizerFast": "tokenization_utils_tokenizers",
}
#: Decorators that mark functions for torch.compile, which prediction does not call.
MARKS = ("allow_in_graph", "assume_constant_result", "disable")
#: The answers by which transformers decides to import accelerate, scipy.optimize, and torch.distributed.tensor with
#: sympy: for training, for object detection, and for models on several devices.
CHECKS = ("is_accelerate_available", "is_scipy_available", "is_torch_distributed_available")


@contextlib.contextmanager
def without_unused() -> Iterator[None]:
    """Inside this block, importing torch and transformers' models runs only what prediction needs.

    What is left out takes longer to import than all the rest. The modules of transformers that are imported here keep
    what they were told, so this is only for a process where prediction is the one thing that happens.
    """
    if not (is_own_process and "torch" not in sys.modules and "transformers" not in sys.modules and _are_known()):
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    gc.disable()  # hardly anything that an import makes is garbage
    try:
        with _replaced(
            (importlib.metadata, "packages_distributions", _Distributions),
            (inspect, "getmodule", _get_module),
        ):
            import transformers.utils
            from transformers.utils import import_utils

            answers = {**dict.fromkeys(CHECKS, False), "direct_transformers_import": transformers}
            modules = (transformers.utils, import_utils)
            with _replaced(*((module, name, _Answer(answers[name])) for module in modules for name in answers)):
                yield
    finally:
        gc.freeze()
        gc.enable()
        finder.is_open = False


def _are_known() -> bool:
    return all(importlib.metadata.version(name).startswith(version) for name, version in KNOWN.items())


@contextlib.contextmanager
def _replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Replaces attributes of modules."""
    before = [getattr(module, name) for module, name, _ in places]
    try:
        for module, name, value in places:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(places, before, strict=True):
            setattr(module, name, value)


class _Answer:
    """A function that always returns the same."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self.value


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the deferred modules as Python does, and leaves it to them when they run."""

    def __init__(self) -> None:
        self.is_open = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in DEFERRED or not self.is_open:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader, self)
        return spec


class _DeferringLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, finder: _Finder) -> None:
        self.loader, self.finder = loader, finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        assert isinstance(module, _Deferred)
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self.loader
        module.deferring = self.finder
        if module.__name__ == "transformers":
            module.__version__ = importlib.metadata.version("transformers")


class _Deferred(types.ModuleType):
    """A module that runs when a name of it is used. Its submodules can be imported without it."""

    deferring: _Finder
    has_run = False
    __version__: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not self.has_run:
            if self.__name__ == "torch._dynamo" and name in MARKS and self.deferring.is_open:
                return _unchanged
            if self.__name__ == "transformers" and (home := _find_home(name)) is not None:
                return getattr(importlib.import_module(f"transformers.{home}"), name)
            if self.__spec__ is not None and self.__spec__.submodule_search_locations is not None:
                submodule = f"{self.__name__}.{name}"
                if submodule in sys.modules or importlib.util.find_spec(submodule) is not None:
                    return importlib.import_module(submodule)
            self.run()
        if name in vars(self):
            return vars(self)[name]
        module = sys.modules[self.__name__]
        if module is self:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(module, name)  # transformers' packages replace themselves

    def run(self) -> None:
        """Executes the module. The parts of torch's compiler need each other without naming each other."""
        package = self.__name__.partition(".")[0]
        for name in DEFERRED:
            module = sys.modules.get(name)
            is_needed = module is self or (package == "torch" and name.startswith("torch."))
            if is_needed and isinstance(module, _Deferred) and not module.has_run:
                module.has_run = True
                module.__loader__.exec_module(module)  # type: ignore[union-attr]


class _Distributions(dict[str, list[str]]):
    """The distributions of each importable name, as `importlib.metadata.packages_distributions` lists them.

    Listing reads the metadata of all installed packages. Most names are those of their distribution, or missing.
    """

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            return self[name]
        try:
            return [importlib.metadata.distribution(name).metadata["Name"]]
        except importlib.metadata.PackageNotFoundError:
            if importlib.util.find_spec(name) is None:
                return default
        self.update(_list_distributions())
        return super().get(name, default)


_list_distributions = importlib.metadata.packages_distributions


def _find_home(name: str) -> str | None:
    """The module of transformers that has one of its names, or None."""
    if name in HOMES:
        return HOMES[name]
    if name.startswith("AutoModel"):
        return "models.auto.modeling_auto"
    from transformers.models.auto import configuration_auto

    model = name.removesuffix("Fast").removesuffix("Tokenizer").lower()
    for model_type, config in configuration_auto.CONFIG_MAPPING_NAMES.items():
        if config == name or re.sub("[-_]", "", model_type) == model:
            home = f"models.{configuration_auto.model_type_to_module_name(model_type)}"
            if name.removesuffix("Fast") in dir(importlib.import_module(f"transformers.{home}")):
                return home
    return None


def _get_module(thing: Any, *args: Any) -> types.ModuleType | None:
    """`inspect.getmodule`, which for a frame resolves the paths of all modules. torch asks it where operators are."""
    if isinstance(thing, types.FrameType):
        return sys.modules.get(thing.f_globals.get("__name__", ""))
    return _find_module(thing, *args)


_find_module = inspect.getmodule


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    return function or _unchanged
