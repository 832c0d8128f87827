"""Compares BertBlocks with other libraries: same weights, inputs and threads. `make bench` runs everything."""
