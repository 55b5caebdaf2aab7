"""Decoding: greedy and speculative, acceptance of drafts, baselines, evaluation on held-out prompts."""

from dflash_lib.decoding.acceptance import (
    Interval,
    acceptance_difference,
    acceptance_interval,
    acceptance_length,
    by_kind,
    by_slot,
    walk_acceptance,
)
from dflash_lib.decoding.agreement import NEAR_TIE, Divergence, first_divergence
from dflash_lib.decoding.baselines import BigramProposer, OtherSampleStates, PromptLookupProposer, ZeroedStates
from dflash_lib.decoding.cache import DecodingError
from dflash_lib.decoding.evaluation import (
    answer_prompts,
    best_block_size,
    block_lengths,
    decode_side_by_side,
    measure_step_seconds,
    read_prompts,
    record,
    showpiece,
    speed_of,
    walk_baselines,
    walk_block_sizes,
)
from dflash_lib.decoding.speculative import (
    Decoded,
    SpeculativeDecoded,
    Step,
    greedy_generate,
    sample_generate,
    speculative_generate,
)

__all__ = [
    "NEAR_TIE", "BigramProposer", "Decoded", "DecodingError", "Divergence", "Interval", "OtherSampleStates",
    "PromptLookupProposer", "SpeculativeDecoded", "Step", "ZeroedStates", "acceptance_difference",
    "acceptance_interval", "acceptance_length", "answer_prompts", "best_block_size", "block_lengths", "by_kind",
    "by_slot", "decode_side_by_side", "first_divergence", "greedy_generate", "measure_step_seconds", "read_prompts",
    "record", "sample_generate", "showpiece", "speculative_generate", "speed_of", "walk_acceptance", "walk_baselines",
    "walk_block_sizes",
]
