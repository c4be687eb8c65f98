"""Work that ranks of one role share unequally: for good, or another way in each step."""

from rankscope_server.diagnose.balance.detector import Balance

__all__ = ["Balance"]
