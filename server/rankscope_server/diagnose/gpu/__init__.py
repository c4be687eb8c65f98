"""GPUs that throttle, fail or are unlike the others."""

from rankscope_server.diagnose.gpu.events import GpuEvents
from rankscope_server.diagnose.gpu.health import GpuHealth

__all__ = ["GpuEvents", "GpuHealth"]
