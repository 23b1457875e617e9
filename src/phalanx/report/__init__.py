"""Floor 7: a run's one-file page."""

from .page import ReportError, report

__all__ = ["ReportError", "report"]
