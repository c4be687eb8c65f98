"""Reads PyTorch's Flight Recorder of the ranks of this node, and merges what it alone knows."""
