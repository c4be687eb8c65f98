"""Numbers of training: NaN, spikes, outliers, replicas that differ, steps that teach nothing."""

from rankscope_server.diagnose.numerics.learning import Learning
from rankscope_server.diagnose.numerics.noise_scale import StatisticalEfficiency
from rankscope_server.diagnose.numerics.nonfinite import NonFinite
from rankscope_server.diagnose.numerics.outliers import Outliers
from rankscope_server.diagnose.numerics.replicas import Replicas
from rankscope_server.diagnose.numerics.spikes import Spikes

__all__ = ["Learning", "NonFinite", "Outliers", "Replicas", "Spikes", "StatisticalEfficiency"]
