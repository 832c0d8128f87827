"""Mini BERT matches its reference and torch, and invalid input raises clear errors."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from bertblocks import BertBlocksConfig, BertBlocksModel
from bertblocks.flax import FlaxBertBlocksModel, MiniBERT, mini_bert_forward, mini_bert_weights

CASES = json.loads((Path(__file__).parents[1] / "golden" / "mini_bert.json").read_text(encoding="utf-8"))
GOOD = {key: value for key, value in CASES[0].items() if key != "output"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed {case['seed']}")
def test_outputs_match_the_reference(case: Any) -> None:
    arguments = {key: value for key, value in case.items() if key != "output"}
    output = mini_bert_forward(**arguments)
    assert output.ndim == 1
    np.testing.assert_allclose(output, case["output"], atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed {case['seed']}")
def test_the_preset_has_the_same_hidden_states_in_torch_and_jax(case: Any) -> None:
    """Uses the weights of the linen model that gave the reference outputs."""
    sizes = [case[key] for key in ("vocab_size", "d_model", "num_heads", "d_ff", "num_layers")]
    ids = np.array(case["token_ids"], np.int32)
    params = MiniBERT(*sizes).init(jax.random.PRNGKey(case["seed"]), ids)["params"]
    config = BertBlocksConfig.from_preset(
        "mini-bert",
        vocab_size=case["vocab_size"],
        hidden_size=case["d_model"],
        num_attention_heads=case["num_heads"],
        intermediate_size=case["d_ff"],
        num_hidden_layers=case["num_layers"],
        max_position_embeddings=len(ids),
    )
    weights = mini_bert_weights(params)
    model = BertBlocksModel(config).eval()
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()})
    with torch.no_grad():
        in_torch = model(torch.from_numpy(ids)[None]).last_hidden_state
    np.testing.assert_allclose(in_torch.flatten(), case["output"], atol=1e-5)
    in_flax = FlaxBertBlocksModel(config, weights=weights)(ids[None]).last_hidden_state
    np.testing.assert_allclose(in_flax.flatten(), case["output"], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [3.0, 16.0]}, "token_ids holds 16; it must be at least 0 and less than vocab_size = 16"),
        ({"token_ids": [3, -1]}, "token_ids holds -1;"),
        ({"token_ids": [3.0, 2.5]}, "token_ids holds 2.5; it must hold integers"),
        ({"token_ids": [3.0, float("nan")]}, "token_ids holds nan; it must hold integers"),
        ({"token_ids": []}, r"token_ids has shape \[0\]; it must be one row with at least one token"),
        ({"token_ids": [[1, 2]]}, r"token_ids has shape \[1, 2\]"),
        ({"num_heads": 3}, "num_heads is 3; it must divide d_model = 8"),
        ({"num_heads": 0}, "num_heads is 0; it must be a whole number of at least 1"),
        ({"d_ff": 2.5}, "d_ff is 2.5; it must be a whole number"),
        ({"num_layers": -1}, "num_layers is -1; it must be a whole number of at least 0"),
    ],
)
def test_invalid_input_raises_an_error_that_names_it(changes: Any, message: Any) -> None:
    with pytest.raises(ValueError, match=message):
        mini_bert_forward(**{**GOOD, **changes})


def test_texts_instead_of_ids_raise() -> None:
    with pytest.raises(TypeError, match="token_ids holds"):
        mini_bert_forward(**{**GOOD, "token_ids": ["a", "b"]})
