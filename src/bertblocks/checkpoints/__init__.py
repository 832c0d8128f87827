"""The only reader and writer of weights: families, conversion, quantization, growing and merging of checkpoints."""
