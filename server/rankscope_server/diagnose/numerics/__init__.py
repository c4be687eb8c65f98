"""Numbers of training: NaN, spikes, outliers, replicas that differ."""
