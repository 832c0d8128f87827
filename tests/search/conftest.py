from __future__ import annotations

from pathlib import Path

import pytest

from tests.search.helpers import FakePredictor, make_model


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that stands for a model whose predictor is fake."""
    monkeypatch.setattr("bertblocks.search.models.Predictor", FakePredictor)
    monkeypatch.setattr("bertblocks.search.rerankers.Predictor", FakePredictor)
    return make_model(tmp_path / "model")
