"""The bricks of an encoder in Flax nnx, file by file as in `bertblocks.blocks`, with parameters of the same names."""
