"""Found first on PYTHONPATH under `rankscope run`: attaches, then runs the user's own one."""

import os
import sys


def _chain() -> None:
    """Import the sitecustomize that this one hides, if there is one."""
    here = os.path.dirname(__file__)  # pathlib takes 6 ms
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


class _SayWhy:
    """Says why nothing is recorded where torch is imported: other programs need not know."""

    def __init__(self, error: ImportError) -> None:
        self._error = error

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing; say it once."""
        if name == "torch":
            import contextlib  # torch imports it anyway, other programs need not pay

            sys.meta_path.remove(self)
            with contextlib.suppress(Exception):  # stderr may be None, closed or on a full disk
                sys.stderr.write(
                    f"rankscope: not attached: {self._error}. Install rankscope in the environment "
                    f"of the training script ({sys.executable})\n"
                )


try:
    from rankscope.rank.attach.start import attach_from_environment
except ImportError as error:
    sys.meta_path.insert(0, _SayWhy(error))
else:
    attach_from_environment()
_chain()
