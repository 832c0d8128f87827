"""What is hidden and what is scored: pieces of text become inputs and targets."""

from bertblocks.objectives.base import Batch, Objective, RateSchedule
from bertblocks.objectives.masked_lm import MaskedLanguageModeling

__all__ = ["Batch", "MaskedLanguageModeling", "Objective", "RateSchedule"]
