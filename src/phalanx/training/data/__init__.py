"""Training data: text to token files, token files to batches."""
