"""What there is to learn from: text to token files, token files to the batches of steps."""
