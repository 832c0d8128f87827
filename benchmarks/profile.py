"""Where the time of a forward pass goes, and how long its matrix products would take at the machine's own rate."""

from __future__ import annotations

from typing import Any

from torch.autograd.profiler import profile

from benchmarks.encoding import DEPTHS, LONG_DEPTH, get_encoders, hidden_states
from benchmarks.inputs import make_batch, ragged_lengths
from benchmarks.measure import PROBE_FLOPS, Spread, interleaved, sgemm_probe
from benchmarks.workload import Settings
from bertblocks.analysis.flops import SCORES, count_flops

CASES = {
    "bert-base, ragged": ("bert-base", DEPTHS["bert-base"], ragged_lengths()),
    "modernbert-base, ragged": ("modernbert-base", DEPTHS["modernbert-base"], ragged_lengths()),
    "modernbert-base, 8,192 tokens": ("modernbert-base", LONG_DEPTH, [8192]),
}
ROUNDS = 3
LINEAR, ATTENTION = "linear layers (with an activation that is fused into them)", "attention over keys"
#: The part of the work that each torch operation belongs to; all others are "everything else".
PARTS = {
    LINEAR: ("aten::addmm", "aten::mm", "mkldnn::_linear_pointwise", "aten::linear"),
    ATTENTION: (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::scaled_dot_product_attention",
        "aten::baddbmm",
        "aten::bmm",
        "aten::_softmax",
        "aten::softmax",
    ),
    "activations and gates": ("aten::gelu", "aten::gelu_", "aten::silu", "aten::mul", "aten::mul_"),
    "rotary positions": ("aten::addcmul_", "RotaryFunction"),
    "norms and residuals": ("aten::native_layer_norm", "aten::add", "aten::add_", "aten::rms_norm"),
    "copies": ("aten::copy_", "aten::index", "aten::index_select", "aten::cat", "aten::_index_put_impl_"),
}


def profiles(settings: Settings) -> dict[str, Any]:
    found = {}
    for title, (name, depth, lengths) in CASES.items():
        models = get_encoders(name, depth, settings)
        batch = make_batch(lengths, 30000)
        hidden_states(models.ours, batch)
        with profile(use_kineto=False) as record:  # kineto writes to the terminal
            for _ in range(ROUNDS):
                hidden_states(models.ours, batch)
        own = {event.key: event.self_cpu_time_total / ROUNDS / 1e3 for event in record.key_averages()}
        milliseconds = {part: sum(own.get(key, 0.0) for key in keys) for part, keys in PARTS.items()}
        milliseconds["everything else"] = sum(own.values()) - sum(milliseconds.values())
        probe = Spread.of(interleaved({"probe": sgemm_probe()}, 5)["probe"]).median
        flops = {LINEAR: 0.0, ATTENTION: 0.0}
        for length in lengths:
            counts = count_flops(models.ours, length)
            flops[ATTENTION] += counts[SCORES]
            flops[LINEAR] += counts["total"] - counts[SCORES]
        found[f"{title}, {models.layers} layers"] = {
            "milliseconds": milliseconds,
            "at_sgemm_rate": {part: count * probe / PROBE_FLOPS * 1e3 for part, count in flops.items()},
            "largest": dict(sorted(own.items(), key=lambda item: -item[1])[:12]),
        }
    return found
