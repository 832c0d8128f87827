"""What needs an extra is collected where the extra is installed."""

from importlib.util import find_spec

has_jax = find_spec("jax") and find_spec("flax")
collect_ignore_glob = [] if has_jax else ["src/bertblocks/flax/*", "tests/test_flax_*.py"]
