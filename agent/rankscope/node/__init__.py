"""The node collector: one process per node that follows what the ranks record, and uploads it.

How a fact travels: `journals` and `rings` read the files of a rank, `ranks` puts the parts of one
rank together, `outbox` turns what was read into numbered batches, `spool` makes them durable,
`upload` brings them to the server. `liveness`, `exits`, `stacks`, `samples` and `gpu` look from
outside. `loop` is the turn that calls them all; `start` is what a training process imports.
"""
