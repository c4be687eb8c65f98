"""`rankscope report`: one run as text, JSON, a page and an archive, all from one view model.

What reads a run from folders for it serves `rankscope what-if` as well.
"""

from __future__ import annotations

from rankscope_server.report.errors import ReportError
from rankscope_server.report.run import Wanted, make_report
from rankscope_server.report.what_if import WhatIfRefused, what_if_of

__all__ = ["ReportError", "Wanted", "WhatIfRefused", "make_report", "what_if_of"]
