"""Settings that must be in place before JAX is imported, and the files that need it or Triton."""

import os
from importlib.util import find_spec

# tests compile many tiny models and run each a few times
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

has_jax = find_spec("jax") and find_spec("flax")
collect_ignore_glob = [] if has_jax else ["src/bertblocks/flax/*", "tests/flax/*"]
collect_ignore = (
    [] if find_spec("triton") else [f"src/bertblocks/nn/ops/{name}.py" for name in ("fused", "short_attention")]
)
