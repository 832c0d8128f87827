"""What the tasks of retrieval share: examples of queries and documents, metrics of rankings, and losses of scores."""
