"""Texts in, answers out, as fast as the machine allows: `Predictor`."""

from bertblocks.inference.mteb import MTEBEncoder
from bertblocks.inference.predictor import Predictor
from bertblocks.inference.results import Answer, Answers, Classification, Filling, Tagged

__all__ = ["Answer", "Answers", "Classification", "Filling", "MTEBEncoder", "Predictor", "Tagged"]
