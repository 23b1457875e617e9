"""Signatures that list every keyword, for `help()`, Jupyter and `inspect.signature`."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])


class _LeftOut:
    """The default of an optional keyword, printed as in stub files."""

    def __repr__(self) -> str:
        return "..."


# Their real defaults are in the function that takes the dict, and depend on
# other arguments.
_LEFT_OUT = _LeftOut()


def with_keywords(terms: type) -> Callable[[F], F]:
    """Decorate a function that takes `**terms: Unpack[TERMS]`, to list each keyword in
    its signature.

    `inspect.signature` would otherwise show one `**terms`, which tells a reader
    nothing.
    """
    keywords = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_LEFT_OUT,
            annotation=kind,
        )
        for name, kind in get_type_hints(terms).items()
    ]

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        # The last parameter is `**terms`, which the keywords replace.
        *named, _ = signature.parameters.values()
        # `inspect.signature` reads this attribute first. By `vars`, because a
        # type checker does not know it.
        vars(function)["__signature__"] = signature.replace(
            parameters=[*named, *keywords]
        )
        return function

    return decorate
