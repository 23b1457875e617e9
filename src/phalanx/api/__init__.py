"""Functions behind the commands and `import phalanx`.

A command parses its options, calls one function here, and prints the result.
"""

TEXT = 1 << 26  # maximum bytes of a program, a recorded step, or a topology


class UsageError(ValueError):
    """Raised for an invalid command or call: says what is wrong and how to write it."""


__all__ = ["TEXT", "UsageError"]
