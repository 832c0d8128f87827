from __future__ import annotations

from pathlib import Path

import pytest

from tests.bulk.helpers import MODELS, make_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A small random checkpoint for every task."""
    root: Path = tmp_path_factory.mktemp("bulk-models")
    return {task: make_model(root / task, task) for task in MODELS}
