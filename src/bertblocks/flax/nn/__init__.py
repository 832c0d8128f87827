"""The blocks of an encoder in Flax nnx, file by file as in `bertblocks.nn`, with parameters of the same names."""
