"""Metrics of training that can be seen without a change to the script, one file per source.

None of them draws random numbers, changes the graph, keeps a tensor beyond its step or waits for
a device; `rankscope.wire.metric_names` lists what they record.
"""
