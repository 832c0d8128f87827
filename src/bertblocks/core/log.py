"""The logger of the library, for everything that a service may want to capture.

`logging.getLogger("bertblocks")` receives notes about the data (INFO), and warnings such as skipped records. As usual
for a library, nothing is shown unless the application configures a handler; the command line shows all of it on stderr.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("bertblocks")
logger.addHandler(logging.NullHandler())
