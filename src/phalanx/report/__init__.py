"""Floor 7: a run's one-file page, and its pictures."""

from .page import Extras, ReportError, RunReport, Section, report

__all__ = ["Extras", "ReportError", "RunReport", "Section", "report"]
