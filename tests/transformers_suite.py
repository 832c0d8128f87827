"""Runs transformers' own common model tests over our classes and counts what passes.

The test files come with transformers' source distribution, and they need the package `parameterized`:

    pip download --no-binary :all: --no-deps transformers==5.22.2 && tar xzf transformers-5.22.2.tar.gz
    python -m tests.transformers_suite transformers-5.22.2/tests

`--reference` runs transformers' BERT and ModernBERT instead, for comparison. docs/transformers.md explains the result.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import unittest
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from transformers import BertConfig, ModernBertConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto

import bertblocks
from bertblocks import BertBlocksConfig

#: The name under which transformers' tests are imported, because both packages are called `tests`.
PACKAGE = "transformers_tests"
#: Mixins that the tests import from files that the source distribution leaves out.
LEFT_OUT = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
#: The table of transformers' class names that each of our classes belongs to; the tests choose labels by it.
TABLES = {
    "BertBlocksModel": "MODEL_MAPPING_NAMES",
    "BertBlocksForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "BertBlocksForPreTraining": "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "BertBlocksForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "BertBlocksForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "BertBlocksForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


class ModelTester:
    """What the common tests ask for: a tiny config, and a batch with a mask. The sizes are those of BERT's tester."""

    batch_size, seq_length, is_training, num_labels = 13, 7, True, 3

    def __init__(self, config_class: type[PreTrainedConfig], **options: Any) -> None:
        self.config_class, self.options = config_class, {**SIZES, **options}
        for key, value in self.options.items():
            setattr(self, key, value)

    def get_config(self) -> PreTrainedConfig:
        return self.config_class(**self.options)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
        shape = (self.batch_size, self.seq_length)
        mask = torch.randint(0, 2, shape)
        mask[:, 0] = 1  # as transformers' random masks: the first token is always there
        return self.get_config(), {
            "input_ids": torch.randint(0, self.options["vocab_size"], shape),
            "attention_mask": mask,
        }


def import_tests(folder: Path) -> type:
    """Imports `ModelTesterMixin` from a folder with transformers' tests."""
    package = ModuleType(PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[PACKAGE] = package
    for name, mixin in LEFT_OUT.items():
        if not (folder / f"{name.replace('.', '/')}.py").is_file():
            parent = sys.modules.setdefault(f"{PACKAGE}.{name.split('.')[0]}", ModuleType(name))
            parent.__path__ = []
            module = ModuleType(name)
            setattr(module, mixin, type(mixin, (), {}))
            sys.modules[f"{PACKAGE}.{name}"] = module
    return importlib.import_module(f"{PACKAGE}.test_modeling_common").ModelTesterMixin


def make_case(mixin: type, model_class: Any, config_class: type[PreTrainedConfig], options: dict[str, Any]) -> type:
    """The test case of one model class."""

    class Case(mixin, unittest.TestCase):  # type: ignore[misc, valid-type]
        all_model_classes = (model_class,)
        test_can_init_all_missing_weights_before_2023 = True  # otherwise skipped: our files do not begin with a year

        def setUp(self) -> None:
            self.model_tester = ModelTester(config_class, **options)

        def _prepare_for_class(self, inputs: Any, model_class: Any, return_labels: bool = False) -> dict[str, Any]:
            inputs = super()._prepare_for_class(inputs, model_class, return_labels)
            if return_labels and "ForPreTraining" in model_class.__name__:
                tester = self.model_tester
                inputs["labels"] = torch.zeros(tester.batch_size, tester.seq_length, dtype=torch.long)
                order = "order_labels" if issubclass(config_class, BertBlocksConfig) else "next_sentence_label"
                inputs[order] = torch.zeros(tester.batch_size, dtype=torch.long)
            return inputs

    Case.__name__ = Case.__qualname__ = f"{model_class.__name__}Test"
    return Case


class Result(unittest.TestResult):
    """Counts what passed, too."""

    passed = 0

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.passed += 1


def run(case: type, only: str) -> Result:
    names = [name for name in unittest.defaultTestLoader.getTestCaseNames(case) if only in name]
    result = Result()
    unittest.TestSuite([case(name) for name in names]).run(result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder `tests` of transformers' source distribution")
    parser.add_argument("--reference", action="store_true", help="run transformers' BERT and ModernBERT instead")
    parser.add_argument("--config", type=json.loads, default={}, help="more config keys, as JSON")
    parser.add_argument("--classes", nargs="*", help="only these classes")
    parser.add_argument("--only", default="", help="only tests whose names contain this")
    parser.add_argument("--tracebacks", action="store_true", help="print the traceback of each failure")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.disable_progress_bar()
    mixin = import_tests(arguments.folder)
    cases: list[tuple[Any, type[PreTrainedConfig]]] = []
    if arguments.reference:
        for prefix, their_config in (("Bert", BertConfig), ("ModernBert", ModernBertConfig)):
            names = [name.replace("BertBlocks", prefix) for name in TABLES]
            found = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
            cases += [(model_class, their_config) for model_class in found]
    else:
        for name, table in TABLES.items():
            getattr(modeling_auto, table)["bertblocks"] = name
            cases.append((getattr(bertblocks, name), BertBlocksConfig))
    for model_class, config_class in cases:
        if arguments.classes and model_class.__name__ not in arguments.classes:
            continue
        result = run(make_case(mixin, model_class, config_class, arguments.config), arguments.only)
        problems = [*result.failures, *result.errors]
        counts = f"{result.passed} passed, {len(problems)} failed, {len(result.skipped)} skipped"
        print(f"{model_class.__name__}: {counts}", flush=True)
        for test, traceback in problems:
            text = traceback if arguments.tracebacks else traceback.strip().splitlines()[-1]
            print(f"  FAILED {str(test).split(' ')[0]}: {text}")
        for test, reason in result.skipped:
            print(f"  skipped {str(test).split(' ')[0]}: {reason}")


if __name__ == "__main__":
    main()
