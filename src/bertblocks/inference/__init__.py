"""The engine that runs a model over many texts: batches by tokens, hardware choices, streaming. It knows no task."""
