"""BertBlocks beside its peers: same weights, same inputs, same threads, one run. `make bench` runs everything."""
