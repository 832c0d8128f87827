"""Parameters, FLOPs and memory, tested against torch's counts on real models; tree and diagram against the config."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from bertblocks import BertBlocksConfig, ConfigError
from bertblocks.analysis import (
    analyze,
    build,
    count_flops,
    count_parameters,
    inference_bytes,
    mermaid,
    module_tree,
    training_bytes,
    usual_lengths,
    write_indexes,
)
from bertblocks.analysis.flops import visible_pairs
from bertblocks.analysis.memory import LABELLED_SHARE
from bertblocks.models import TASK_MODELS
from bertblocks.nn.ops import kernels
from bertblocks.nn.ops import linear as linear_module
from bertblocks.nn.ops.kernels import KernelError
from tests.helpers import tiny_config

TASKS = ["base", "masked-lm", "pretraining", "sequence-classification", "token-classification", "question-answering"]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bert": {},
    "modern": {
        "norm_pos": "pre",
        "norm_fn": "rms",
        "norm_bias": False,
        "mlp_type": "glu",
        "embd_pos_enc_kind": "none",
        "block_pos_enc_kind": "rope",
        "type_vocab_size": 0,
        "pooler": False,
        "classifier_head": "dense",
        "classifier_pooling": "mean",
        "classifier_head_on_tokens": True,
    },
    "deep": {"norm_fn": "deep", "mlm_head_dense": False, "tie_word_embeddings": False},
    "ngpt": {"ngpt": True, "ngpt_logit_scale": True, "block_pos_enc_kind": "rope"},
    "parallel": {"norm_pos": "pre", "parallel_block": True, "norm_fn": "dynamic_tanh", "qk_norm": True},
    "sandwich": {"norm_pos": "sandwich", "norm_fn": "group", "head_dim": 12},
    "uneven": {"layer_overrides": {1: {"intermediate_size": 40, "num_attention_heads": 2}}},
    "albert": {"embedding_size": 12, "num_hidden_groups": 2},
    "dropout": {"embedding_dropout": 0.1, "attention_output_dropout": 0.1, "mlp_dropout": 0.1},
}


@pytest.fixture(params=list(ARCHITECTURES))
def config(request: pytest.FixtureRequest) -> BertBlocksConfig:
    return tiny_config(**ARCHITECTURES[request.param])


# ---------------------------------------------------------------------- parameters


@pytest.mark.parametrize("task", TASKS)
def test_parts_add_up_to_the_parameters_of_a_built_model(config: Any, task: Any) -> None:
    counts = count_parameters(build(config, task))
    total = counts.pop("total")
    assert (
        total == sum(counts.values()) == sum(parameter.numel() for parameter in TASK_MODELS[task](config).parameters())
    )


def test_parameters_of_each_part_of_bert() -> None:
    config = tiny_config()
    hidden, wide, layers, words = 32, 24, 3, 60
    assert count_parameters(build(config, "masked-lm")) == {
        "token embedding": words * hidden,
        "position and type embedding": (64 + 2) * hidden,
        "attention": layers * 4 * (hidden * hidden + hidden),
        "feed-forward": layers * (2 * hidden * wide + wide + hidden),
        "norms": (1 + 2 * layers) * 2 * hidden,
        "head": hidden * hidden + hidden + 2 * hidden + words,
        "total": sum(parameter.numel() for parameter in TASK_MODELS["masked-lm"](config).parameters()),
    }


def test_query_and_key_norms_count_as_norms_and_ngpt_scales_as_their_sublayer() -> None:
    plain, normed = (count_parameters(build(tiny_config(qk_norm=norm), "base")) for norm in (False, True))
    assert normed["norms"] - plain["norms"] == 3 * 2 * 8
    assert normed["attention"] == plain["attention"]
    ngpt = count_parameters(build(tiny_config(ngpt=True), "base"))
    assert ngpt["norms"] == 0
    assert ngpt["attention"] == 3 * (4 * (32 * 32 + 32) + 32 + 32)
    assert ngpt["feed-forward"] == 3 * ((2 * 24 * 32 + 2 * 24) + (24 * 32 + 32) + 2 * 24 + 32)


def test_an_untied_decoder_adds_its_matrix_to_the_head() -> None:
    tied, untied = (count_parameters(build(tiny_config(tie_word_embeddings=tie), "masked-lm")) for tie in (True, False))
    assert untied["head"] - tied["head"] == untied["total"] - tied["total"] == 60 * 32


@pytest.mark.parametrize(
    ("preset", "task", "expected"),
    [
        ("modernbert-base", "masked-lm", 149_655_232),
        ("modernbert-large", "masked-lm", 395_881_664),
        ("bert-base", "base", 109_482_240),
    ],
)
def test_published_parameter_counts(preset: Any, task: Any, expected: Any) -> None:
    assert count_parameters(build(BertBlocksConfig.from_preset(preset), task))["total"] == expected


# ---------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize(
    ("architecture", "task"),
    [*(("bert", task) for task in TASKS), *(("modern", task) for task in TASKS)]
    + [(name, "masked-lm") for name in ("deep", "ngpt", "parallel", "sandwich", "uneven", "albert")],
)
def test_flops_equal_torchs_flop_counter(architecture: Any, task: Any) -> None:
    # the eager backend's attention is matrix products, which torch counts
    config = tiny_config(**ARCHITECTURES[architecture], attention_backend="eager")
    model = TASK_MODELS[task](config).eval()
    length = 17
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(1, length, dtype=torch.long))
    assert count_flops(build(config, task), length)["total"] == counter.get_total_flops()


@pytest.mark.parametrize("num_global_tokens", [0, 1, 3, 50])
@pytest.mark.parametrize("half_window", [None, 0, 1, 4, 100])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 9, 30])
def test_visible_pairs_equal_a_brute_force_count(length: Any, half_window: Any, num_global_tokens: Any) -> None:
    pairs = sum(
        half_window is None or abs(i - j) <= half_window or min(i, j) < num_global_tokens
        for i in range(length)
        for j in range(length)
    )
    assert visible_pairs(length, half_window, num_global_tokens) == pairs


def test_flops_of_local_layers_cover_only_window_and_global_tokens() -> None:
    options = {"local_attention": True, "global_attention_every_n_layers": 2, "num_global_tokens": 1}
    flops = count_flops(build(tiny_config(**options), "base"), 50)
    pairs = 2 * 50 * 50 + visible_pairs(50, half_window=4, num_global_tokens=1)  # layers 0 and 2 are global
    assert flops["attention over keys"] == 4 * pairs * 32
    everywhere = count_flops(build(tiny_config(), "base"), 50)
    assert {**flops, "attention over keys": 0, "total": 0} == {**everywhere, "attention over keys": 0, "total": 0}


def test_cost_per_token_divides_by_the_length() -> None:
    (cost,) = analyze(tiny_config(), "base", [10]).costs
    assert cost.flops_per_token["head"] == 2 * 32 * 32 / 10
    assert cost.flops_per_token["total"] * 10 == cost.flops["total"]


# ---------------------------------------------------------------------- memory


def kept_by_autograd(model: Any, run: Any) -> int:
    """Returns the bytes of activations that a real forward pass keeps."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run(model)
    assert output is not None  # alive, and its graph with it, until the addresses are counted
    return sum(kept.values())


@pytest.fixture
def torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates are of torch's own operations: oneDNN's fuse some, and the C kernels keep less."""
    monkeypatch.setattr(linear_module, "is_onednn_faster", lambda: False)
    monkeypatch.setattr(kernels, "find_kernel", lambda: KernelError("not in this test"))


@pytest.mark.parametrize("task", ["base", "token-classification"])
def test_training_memory_equals_what_autograd_stores(torch_operations: None, config: Any, task: Any) -> None:
    config.attention_backend = "sdpa"
    ids = torch.ones(1, 40, dtype=torch.long)
    assert training_bytes(build(config, task), 40) == kept_by_autograd(
        TASK_MODELS[task](config), lambda model: model(ids)
    )


def test_masked_lm_training_keeps_only_labelled_tokens_in_the_head(torch_operations: None) -> None:
    config = tiny_config(vocab_size=900, attention_backend="sdpa")
    ids = torch.ones(1, 40, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    labels[0, : round(40 * LABELLED_SHARE)] = 5
    real = kept_by_autograd(TASK_MODELS["masked-lm"](config), lambda model: model(ids, labels=labels).loss)
    assert training_bytes(build(config, "masked-lm"), 40) == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("bert", "base"),
        ("modern", "masked-lm"),
        ("ngpt", "base"),
        ("parallel", "masked-lm"),
        ("sandwich", "base"),
        ("albert", "masked-lm"),
    ],
)
def test_inference_memory_equals_what_the_allocator_reports(
    torch_operations: None, architecture: Any, task: Any
) -> None:
    # wide enough that the peak is not in attention, where a kernel's own workspace depends on the number of cores
    config = tiny_config(**ARCHITECTURES[architecture], vocab_size=4000, intermediate_size=600)
    model = TASK_MODELS[task](config).eval()
    ids = torch.ones(1, 48, dtype=torch.long)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = model(ids)
    assert output is not None
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert inference_bytes(build(config, task), 48) == pytest.approx(peak, rel=0.01)


def test_attention_memory_grows_linearly_with_length() -> None:
    model = build(BertBlocksConfig.from_preset("mini"), "base")
    assert training_bytes(model, 4096) == pytest.approx(8 * training_bytes(model, 512), rel=0.01)
    assert inference_bytes(model, 4096) == pytest.approx(8 * inference_bytes(model, 512), rel=0.01)


def test_counting_memory_of_dynamic_rope_restores_its_scaling() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    options = {"embd_pos_enc_kind": "none", "block_pos_enc_kind": "rope"}
    scaled, plain = (build(tiny_config(**options, rope_scaling=kind), "base") for kind in (scaling, None))
    assert training_bytes(scaled, 100) == training_bytes(plain, 100)
    assert scaled.encoder.layers[0].attention.position.scaling == scaling


# ---------------------------------------------------------------------- lengths


def test_default_lengths_end_at_the_last_learned_position() -> None:
    presets = {name: BertBlocksConfig.from_preset(name) for name in ("bert-base", "roberta-base", "modernbert-base")}
    assert usual_lengths(presets["bert-base"]) == usual_lengths(presets["roberta-base"]) == [128, 512]
    assert usual_lengths(presets["modernbert-base"]) == [128, 512, 2048, 8192]
    assert usual_lengths(presets["modernbert-base"], presets["bert-base"]) == [128, 512]
    assert usual_lengths(tiny_config(position_offset=4)) == [60]


@pytest.mark.parametrize("length", [0, 61])
def test_a_length_beyond_the_positions_raises(length: Any) -> None:
    with pytest.raises(ConfigError, match=f"length is {length}; it must be from 1 to 60"):
        analyze(tiny_config(position_offset=4), "base", [length])


# ---------------------------------------------------------------------- tree


def layer_groups(config: Any, task: Any = "masked-lm") -> Any:
    model = module_tree(build(config, task))
    base = next(node for node in model.children if node.name == "model")
    encoder = next(node for node in base.children if node.name == "encoder")
    return next(node for node in encoder.children if node.name == "layers").children


def test_modernbert_has_a_first_layer_and_two_kinds_of_others() -> None:
    groups = layer_groups(BertBlocksConfig.from_preset("modernbert-base"))
    assert [group.label.split("  ")[0] for group in groups] == [
        "(0): Block(global)",
        "(1-2, 4-5, 7-8, ..., 19-20): 14 x Block(local)",
        "(3, 6, 9, ..., 21): 7 x Block(global)",
    ]
    assert sorted(index for group in groups for index in group.layers) == list(range(22))
    # layer 0 has no norm before attention
    assert groups[2].parameters - groups[0].parameters == 768


def test_layers_with_visible_differences_are_not_merged() -> None:
    assert [group.name for group in layer_groups(tiny_config())] == ["0-2"]
    other = tiny_config(layer_overrides={1: {"hidden_act": "silu"}})
    assert [group.name for group in layer_groups(other)] == ["0, 2", "1"]


def test_the_tree_leaves_out_only_modules_that_do_nothing() -> None:
    def kinds(node: Any) -> Any:
        return {node.kind}.union(*(kinds(child) for child in node.children))

    tree = module_tree(build(tiny_config(mlp_dropout=0.2, norm_pos="pre"), "masked-lm"))
    assert tree.parameters == count_parameters(build(tiny_config(norm_pos="pre"), "masked-lm"))["total"]
    assert kinds(tree) == {
        *("BertBlocksForMaskedLM", "BertBlocksModel", "Embedding", "LearnedPosition", "Encoder", "ModuleList", "Block"),
        *("Attention", "Residual", "MLP", "Linear", "GELUActivation", "Dropout", "LayerNorm", "DenseHead"),
    }


@pytest.mark.parametrize(
    ("indexes", "text"),
    [
        ([], ""),
        ([4], "4"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 2, 3, 7], "0, 2-3, 7"),
        ([0, 2, 4, 6, 8], "0, 2, 4, 6, 8"),
        (list(range(0, 12, 2)), "0, 2, 4, ..., 10"),
        ([0, 2, 4, 6, 8, 11], "0, 2, 4, 6, 8, 11"),
        ([0, 2, 4, 6, 8, 10, 11], "0, 2, 4, 6, 8, 10-11"),
    ],
)
def test_layer_indices_are_abbreviated_only_without_ambiguity(indexes: Any, text: Any) -> None:
    assert write_indexes(indexes) == text


# ---------------------------------------------------------------------- diagram


def read_chart(text: str) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The nodes by key and the arrows of a flowchart. Every line must be a node, an arrow or part of a subgraph."""
    nodes: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    depth = 0
    first, *lines = text.splitlines()
    assert first == "flowchart TD"
    for line in map(str.strip, lines):
        if match := re.fullmatch(r'subgraph \w+\["[^"]+"\]', line):
            depth += 1
        elif line == "end":
            depth -= 1
        elif match := re.fullmatch(r'(\w+) -->(?:\|"[^"]+"\|)? (\w+)', line):
            edges.append((match[1], match[2]))
        else:
            match = re.fullmatch(r'(\w+)(?:\["([^"]+)"\]|\(\["([^"]+)"\]\)|\(\("([^"]+)"\)\))', line)
            assert match, line
            assert match[1] not in nodes
            nodes[match[1]] = match[2] or match[3] or match[4]
    assert depth == 0
    return nodes, edges


def reachable(start: str, edges: list[tuple[str, str]]) -> set[str]:
    found, frontier = {start}, [start]
    while frontier:
        key = frontier.pop()
        following = [end for begin, end in edges if begin == key and end not in found]
        found.update(following)
        frontier += following
    return found


@pytest.mark.parametrize("task", TASKS)
def test_every_node_lies_between_ids_and_output(config: Any, task: Any) -> None:
    nodes, edges = read_chart(mermaid(build(config, task)))
    assert {key for edge in edges for key in edge} == set(nodes)
    assert len(set(edges)) == len(edges)
    assert reachable("ids", edges) == set(nodes)
    assert reachable("output", [(end, start) for start, end in edges]) == set(nodes)


IN, ATTENTION, MLP = "layer0_in", "layer0_attention", "layer0_mlp"


@pytest.mark.parametrize(
    ("norm_pos", "wiring"),
    [
        (
            "none",
            [(IN, ATTENTION), (ATTENTION, ATTENTION + "_add"), (IN, ATTENTION + "_add"), (ATTENTION + "_add", MLP)],
        ),
        ("pre", [(IN, ATTENTION + "_pre_norm"), (ATTENTION + "_pre_norm", ATTENTION), (IN, ATTENTION + "_add")]),
        (
            "post",
            [
                (IN, ATTENTION),
                (ATTENTION + "_add", ATTENTION + "_post_norm"),
                (ATTENTION + "_post_norm", MLP),
                (ATTENTION + "_post_norm", MLP + "_add"),
                (MLP + "_post_norm", "head"),
            ],
        ),
        (
            "pre_and_post",
            [(IN, ATTENTION + "_pre_norm"), (IN, ATTENTION + "_add"), (ATTENTION + "_add", ATTENTION + "_post_norm")],
        ),
        (
            "sandwich",
            [
                (ATTENTION, ATTENTION + "_post_norm"),
                (ATTENTION + "_post_norm", ATTENTION + "_add"),
                (IN, ATTENTION + "_add"),
            ],
        ),
    ],
)
def test_the_diagram_shows_norms_in_their_places(norm_pos: Any, wiring: Any) -> None:
    _, edges = read_chart(mermaid(build(tiny_config(norm_pos=norm_pos), "masked-lm")))
    assert set(wiring) <= set(edges)


def test_parallel_sublayers_share_their_input_and_their_sum() -> None:
    _, edges = read_chart(mermaid(build(tiny_config(norm_pos="pre", parallel_block=True), "base")))
    norm, add = "layer0_attention_pre_norm", "layer0_attention_add"
    inside = [edge for edge in edges if all(key.startswith("layer0") for key in edge)]
    assert sorted(inside) == sorted(
        [(IN, norm), (norm, ATTENTION), (norm, MLP), (ATTENTION, add), (MLP, add), (IN, add)]
    )


def test_arrows_between_layers_follow_their_order() -> None:
    _, edges = read_chart(mermaid(build(BertBlocksConfig.from_preset("modernbert-base"), "masked-lm")))
    between = [edge for edge in edges if edge[1] in ("layer0_in", "layer1_in", "layer2_in", "final_norm")]
    # kinds of layers: 0 the first, 1 local, 2 global; the last layer is global
    assert between == [
        ("embedding", "layer0_in"),
        ("layer0_mlp_add", "layer1_in"),
        ("layer1_mlp_add", "layer2_in"),
        ("layer2_mlp_add", "layer1_in"),
        ("layer2_mlp_add", "final_norm"),
    ]


def test_the_diagram_shows_the_scales_of_a_residual() -> None:
    chart = mermaid(build(tiny_config(norm_fn="deep", residual_scale=0.25, num_hidden_layers=2), "base"))
    assert chart.count("times 0.25") == 2, "two sublayers; equal layers are drawn once"
    assert chart.count("times 1.41") == 2, "DeepNet's (2 * 2) ** 0.25"


def test_diagram_labels_describe_the_modules() -> None:
    config = tiny_config(
        local_attention=True, num_global_tokens=2, num_kv_heads=2, qk_norm=True, block_pos_enc_kind="rope"
    )
    nodes, _ = read_chart(mermaid(build(config, "masked-lm")))
    assert nodes["layer0_attention"] == (
        "Attention<br/>4 heads of 8, 2 for keys and values<br/>sees 4 on either side and 2 global<br/>"
        "norm on queries and keys<br/>RotaryPosition"
    )
    assert nodes["layer0_mlp"] == "MLP<br/>GELUActivation<br/>32 to 24<br/>24 to 32"
    assert (
        nodes["embedding"]
        == "token embedding 60 x 32<br/>token types 2 x 32<br/>learned positions 64 x 32<br/>LayerNorm"
    )
    assert nodes["decoder"] == "decoder<br/>32 to 60<br/>tied to the token embedding"


def test_an_int8_model_is_described_as_what_it_replaces() -> None:
    plain, quantized = (BertBlocksConfig.from_preset("mini", quantization=choice) for choice in (None, "int8"))
    assert analyze(quantized, "masked-lm", [16]).costs == analyze(plain, "masked-lm", [16]).costs
    assert analyze(quantized, "masked-lm", [16]).parameters == analyze(plain, "masked-lm", [16]).parameters
