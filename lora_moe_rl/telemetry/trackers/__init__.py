"""Where a run's metrics go beside metrics.jsonl: one file a tracker, chosen by `tracker.name`."""
