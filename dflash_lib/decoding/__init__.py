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
from dflash_lib.decoding.analysis import accepted_histogram, by_position, by_repetition, repetitiveness
from dflash_lib.decoding.baselines import BigramProposer, OtherSampleStates, PromptLookupProposer, ZeroedStates
from dflash_lib.decoding.cache import DecodingError
from dflash_lib.decoding.eval_prompts import EvalPrompt, read_prompts
from dflash_lib.decoding.evaluation import answer_prompts, draft_answers, walk_baselines, walk_block_sizes
from dflash_lib.decoding.rejections import find_rejections, rejection_examples, rejection_table
from dflash_lib.decoding.side_by_side import (
    best_block_size,
    block_lengths,
    decode_in_turns,
    decode_side_by_side,
    fastest,
    measure_step_seconds,
    record,
    showpiece,
    speed_of,
)
from dflash_lib.decoding.speculative import (
    Decoded,
    SpeculativeDecoded,
    Step,
    greedy_generate,
    sample_generate,
    speculative_generate,
)
from dflash_lib.decoding.training_walk import compare_walk, training_walk

__all__ = [
    "NEAR_TIE", "BigramProposer", "Decoded", "DecodingError", "Divergence", "EvalPrompt", "Interval",
    "OtherSampleStates", "PromptLookupProposer", "SpeculativeDecoded", "Step", "ZeroedStates", "acceptance_difference",
    "acceptance_interval", "acceptance_length", "accepted_histogram", "answer_prompts", "best_block_size",
    "block_lengths", "by_kind", "by_position", "by_repetition", "by_slot", "compare_walk", "decode_in_turns",
    "decode_side_by_side", "draft_answers", "fastest", "find_rejections", "first_divergence", "greedy_generate",
    "measure_step_seconds", "read_prompts", "record", "rejection_examples", "rejection_table", "repetitiveness",
    "sample_generate", "showpiece", "speculative_generate", "speed_of", "training_walk", "walk_acceptance",
    "walk_baselines", "walk_block_sizes",
]
