"""Says a secret in every way; also by LoggingHandler alone, where HANDLER is set."""

# ruff: noqa: T201

import logging
import os
import sys
import threading
import traceback
import warnings

import rankscope

secret = os.environ["PLANTED"]
logging.basicConfig(level=logging.INFO)
if os.environ.get("HANDLER"):
    logging.getLogger().addHandler(rankscope.LoggingHandler(logging.WARNING))
logger = logging.getLogger("app")
logger.info("argument %s", secret)
logger.warning("kept by the handler too", extra={"where": f"https://u:{secret}@h/"})
try:
    raise RuntimeError(f"caught {secret}")
except RuntimeError:
    logger.exception("with traceback")
    traceback.print_exc()
warnings.warn(f"warned of {secret}", stacklevel=1)
print("printed", secret)
sys.stderr.write(f"written {secret} without an end")


def fail():
    raise OSError(f"in a thread: {secret}")


thread = threading.Thread(target=fail)
thread.start()
thread.join()
rankscope.step()
rankscope.step()
rankscope.step()
raise ValueError(f"the end: {secret}")
