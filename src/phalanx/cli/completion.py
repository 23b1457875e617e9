"""`phalanx completion`: prints the tab completion script of a shell.

The completions are read from the commands themselves.

  eval "$(phalanx completion bash)"    # in ~/.bashrc; zsh: in ~/.zshrc
  phalanx completion fish > ~/.config/fish/completions/phalanx.fish
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from ..layout import Shape
from ..planner import clusters, devices
from .parser import DESCRIBE, Described, Parser
from .usage import say

# The scripts call `phalanx completion words -- WORD...`; the last word is being typed.
# An empty answer means file names.
_SCRIPTS = {
    file.name: file
    for file in sorted((Path(__file__).parent / "completions").iterdir())
}
# Values of options that the parser does not list.
_VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "--model": Shape.names,
    "--device": devices,
    "--cluster": clusters,
}


def run(argv: list[str]) -> int:
    if argv[:1] == ["words"]:
        # The shell separates what it asks from what the user has typed.
        words = argv[2:] if argv[1:2] == ["--"] else argv[1:]
        say("\n".join(candidates(words or [""])))
        return 0
    parser = Parser(__doc__, json=False)
    parser.add("shell", choices=tuple(_SCRIPTS), help="the shell")
    say(_SCRIPTS[parser.read(argv).shell].read_text(encoding="utf-8"), end="")
    return 0


def candidates(words: list[str]) -> list[str]:
    """Return the completions of the last word; empty for a file or free text."""
    from .main import VERBS

    *before, word = words
    if not before:
        known: Iterable[str] = VERBS
    elif (parser := parser_of(before)) is None:
        # The word may be the value of the option before it.
        known = ()
    else:
        named = parser.options.get(before[-1])
        if named is not None and named.takes_value:
            # Choices of the parser, or names of the catalogue.
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
    """Return the parser that would read the next argument, or None."""
    from .main import VERBS, module_of

    if words[0] not in VERBS:
        return None
    # A verb's parser is raised as soon as it is complete: see `Parser.read`.
    module = module_of(words[0])
    token = DESCRIBE.set(True)
    try:
        module.run(words[1:2])
    except Described as found:
        return found.parser
    except ValueError:  # an unknown word
        return None
    finally:
        DESCRIBE.reset(token)
    return None
