"""The logger of the library, for everything that a service may want to capture.

`logging.getLogger("bertblocks")` receives notes about the data (INFO) and warnings, such as skipped records. The
command line shows all of them on stderr.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("bertblocks")
