"""Tagging: named entities, parts of speech, and other labels of words."""

from bertblocks.tasks.tag.examples import TaggedExample
from bertblocks.tasks.tag.metrics import tagging_scores
from bertblocks.tasks.tag.predictions import Tagged, TaggingPipeline
from bertblocks.tasks.tag.task import TagTask

__all__ = ["TagTask", "Tagged", "TaggedExample", "TaggingPipeline", "tagging_scores"]
