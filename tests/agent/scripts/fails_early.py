"""Fails before it learns anything, as a rank does whose configuration is not there."""

import torch

torch.manual_seed(0)
raise KeyError("config")
