"""Found first on PYTHONPATH under `rankscope run`: attaches, then runs the user's own one."""

import sys
from pathlib import Path


def _chain() -> None:
    """Import the sitecustomize that this one hides, if there is one."""
    here = str(Path(__file__).parent)
    kept = list(sys.path)
    sys.path[:] = [entry for entry in kept if entry != here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")  # another file than this one
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own
    finally:
        sys.path[:] = kept


try:
    from rankscope.attach.start import attach_from_environment
except ImportError as error:
    sys.stderr.write(
        f"rankscope: not attached: {error}. Install rankscope in the environment of the "
        f"training script ({sys.executable})\n"
    )
else:
    attach_from_environment()
_chain()
