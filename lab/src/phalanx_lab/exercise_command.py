"""`phalanx lab exercise`: twenty exercises whose answers phalanx's own code checks.

  phalanx lab exercise                       lists the exercises
  phalanx lab exercise deadlock              shows a task and what to begin with
  phalanx lab exercise bubble 30             checks an answer
  phalanx lab exercise deadlock "rank 0: F0 B0 F1 B1; rank 1: F0 F1 B0 B1"
  phalanx lab exercise deadlock answer.txt   checks the answer in a file; - reads it
  phalanx lab exercise deadlock --solution   shows an answer that is right

Exit code 0: the answer is right, or nothing was answered; 1: it is wrong; 2: wrong
usage.
"""

import sys
from pathlib import Path
from textwrap import fill

from phalanx.cli.parser import Parser
from phalanx.cli.usage import UsageError, result
from phalanx.drawing import text_table
from phalanx.layout.files import read_text

from .exercises import Exercise, Verdict, exercise, exercises


def run(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add("name", nargs="?", metavar="NAME", help="an exercise")
    parser.add(
        "answer",
        nargs="?",
        metavar="ANSWER",
        help="your answer, a file with it, or - for standard input",
    )
    parser.add(
        "--solution", action="store_true", help="show an answer that is right"
    )
    args = parser.read(argv)
    if args.name is None:
        if args.solution:
            raise UsageError("--solution needs the name of an exercise.")
        listed = [
            {"name": each.name, "task": each.task}
            for each in exercises().values()
        ]
        return result(args, {"exercises": listed}, _listing())
    asked = exercise(args.name)
    shown: dict[str, object] = {
        "name": asked.name,
        "task": asked.task,
        "start": asked.start,
    }
    if args.solution:
        figures = shown | {"solution": asked.answer}
        return result(args, figures, asked.answer)
    if args.answer is None:
        return result(args, shown, _task(asked))
    verdict = asked.check(_answer(args.answer))
    figures = shown | {"right": verdict.right, "words": verdict.words}
    return result(args, figures, _verdict(asked, verdict), good=verdict.right)


def _answer(word: str) -> str:
    """The answer itself, or the text of the file of this name."""
    if word == "-":
        return sys.stdin.read()
    # No answer looks like this, so a missing file is named instead of being checked.
    if word.endswith(".txt") or "/" in word or Path(word[:255]).is_file():
        return read_text(word, "answer", UsageError)
    return word


def _listing() -> str:
    rows = [(e.name, e.kind, e.chapter) for e in exercises().values()]
    table = text_table(("exercise", "kind", "chapter"), rows, left="lll")
    return f"{table}\nphalanx lab exercise {rows[0][0]}   shows the first"


def _task(asked: Exercise) -> str:
    parts = [fill(asked.task, 80)]
    if asked.start:
        parts.append(asked.start.rstrip())
    if "\n" in asked.start:
        parts.append(
            "Write your answer into a file, then:\n"
            f"  phalanx lab exercise {asked.name} FILE"
        )
    else:
        parts.append(f"  phalanx lab exercise {asked.name} ANSWER")
    parts.append(
        f"Chapter: phalanx lab {asked.chapter}\n"
        f"Its code as a script for torchrun: phalanx lab {asked.chapter} --script"
    )
    return "\n\n".join(parts)


def _verdict(asked: Exercise, verdict: Verdict) -> str:
    parts = [fill(verdict.words, 80)]
    if verdict.picture:
        parts.append(str(verdict.picture).rstrip())
    if verdict.right:
        names = list(exercises())
        later = names[names.index(asked.name) + 1 :]
        parts.append(
            f"Next: phalanx lab exercise {later[0]}"
            if later
            else "This was the last exercise."
        )
    return "\n\n".join(parts)
