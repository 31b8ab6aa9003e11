"""Plans as files: records as JSON, checked when they are read."""
