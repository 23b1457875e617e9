"""`python -m torch_shm`: the table of `compare.py`."""

from .compare import main

main()
