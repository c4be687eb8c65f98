"""How much of a step communication takes, and what would make it less."""

from rankscope_server.diagnose.communication.detector import Communication

__all__ = ["Communication"]
