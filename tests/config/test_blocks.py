"""Config keys that blocks declare: when they exist, how they are checked, and how they are saved and read."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bertblocks import BertBlocksConfig, BertBlocksModel, ConfigError, Key, register_norm
from bertblocks.analysis.flops import count_flops
from bertblocks.analysis.parameters import build
from bertblocks.config.blocks import SLOTS, block_keys
from bertblocks.config.validation import own_keys
from bertblocks.nn.mlp import MLPS
from bertblocks.nn.norm import NORMS
from tests.helpers import tiny_config

ROPE = {"block_pos_enc_kind": "rope"}


@pytest.mark.parametrize(
    ("options", "exist"),
    [
        ({}, {"position_offset", "norm_weight"}),
        ({"embd_pos_enc_kind": "none", "norm_fn": "dynamic_tanh"}, set()),
        ({"norm_fn": "group", "norm_num_groups": 8}, {"position_offset", "norm_num_groups"}),
        ({"layer_overrides": {3: {"norm_fn": "group"}}}, {"position_offset", "norm_weight", "norm_num_groups"}),
        ({"ngpt": True}, {"position_offset", "norm_weight", "ngpt_renormalize", "ngpt_logit_scale"}),
    ],
)
def test_keys_exist_if_a_layer_chooses_their_block(options: Any, exist: Any) -> None:
    config = BertBlocksConfig(**options)
    assert set(config.block_keys()) == exist
    assert set(config.to_dict()) & set(block_keys()) == exist
    assert list(config.key_types()) == [*own_keys(BertBlocksConfig), *config.block_keys()]


def test_no_block_declares_a_key_of_every_config() -> None:
    assert not set(block_keys()) & set(own_keys(BertBlocksConfig))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_num_groups": 8}, "norm_num_groups is 8; it belongs to norm_fn 'group', but norm_fn is 'layer'."),
        ({"rope_theta": 5.0}, "rope_theta is 5.0; it belongs to block_pos_enc_kind 'rope', but block_pos_enc_kind is"),
        ({"ngpt_logit_scale": True}, "ngpt_logit_scale is True; it belongs to ngpt true, but ngpt is false."),
        ({"position_offset": 2, "embd_pos_enc_kind": "sinusoidal"}, "it belongs to embd_pos_enc_kind 'learned'"),
        ({"layer_overrides": {1: {"norm_num_groups": 8}}}, "layer 1 sets 'norm_num_groups'; it belongs to norm_fn"),
    ],
)
def test_a_key_of_a_block_that_is_not_chosen_raises(options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        BertBlocksConfig(**options)
    assert message in str(error.value)


def test_a_key_of_a_block_that_is_not_chosen_has_its_default() -> None:
    config = BertBlocksConfig(norm_num_groups=32)  # the default changes nothing, so it is no error
    assert (config.norm_num_groups, config.rope_theta, config.local_rope_theta) == (32, 10_000.0, 10_000.0)
    assert "norm_num_groups" not in config.to_dict()
    with pytest.raises(AttributeError, match="has no attribute 'norm_num_grups'"):
        config.norm_num_grups  # noqa: B018


def test_another_choice_brings_its_keys_and_drops_the_others() -> None:
    config = BertBlocksConfig(**ROPE, rope_theta=5.0)
    config.block_pos_enc_kind = "t5"
    assert set(config.block_keys()) & set(config.to_dict()) == set(config.block_keys())
    assert "rope_theta" not in config.to_dict()
    config.block_pos_enc_kind = "rope"
    assert config.rope_theta == 10_000.0
    config.validate()


def test_the_order_of_a_block_and_its_keys_does_not_matter(tmp_path: Path) -> None:
    config = BertBlocksConfig()
    config.norm_num_groups = 8
    with pytest.raises(ConfigError, match="norm_num_groups is 8; it belongs to norm_fn 'group'"):
        config.validate()
    config.norm_fn = "group"
    config.validate()
    BertBlocksConfig().save_pretrained(tmp_path)
    for overrides in ({"norm_num_groups": 8, "norm_fn": "group"}, {"norm_fn": "group", "norm_num_groups": 8}):
        assert BertBlocksConfig.from_pretrained(tmp_path, **overrides).norm_num_groups == 8


def test_copies_and_pickles_keep_the_keys() -> None:
    config = BertBlocksConfig(**ROPE, rope_theta=5.0)
    for again in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert again == config
        assert again.local_rope_theta == 5.0


def test_a_preset_gives_up_the_keys_of_a_replaced_block() -> None:
    config = BertBlocksConfig.from_preset("modernbert-base", block_pos_enc_kind="alibi")
    assert "rope_theta" not in config.to_dict()
    with pytest.raises(ConfigError, match=r"rope_theta is 5\.0; it belongs to"):
        BertBlocksConfig.from_preset("modernbert-base", block_pos_enc_kind="alibi", rope_theta=5.0)


def test_configs_of_earlier_versions_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They contain every key; values of unused blocks are dropped, with a message if they were not the default."""
    every = {name: key.default_for(BertBlocksConfig()) for name, key in block_keys().items()}
    old = {**BertBlocksConfig().to_dict(), **every, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(old, default=str))
    with caplog.at_level(logging.INFO, logger="bertblocks"):
        assert BertBlocksConfig.from_pretrained(tmp_path).to_dict() == BertBlocksConfig().to_dict()
    assert not caplog.messages
    assert BertBlocksConfig(**old).to_dict() == BertBlocksConfig().to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**old, "norm_num_groups": 8}, default=str))
    with caplog.at_level(logging.INFO, logger="bertblocks"):
        assert BertBlocksConfig.from_pretrained(tmp_path).norm_num_groups == 32
    assert caplog.messages == [
        "norm_num_groups is 8 in the file, and is left out: it belongs to norm_fn 'group', but norm_fn is 'layer'."
    ]


# ---------------------------------------------------------------------- a block of the user's


@pytest.fixture
def power_norm(monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    for registry in SLOTS.values():
        monkeypatch.setattr(registry, "_blocks", dict(registry._blocks))

    @register_norm("power")
    class PowerNorm(nn.Module):
        """Divides by the p-norm."""

        keys = {
            "norm_power": Key(float, 2.0, "The p.", least=1, most=9, per_layer=True),
            "norm_start": Key(
                float, None, "First weight. Implied: 1 / norm_power.", implied=lambda c: 1 / c.norm_power
            ),
            "norm_side": Key(str, "left", "No meaning.", choices=("left", "right")),
        }
        requires = {"norm_bias": (False, "it has none")}

        def __init__(self, size: int, power: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(size))
            self.power = power

        @classmethod
        def from_config(cls, config: Any, size: int) -> Any:
            return cls(size, config.norm_power)

        @classmethod
        def check(cls, config: Any) -> Iterator[Any]:
            yield "norm_power", config.norm_power > config.hidden_size, "it must not exceed hidden_size"

        @classmethod
        def check_model(cls, config: Any) -> Iterator[Any]:
            yield "final_norm", config.final_norm, "norm_fn 'power' works in layers only"

        def init_parameters(self, config: Any) -> None:
            nn.init.constant_(self.weight, config.norm_start)

        def flops(self, num_tokens: int) -> int:
            return 7 * num_tokens

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * nn.functional.normalize(x, p=self.power, dim=-1)

    return PowerNorm


POWER = {"norm_fn": "power", "norm_bias": False}


def test_a_users_block_brings_its_keys(power_norm: Any, tmp_path: Path) -> None:
    config = tiny_config(**POWER, norm_power=3, layer_overrides={1: {"norm_power": 4.0}})
    config.save_pretrained(tmp_path)
    config = BertBlocksConfig.from_pretrained(tmp_path)
    assert (config.norm_power, config.norm_start, config.norm_side) == (3, 1 / 3, "left")
    norms = [module for module in BertBlocksModel(config).modules() if isinstance(module, power_norm)]
    assert [norm.power for norm in norms] == [3, 3, 3, 4, 4, 3, 3]
    assert torch.equal(norms[0].weight, torch.full((32,), 1 / 3))
    config.norm_power = 5.0
    assert config.norm_start == 1 / 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_power": 0.5}, "norm_power is 0.5; it must be at least 1."),
        ({"norm_power": 10}, "norm_power is 10; it must be at most 9."),
        ({"norm_power": "2"}, "norm_power is '2'; it must be of type float."),
        ({"norm_side": "rigt"}, "norm_side is 'rigt'; it must be one of left, right (did you mean 'right'?)."),
        ({"norm_bias": True}, "norm_bias is True; norm_fn 'power' requires False, because it has none."),
        ({"hidden_size": 2, "num_attention_heads": 1, "norm_power": 3}, "norm_power is 3; it must not exceed hidden_"),
        ({"final_norm": True}, "final_norm is True; norm_fn 'power' works in layers only."),
        ({"layer_overrides": {1: {"norm_start": 1.0}}}, "layer 1 sets 'norm_start', which cannot be set per layer"),
        ({"norm_fn": "layer", "norm_bias": True, "norm_powr": 3}, "'norm_powr' is not a key of BertBlocksConfig"),
    ],
)
def test_a_users_block_is_validated(power_norm: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        tiny_config(**{**POWER, **options})
    assert message in str(error.value)


def test_a_users_block_counts_its_own_flops(power_norm: Any) -> None:
    with_power = count_flops(build(tiny_config(**POWER), "base"), 10)["total"]
    assert with_power - count_flops(build(tiny_config(), "base"), 10)["total"] == 7 * 7 * 10


def test_an_unregistered_block_is_named_before_its_keys() -> None:
    with pytest.raises(ConfigError, match="norm_fn is 'power'; it must be one of layer, "):
        BertBlocksConfig(norm_power=3.0, norm_fn="power")


def test_blocks_agree_about_a_shared_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (NORMS, MLPS):
        monkeypatch.setattr(registry, "_blocks", dict(registry._blocks))
    register_norm("mine")(type("Mine", (nn.Identity,), {"keys": {"norm_num_groups": Key(int, 3, "Another.")}}))
    with pytest.raises(ConfigError, match="norm_fn 'mine' declares the key 'norm_num_groups', which norm_fn 'group'"):
        BertBlocksConfig()
    NORMS._blocks["mine"] = type("Mine", (nn.Identity,), {"keys": {"hidden_size": Key(int, 3, "Another.")}})
    with pytest.raises(ConfigError, match="norm_fn 'mine' declares the key 'hidden_size', which every config has"):
        BertBlocksConfig()
