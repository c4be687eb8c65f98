"""The native source: the same kernels at the dispatcher, in C++ (`probe.cpp`).

Ready-made (`ready.py`), else compiled at first use (`build.py`).
"""

from rankscope.hooks.collectives.probe.source import Probe

__all__ = ["Probe"]
