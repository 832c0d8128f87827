"""Search over your own documents: an index on disk, exact and approximate search, fusion, and hard negatives."""
