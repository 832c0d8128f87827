"""From a corpus to packed rows: documents, tokenizer, token shards, and a stream that any step can reach directly."""
