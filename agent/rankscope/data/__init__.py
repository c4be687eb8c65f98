"""Everything that a server stores of a run, as tables of Arrow, pandas, polars and SQL."""
