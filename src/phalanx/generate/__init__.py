"""Text from a trained model on one process, with a cache of keys and values."""

from .generator import Generator
from .reader import Reader
from .sampling import GenerateError, Sampling

__all__ = ["GenerateError", "Generator", "Reader", "Sampling"]
