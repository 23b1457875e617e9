"""Text out of a trained model: its weights on one process, with a cache of keys and values."""

from .generator import Generator
from .sampling import GenerateError, Sampling

__all__ = ["GenerateError", "Generator", "Sampling"]
