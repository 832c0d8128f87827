"""Multi-vector encoders: one vector per token, and scores by late interaction."""

from bertblocks.tasks.multi.scores import score_multi

__all__ = ["score_multi"]
