"""The inference engine: streams inputs through a model in flat batches that suit the machine. It knows no task."""

from bertblocks.inference.engine import Engine, prepare_model
from bertblocks.inference.pipeline import Pipeline, Request, SegmentBatch
from bertblocks.inference.progress import RunStats
from bertblocks.inference.splitting import Segment, SequenceSplitter, TooLong

__all__ = [
    "Engine",
    "Pipeline",
    "Request",
    "RunStats",
    "Segment",
    "SegmentBatch",
    "SequenceSplitter",
    "TooLong",
    "prepare_model",
]
