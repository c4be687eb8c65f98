"""Numbers of training: NaN, spikes, outliers, replicas that differ."""

from rankscope_server.diagnose.numerics.noise_scale import StatisticalEfficiency
from rankscope_server.diagnose.numerics.nonfinite import NonFinite
from rankscope_server.diagnose.numerics.outliers import Outliers
from rankscope_server.diagnose.numerics.replicas import Replicas
from rankscope_server.diagnose.numerics.spikes import Spikes

__all__ = ["NonFinite", "Outliers", "Replicas", "Spikes", "StatisticalEfficiency"]
