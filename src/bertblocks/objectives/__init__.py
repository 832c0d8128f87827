"""Pretraining objectives: they turn chunks of documents into inputs and targets."""

from bertblocks.objectives.base import Objective, RateSchedule
from bertblocks.objectives.causal_lm import CausalLanguageModeling
from bertblocks.objectives.decoders import EnhancedMaskedLM, RetroMAE
from bertblocks.objectives.masked_diffusion import MaskedDiffusion
from bertblocks.objectives.masked_lm import MaskedLanguageModeling
from bertblocks.objectives.pooled_terms import MaskedLMWithPooledTerms
from bertblocks.objectives.replaced_tokens import ReplacedTokens
from bertblocks.objectives.sentence_order import SentenceOrder

__all__ = [
    "CausalLanguageModeling",
    "EnhancedMaskedLM",
    "MaskedDiffusion",
    "MaskedLMWithPooledTerms",
    "MaskedLanguageModeling",
    "Objective",
    "RateSchedule",
    "ReplacedTokens",
    "RetroMAE",
    "SentenceOrder",
]
