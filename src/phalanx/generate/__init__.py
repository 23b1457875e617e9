"""Text and loss of a trained model on one process, with a cache of keys and values."""

from .evaluator import Evaluator
from .generator import Generator
from .sampling import GenerateError, Sampling

__all__ = ["GenerateError", "Generator", "Evaluator", "Sampling"]
