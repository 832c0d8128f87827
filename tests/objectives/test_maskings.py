"""Maskings that users register."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bertblocks import register_masking
from bertblocks.objectives import MaskedLanguageModeling
from bertblocks.objectives.maskings import MASKINGS, get_masking
from tests.objectives.test_objectives import SPECIAL, VOCABULARY, make_rows


@pytest.fixture
def _own_maskings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MASKINGS, "_blocks", dict(MASKINGS._blocks))


@pytest.mark.usefixtures("_own_maskings")
def test_a_registered_masking_selects_the_tokens_but_never_special_ones() -> None:
    @register_masking("every_nth")
    def mask_every_nth(tokens: Any, rate: float, vocabulary: Any, *, n: int) -> Any:
        return tokens.positions % n == 0

    rows = make_rows([9, 4])
    batch = MaskedLanguageModeling(VOCABULARY, masking=get_masking("every_nth", {"n": 3})).batch(rows, 0)
    expected = []
    for row in rows:
        ids = row[0].ids.tolist()
        inside = [token if place % 3 == 0 and not SPECIAL[token] else -100 for place, token in enumerate(ids)]
        expected += [-100, *inside, -100]
    assert batch.labels is not None
    assert batch.labels.tolist() == expected
    assert batch.counts == {"masked_lm": sum(label != -100 for label in expected)}
    with pytest.raises(ValueError, match=r"has masking_options.m \(did you mean 'n'|its options are n"):
        get_masking("every_nth", {"m": 3})
    with pytest.raises(ValueError, match=r"lacks masking_options.n, which masking 'every_nth' needs"):
        get_masking("every_nth", {})


def test_a_masking_must_return_a_boolean_per_token() -> None:
    for wrong in (lambda tokens, rate, vocabulary: tokens.ids, lambda tokens, rate, vocabulary: np.ones(2, bool)):
        with pytest.raises(ValueError, match=r"it must return one boolean per token, of shape \[7\]"):
            MaskedLanguageModeling(VOCABULARY, masking=wrong).batch(make_rows([7]), 0)


def test_built_in_maskings_have_no_options() -> None:
    with pytest.raises(ValueError, match=r"has masking_options.n, but of masking 'token' it has no options"):
        get_masking("token", {"n": 1})
