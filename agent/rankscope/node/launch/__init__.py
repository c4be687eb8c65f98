"""`rankscope run`: start a command so that its ranks are watched, without a change to it.

`launcher` is the whole of it from start to end; `tee` passes the output on, `lines` turns it into
records, `naming` finds the run's name, `supervisor` keeps a collector running.
"""
