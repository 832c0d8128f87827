"""What the commands that train share: how a run ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import typer

from bertblocks.cli.source import fail


class Stoppable(Protocol):
    """The result of a run, and the signal that stopped it, if one did."""

    @property
    def signal(self) -> int | None: ...


Result = TypeVar("Result", bound=Stoppable)


def run_to_end(run: Callable[[], Result]) -> Result:
    """Returns the result of a run; a failed one ends the command, a stopped one with the code of its signal."""
    import transformers

    from bertblocks.training.distributed import PeerFailedError
    from bertblocks.training.loop import NonFiniteError

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        result = run()
    except PeerFailedError as error:
        raise typer.Exit(1) from error
    except (OSError, ValueError, NonFiniteError) as error:
        fail(error)
    if result.signal is not None:
        typer.echo("Stopped and saved; run the same command to resume.", err=True)
        raise typer.Exit(128 + result.signal)
    return result
