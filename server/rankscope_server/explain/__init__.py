"""`rankscope explain`: reads plain logs by the known errors and says what began it."""

from __future__ import annotations

from rankscope_server.explain.run import ExplainError, explain

__all__ = ["ExplainError", "explain"]
