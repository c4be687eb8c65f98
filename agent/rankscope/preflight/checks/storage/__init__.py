"""Storage: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.storage.free import FsFree
from rankscope.preflight.checks.storage.hang import FsHang
from rankscope.preflight.checks.storage.lock import FsLock
from rankscope.preflight.checks.storage.same import FsSame
from rankscope.preflight.checks.storage.shared import FsShared
from rankscope.preflight.checks.storage.write import FsWrite

CHECKS: tuple[Check, ...] = (FsHang(), FsFree(), FsShared(), FsSame(), FsWrite(), FsLock())
