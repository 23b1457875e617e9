"""The experiments: one function each, whose docstring is its story. `catalogue.py`
lists them."""
