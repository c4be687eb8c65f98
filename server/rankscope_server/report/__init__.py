"""`rankscope report`: one run as text, JSON, a page and an archive, all from one view model."""

from __future__ import annotations

from rankscope_server.report.errors import ReportError
from rankscope_server.report.run import Wanted, make_report

__all__ = ["ReportError", "Wanted", "make_report"]
