"""Records that stages pass on: frozen, serialisable, and without acts."""
