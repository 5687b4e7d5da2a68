"""Real runs under faults of every kind: nothing saved is lost, nothing released is uncounted, every error is clear."""
