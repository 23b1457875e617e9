"""Functions behind the commands and `import phalanx`.

A command reads its options, calls one function here, and prints the result.
"""

TEXT = 1 << 26  # bytes of a program, a recorded step, a topology


class UsageError(ValueError):
    """A command or a call that means nothing: what is wrong with it and how to write it."""


__all__ = ["TEXT", "UsageError"]
