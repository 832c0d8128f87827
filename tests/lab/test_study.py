"""Study files: designs, and errors with the path and the nearest key before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertblocks.core.settings import RecipeError
from bertblocks.lab.design import make_variants
from bertblocks.lab.plan import make_plan
from bertblocks.lab.study import read_study, study_names

Write = Callable[..., Path]
LEVELS = {
    "norm": {"pre": {"model.config.norm_pos": "pre"}, "post": {"model.config.norm_pos": "post"}},
    "mlp": {"glu": {"model.config.mlp_type": "glu"}, "mlp": {"model.config.mlp_type": "mlp"}},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seedz": 3}, r"has no key 'seedz' \(did you mean 'seeds'\?\)"),
        ({"variants": {"a": {"optimizer.lrr": 1}}}, r"variants.a: optimizer has no key 'lrr' \(did you mean 'lr'\?\)"),
        ({"variants": {"a": {"optimiser.lr": 1}}}, r"variants.a: the recipe has no key 'optimiser'"),
        ({"variants": {"a": {"model.config.norm_poss": "pre"}}}, r"variants.a: .*norm_poss.*norm_pos"),
        ({"variants": {"a": {"model.config.norm_pos": "prae"}}}, r"variants.a: .*norm_pos.*'prae'"),
        ({"variants": {"a": {"phases.3.length": 16}}}, r"variants.a: phases.3.length: '3' is not an index"),
        ({"variants": {"a": {"run.seed": 1}}}, r"variants.a.run.seed cannot be changed"),
        ({"variants": {"a": {"schedule.budget": "1 minute"}}}, r"equal: seconds"),
        ({"variants": {"a": {"model.config.max_position_embeddings": 16}}}, r"variants.a: .*length 32"),
        ({"variants": {"a": {"tokenizer.vocab_size": 64}}}, r"variants.a has another tokenizer, so held_out"),
        ({"variants": {}}, r"variants"),
        ({"variants": None}, r"either variants or factors"),
        ({"design": "factorial"}, r"needs factors"),
        ({"baseline": "ropes"}, r"baseline is 'ropes', which is not a variant \(did you mean 'rope'\?\)"),
        ({"seeds": [1, 1]}, r"distinct"),
        ({"seeds": 0}, r"seeds is 0"),
        ({"budget": {"equal": "flopz"}}, r"budget.equal is 'flopz'"),
        ({"budget": {"equal": "tokens", "by": "depth"}}, r"tokens can be solved by steps"),
        ({"budget": {"equal": "seconds"}}, r"needs an amount such as '5 minutes'"),
        ({"budget": {"equal": "seconds", "amount": "5 minutes"}, "average": {}}, r"average, .* budget.equal: seconds"),
        ({"budget": {"equal": "flops", "amount": "3B tokens"}}, r"number of flops"),
        ({"budget": {"equal": "parameters", "amount": 10.0}}, r"variants.rope: "),
        ({"measures": [{"kind": "held_in"}]}, r"measures.0.kind is 'held_in'.*held_out"),
        ({"measures": [{"kind": "held_out", "token": 5}]}, r"has no key 'token' \(did you mean 'tokens'\?\)"),
        ({"measures": [{"kind": "memory"}, {"kind": "memory"}]}, r"measure 'memory' twice"),
        ({"measures": [{"kind": "finetune", "train": "no.csv", "eval": "no.csv"}]}, r"no.csv does not exist"),
        ({"recipe": "dem"}, r"dem is neither a file nor a shipped recipe \(did you mean 'demo'\?\)"),
    ],
)
def test_bad_studies_are_rejected_with_path_and_nearest_key(
    write_study: Write, changes: dict[str, Any], message: str
) -> None:
    path = write_study(**changes)
    with pytest.raises(RecipeError, match=message) as caught:
        make_plan(read_study(path))
    assert "recipe" in changes or str(path) in str(caught.value)


def test_fine_tuning_settings_are_checked(write_study: Write, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    for name in ("train.csv", "eval.csv"):
        (tmp_path / "files" / name).write_text("text,label\na,b\n")
    measure = {"kind": "finetune", "train": "train.csv", "eval": "eval.csv", "settings": {"epoch": 1}}
    with pytest.raises(RecipeError, match=r"train.settings: .*has no key 'epoch' \(did you mean 'epochs'\?\)"):
        read_study(write_study(measures=[measure]))


def test_unknown_studies_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"did you mean 'positions'"):
        read_study("position")
    with pytest.raises(RecipeError, match="is a folder, not a file"):
        read_study(tmp_path)


def test_designs(write_study: Write) -> None:
    def names(**changes: Any) -> dict[str, dict[str, Any]]:
        study = read_study(write_study(**changes)).study
        return {variant.name: variant.changes for variant in make_variants(study, "study.yaml")}

    pre, post = {"model.config.norm_pos": "pre"}, {"model.config.norm_pos": "post"}
    glu, mlp = {"model.config.mlp_type": "glu"}, {"model.config.mlp_type": "mlp"}
    assert names(variants=None, factors=LEVELS, design="factorial") == {
        "pre+glu": pre | glu,
        "pre+mlp": pre | mlp,
        "post+glu": post | glu,
        "post+mlp": post | mlp,
    }
    assert names(variants=None, factors=LEVELS) == {
        "base": pre | glu,
        "norm-post": post | glu,
        "mlp-mlp": pre | mlp,
    }
    rungs = {"a": {}, "b": post, "c": mlp}
    assert names(variants=rungs, design="ladder") == {"a": {}, "b": post, "c": post | mlp}
    assert list(names(variants=rungs, baseline="c")) == ["c", "a", "b"]


@pytest.mark.parametrize("name", study_names())
def test_shipped_studies_can_be_planned(name: str) -> None:
    plan = make_plan(read_study(name))
    assert len(plan.arms) > 1
    assert plan.source.study.description
