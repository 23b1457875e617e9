"""Shows where each rank of a running program is, and why it hangs if it does.

    python -m rank_watch FOLDER

FOLDER is the one that the ranks gave to `watched`. Exit code 0: looked; 1: the program hangs; 2: no rank
of it runs on this host.
"""

import sys
from pathlib import Path

from .outside import described, snapshot


def main(arguments: list[str]) -> int:
    # A folder may not begin with "-", which leaves room for options.
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    seen = snapshot(Path(arguments[0]))
    for notice in seen.notices:
        print(f"rank-watch: {notice}", file=sys.stderr)
    if not seen.ranks:
        print(
            f"rank-watch: no rank of {arguments[0]} runs on this host",
            file=sys.stderr,
        )
        return 2
    found, lines = described(seen)
    print("\n".join(lines))
    if seen.elsewhere:
        print(
            f"\nmore ranks run on {', '.join(seen.elsewhere)}: run the command there"
        )
    # As the exit code of a health check: a script can act on it without
    # reading the text.
    return 1 if found.hangs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
