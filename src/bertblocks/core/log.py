"""The logger of the library, for everything that a service may want to capture.

`logging.getLogger("bertblocks")` receives notes about the data (INFO) and warnings, such as skipped records or a head
that a checkpoint lacks. The command line shows all of them on stderr.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

logger = logging.getLogger("bertblocks")

_lock = threading.Lock()
_quiet_calls = 0
_bars_were_shown = _hub_bars_were_hidden = False


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides transformers' progress bar and load report. BertBlocks logs its own report, in one line."""
    thread = threading.get_ident()

    def is_from_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    reporter = logging.getLogger("transformers.modeling_utils")
    reporter.addFilter(is_from_elsewhere)
    _hide_bars()
    try:
        yield
    finally:
        _restore_bars()
        reporter.removeFilter(is_from_elsewhere)


def _hide_bars() -> None:
    """Turns progress bars off for all threads, because transformers has one switch for them."""
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging as transformers_logging

    global _quiet_calls, _bars_were_shown, _hub_bars_were_hidden
    with _lock:
        if _quiet_calls == 0:
            _bars_were_shown = transformers_logging.is_progress_bar_enabled()
            _hub_bars_were_hidden = are_progress_bars_disabled()
            if _bars_were_shown:
                transformers_logging.disable_progress_bar()
        _quiet_calls += 1


def _restore_bars() -> None:
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    global _quiet_calls
    with _lock:
        _quiet_calls -= 1
        if _quiet_calls == 0 and _bars_were_shown:
            transformers_logging.enable_progress_bar()
            if _hub_bars_were_hidden:
                disable_progress_bars()
