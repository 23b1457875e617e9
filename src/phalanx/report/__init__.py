"""One HTML page of a run, with its measured step beside the planned one."""

from .page import Extras, ReportError, RunReport, Section, report

__all__ = ["Extras", "ReportError", "RunReport", "Section", "report"]
