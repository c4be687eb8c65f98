"""Logs, warns, fails in a thread and then for good; its own output must stay as it is."""

import logging
import threading
import warnings

import torch

logging.basicConfig(level=logging.INFO, format="FORMAT %(message)s")
logging.getLogger("app").info("hello %s", "there")
logging.getLogger("app").debug("below the level")
try:
    raise KeyError("inner")
except KeyError:
    logging.getLogger("app").exception("it broke")
warnings.warn("careful", stacklevel=1)
with warnings.catch_warnings(record=True):
    warnings.warn("caught by the script", stacklevel=1)


def fail():
    raise OSError("thread trouble")


thread = threading.Thread(target=fail)
thread.start()
thread.join()

parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for _ in range(3):
    parameter.sum().backward()
    optimizer.step()
raise ValueError("the end: ü")
