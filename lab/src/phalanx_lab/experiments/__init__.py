"""The experiments: a function each, whose docstring is its story. `catalogue.py` lists them."""
