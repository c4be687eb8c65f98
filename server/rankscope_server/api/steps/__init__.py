"""Steps: map, throughput, time budget, series of numbers."""
