"""One file for each experiment: its docstring is the story, `run` is one rank, `check` the claims."""
