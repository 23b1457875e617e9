"""`phalanx completion`: tab completion for a shell.

The words come from the parsers themselves.

  eval "$(phalanx completion bash)"    # in ~/.bashrc; zsh: in ~/.zshrc
  phalanx completion fish > ~/.config/fish/completions/phalanx.fish
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from ..layout import Shape
from ..plan import clusters, devices
from .parser import DESCRIBE, Described, Parser
from .usage import say

# They ask `phalanx completion words -- WORD...`, of which the last is being written. No answer: files.
_SCRIPTS = {
    file.name: file
    for file in sorted((Path(__file__).parent / "completions").iterdir())
}
# What values of options are, where the parser does not say.
_VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "--model": Shape.names,
    "--device": devices,
    "--cluster": clusters,
}


def run(argv: list[str]) -> int:
    if argv[:1] == ["words"]:
        words = argv[2:] if argv[1:2] == ["--"] else argv[1:]
        say("\n".join(candidates(words or [""])))
        return 0
    parser = Parser(__doc__, json=False)
    parser.add("shell", choices=tuple(_SCRIPTS), help="whose script")
    say(_SCRIPTS[parser.read(argv).shell].read_text(encoding="utf-8"), end="")
    return 0


def candidates(words: list[str]) -> list[str]:
    """Completions of the last word; empty for a file or free text."""
    from .main import VERBS

    *before, word = words
    if not before:
        known: Iterable[str] = VERBS
    elif (parser := parser_of(before)) is None:
        known = ()
    else:
        named = parser.options.get(before[-1])
        if named is not None and named.takes_value:
            known = named.choices or _VALUES.get(before[-1], tuple)()
        elif word.startswith("-"):
            known = parser.options
        else:
            first = len(before) == 1
            places = [one for one in parser.arguments if not one.flags]
            known = [
                *(parser.subverbs if first else ()),
                *(str(choice) for one in places for choice in one.choices),
            ]
    return sorted(str(each) for each in known if str(each).startswith(word))


def parser_of(words: list[str]) -> Parser | None:
    """The parser that would read what follows these words."""
    from .main import VERBS, module_of

    if words[0] not in VERBS:
        return None
    module = module_of(words[0])
    token = DESCRIBE.set(True)
    try:
        module.run(words[1:2])
    except Described as found:
        return found.parser
    except ValueError:  # a word that means nothing
        return None
    finally:
        DESCRIBE.reset(token)
    return None
