"""Why a server may accept other drafts than the workbench: the likely causes, ordered by what the figures look like."""

from collections.abc import Sequence

CAUSES = {
    "block length": "block length: the server drafts {num_slots} tokens a step, the drafter was trained to draft "
                    "{num_drafts} (a verify step of {block_size}, the anchor counted): set num_speculative_tokens",
    "anchor slot": "sample_from_anchor: slot k of this drafter's block says token a + k + 1; an engine that does not "
                   "know the key takes it for token a + k and drafts every token one place late (vLLM 0.32 refuses "
                   "such a drafter by name)",
    "target": "target: the server's target is not the one that was trained for: another model or revision",
    "dtype": "dtype and quantisation: compare the server's dtype, weights and KV cache (FP8) with this run's dtype",
    "layer ids": "layer ids: target_layer_ids of the export count layer OUTPUTS from 0; engines that count inputs need "
                 "ids one higher; one layer off may cost so little that only other steps for the same text show it",
    "states": "hidden states: zeros or another request's (vLLM 0.24 gave zeros on hybrids); look for a newer engine",
    "template": "template: prompts went as token ids, so no template stood between; but the drafter's training text "
                "and these prompts must have been rendered by one template",
    "thinking mode": "thinking mode: the drafter was trained in one mode and asked in the other",
    "vocabulary": "vocabulary: a reduced draft vocabulary needs d2t (offsets) and draft_vocab_size in the export",
    "mask id": "mask id: mask_token_id of the export is not the one that the drafter was trained with",
    "rope": "rope: rope_theta and rope_parameters of the export must be the drafter's own, without the target's "
            "partial_rotary_factor or mrope fields",
    "causal flag": "causal flag: is_causal must be false for full-attention drafters (speculators' format: "
                   "sliding_window_non_causal true), else later slots see nothing behind them",
    "another export": "another drafter: the server loaded another export than the one that was evaluated here",
    "counts": "the server's counts: another client's requests, or warm-up, may be among them",
}
STATES_FIRST = ("layer ids", "states", "vocabulary", "mask id", "rope", "dtype", "template", "thinking mode",
                "causal flag", "another export", "counts")
BLOCK_FIRST = ("rope", "mask id", "causal flag", "vocabulary", "layer ids", "dtype", "another export", "counts")
CLEARLY = 0.9  # a share below this part of ours is lower, not only in the last digits


def likely_causes(*, ours: Sequence[float], served: Sequence[float], is_higher: bool, is_off: bool, num_apart: int,
                  positions: Sequence[int], num_slots: int | None, block_size: int,
                  sample_from_anchor: bool = False) -> list[str]:
    """Sentences, the likeliest cause first.

    ours, served: share of verify steps that accept slot 1, 2, ...; served is empty where the server does not say.
    is_off: acceptance differs beyond noise, or drafts are not ours, and is_higher: the server's acceptance length is
    higher beyond noise. num_apart: texts that leave ours where rounding is no reason, and positions where they do.
    num_slots: drafts a step of the server. block_size: tokens a verify step. sample_from_anchor: the drafter's
    convention.
    """
    names: list[str] = []
    if num_slots is not None and num_slots != block_size - 1:
        names.append("block length")
    if num_apart:
        early = sum(position == 0 for position in positions) * 2 > len(positions)
        names += ["target", "dtype"] if early else ["dtype", "target"]
    if is_off and is_higher:
        names += ["another export", "counts"]
    elif is_off:
        names += ["anchor slot"] if sample_from_anchor else []
        names += _by_pattern(ours, served)
    values = {"num_slots": num_slots, "num_drafts": block_size - 1, "block_size": block_size}
    return [CAUSES[name].format(**values) for name in dict.fromkeys(names)]


def _by_pattern(ours: Sequence[float], served: Sequence[float]) -> Sequence[str]:
    """Names of causes for other drafts than ours, or too few accepted.

    When slot 1 is low, the states or the tokens are wrong. When it holds and a slot behind it is low, given the slots
    before, the fault is more likely in how a block's tokens see each other.
    """
    if not served or served[0] < CLEARLY * ours[0]:
        return STATES_FIRST
    for before, slot in zip(range(len(served)), range(1, len(served)), strict=False):
        if served[slot] * ours[before] < CLEARLY * ours[slot] * served[before]:
            return BLOCK_FIRST
    return STATES_FIRST
