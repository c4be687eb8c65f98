"""What training a model would take: memory, messages, time and money of each way to share it.

Pure: numbers in, numbers out. Nothing here asks a machine, imports torch or reads a file.
"""
