"""Fused and device-specific operations; everything that knows a CPU, oneDNN or Triton."""
