"""Stored hidden states in every tool's layout: this project's store, speculators, SpecForge, Model-Optimizer."""

from dflash_lib.hidden_states.formats.detect import FORMATS, open_states
from dflash_lib.hidden_states.formats.source import POST_NORM, PRE_NORM, SourceSample, StateSource

__all__ = ["FORMATS", "POST_NORM", "PRE_NORM", "SourceSample", "StateSource", "open_states"]
