"""Extractive question answering."""

from bertblocks.tasks.answer.metrics import answering_scores
from bertblocks.tasks.answer.predictions import Answer, Answers, QuestionAnsweringPipeline
from bertblocks.tasks.answer.task import AnswerTask

__all__ = ["Answer", "AnswerTask", "Answers", "QuestionAnsweringPipeline", "answering_scores"]
