"""`phalanx report`: a run's folder as one HTML page."""

from __future__ import annotations

from pathlib import Path

from .usage import Parser, UsageError, print_json

__all__ = ["run"]

_EPILOG = """\
The page is one file that fetches nothing: loss with restarts, step time, MFU, memory, a measured
step, the mesh, the configuration and versions.

  phalanx report runs/run
  phalanx report runs/run --out page.html"""


def run(argv: list[str]) -> int:
    """Write the page of a run."""
    parser = Parser("phalanx report", "A run's folder as one HTML page.", _EPILOG)
    parser.add_argument("folder", metavar="RUNDIR", help="the `out` of a run")
    parser.add_argument("--out", metavar="FILE", help="default RUNDIR/report.html")
    parser.add_argument("--json", action="store_true", help="where it is, as JSON")
    said = parser.read(argv)
    from ..report import report

    folder = Path(said.folder)
    out = Path(said.out) if said.out else folder / "report.html"
    page = report(folder)
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}.") from None
    if said.json:
        print_json({"report": str(out), "bytes": len(page)})
    else:
        print(f"wrote {out}")
    return 0
