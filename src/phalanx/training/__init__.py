"""One rank's run: the executor, optimizers, data, checkpoints and logs."""
