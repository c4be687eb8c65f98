"""`rankscope explain`: reads plain logs by the error book and says what began it."""

from __future__ import annotations

from rankscope_server.explain.run import ExplainError, explain

__all__ = ["ExplainError", "explain"]
