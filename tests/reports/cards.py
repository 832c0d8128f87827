"""Checks of a model card."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

from bertblocks.reports.model_card import CARD


def check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads the card with huggingface_hub, and runs its code in the folder."""
    card: Any = ModelCard.load(folder / CARD)
    data = card.data
    assert "bertblocks" in data.tags
    assert data.license
    assert data.library_name in ("bertblocks", "transformers", "sentence-transformers")
    for result in data.eval_results or []:
        assert isinstance(result.metric_value, float)
    for name in (data.base_model or []) if isinstance(data.base_model, list) else []:
        validate_repo_id(name)
    assert "## Limitations" in card.content
    code = re.search(r"```python\n(.*?)```", card.content, re.DOTALL)[1]
    output = io.StringIO()
    with monkeypatch.context() as scope, contextlib.redirect_stdout(output):
        scope.chdir(folder)
        exec(code, {})
    assert output.getvalue().strip()
    return card
