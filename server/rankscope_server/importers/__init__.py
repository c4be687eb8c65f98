"""Importers of what other tools wrote: each turns one kind of file into what detectors look at."""
