"""Phases of a step without a change to the script, one file per source.

Forward has no hook of its own: module hooks cost 2.5 us per module call and disturb compiled
code. It is the time between the data loader and the backward pass; see `rankscope.rank.steps`.
"""
