"""Pretraining data: corpora, token shards, packing, and a stream of packed rows with random access."""
