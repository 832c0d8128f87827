"""The HTTP server: requests of all clients share flat batches, and models run in a thread or in worker processes."""
