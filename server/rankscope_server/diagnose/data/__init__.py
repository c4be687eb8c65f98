"""Steps that wait for data, and batches that are damaged."""

from rankscope_server.diagnose.data.corrupt_batches import CorruptBatches
from rankscope_server.diagnose.data.loading import DataLoading
from rankscope_server.diagnose.data.sampling import Sampling

__all__ = ["CorruptBatches", "DataLoading", "Sampling"]
