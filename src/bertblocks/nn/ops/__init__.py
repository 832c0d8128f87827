"""Fused and device-specific operations: all code that knows CPUs, oneDNN or Triton."""
