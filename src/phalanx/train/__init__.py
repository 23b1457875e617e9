"""A rank at work: `phalanx.train(phalanx.join(), run)` is a whole run on one rank (`loop.py`)."""
