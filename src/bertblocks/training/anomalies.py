"""Steps whose loss or gradients cannot be trusted: what counts as one, and what the run does about it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from bertblocks.core.settings import Count, Section

if TYPE_CHECKING:
    from bertblocks.training.state import TrainState

Action = Literal["stop", "skip", "rewind"]


class Anomalies(Section):
    """What to do when a loss is not finite, or much higher than before."""

    non_finite: Action = "stop"
    """If the loss or the gradient norm is NaN or infinite. stop ends the run; skip leaves the weights as they are and
    goes on with the next batch; rewind also takes weights and optimizer back to the checkpoint before."""
    spike: Action = "skip"
    """If the loss is a spike, which only spike_factor defines."""
    spike_factor: Annotated[float, Field(gt=1)] | None = None
    """A loss above this many times the mean of recent steps is a spike. None: no loss is."""
    window: Count = 100
    """The steps of that mean, which is exponential. Spikes are found once it has as many."""
    limit: Count = 20
    """The run stops if it would skip more steps than this."""

    @property
    def only_stop_the_run(self) -> bool:
        """Whether a step may be checked after the next one has begun."""
        return self.non_finite == "stop" and self.spike_factor is None


def find_anomaly(
    loss: float, norm: float, step: int, state: TrainState, settings: Anomalies
) -> tuple[Action, str] | None:
    """What to do about a step and why, or None. Its loss counts towards the mean that later ones are compared with.

    The mean is part of the state, so a resumed run decides as an uninterrupted one.
    """
    for what, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            return settings.non_finite, f"The {what} of step {step + 1} is {value}"
    if settings.spike_factor is None:
        return None
    mean, steps = state.loss_mean, state.loss_steps
    if steps >= settings.window and loss > settings.spike_factor * mean:
        return settings.spike, f"The loss of step {step + 1} is {loss:.4g}, and the mean of steps before it {mean:.4g}"
    state.loss_steps = steps + 1
    state.loss_mean = mean + (loss - mean) / min(steps + 1, settings.window)
    return None
