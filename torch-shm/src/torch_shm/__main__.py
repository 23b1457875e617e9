"""`python -m torch_shm`: prints the table of `compare.py`."""

from .compare import main

main()
