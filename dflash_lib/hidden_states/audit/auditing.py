"""The audit: recompute some samples, say what each slot of each holds, and explain what does not fit."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dflash_lib.hidden_states.audit import faults
from dflash_lib.hidden_states.audit.context import Audited
from dflash_lib.hidden_states.audit.explain import (
    AuditedSample,
    explain_misread,
    explain_rows,
    explain_scale,
    explain_shift,
    explain_values,
    read_slot,
    scores,
)
from dflash_lib.hidden_states.audit.faults import SampleFault
from dflash_lib.hidden_states.audit.history import explain_history
from dflash_lib.hidden_states.audit.last_state import last_state_faults
from dflash_lib.hidden_states.audit.matching import compare, stored_as, stored_rounding
from dflash_lib.hidden_states.audit.reference import (
    EMBEDDING,
    LAYER,
    NORMED,
    Candidate,
    FinalNorm,
    Reference,
    list_candidates,
)
from dflash_lib.hidden_states.audit.remarks import find_remarks
from dflash_lib.hidden_states.audit.result import Audit, summarise
from dflash_lib.hidden_states.audit.sampling import choose_samples
from dflash_lib.hidden_states.audit.scan import scan_source
from dflash_lib.hidden_states.formats.source import POST_NORM, SourceSample, StateSource
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.target.loading import Target, quiet_transformers

SIMILAR = 0.9  # a stated layer that fits that well beside the best one is believed
OWN = 0.2  # mean score from which a sample's own best match counts against that of the other samples
RECOGNISED = 0.03  # mean score (see `explain.scores`) from which a slot counts as recognised


def read_claims(source: StateSource, num_slots: int, target: Target, candidates: list[Candidate],
                layer_ids: Sequence[int] | None) -> tuple[list[int | None], str]:
    """Per slot the candidate that the source states, and what does not fit about that statement ("" = it does).

    layer_ids: stated by the user instead, for the slots before the last state.
    """
    ids = list(layer_ids) if layer_ids is not None else source.target_layer_ids
    last = [] if source.last is None else [Candidate(NORMED if source.last == POST_NORM else LAYER,
                                                     target.num_layers - 1)]
    if ids is None:
        ids = [None] * (num_slots - len(last))
    if len(ids) + len(last) != num_slots:
        return [None] * num_slots, (f"{num_slots} slots are stored, but {len(ids)} layer ids and "
                                    f"{'a' if last else 'no'} last state are stated")
    wrong = [k for k in ids if k is not None and not -1 <= k < target.num_layers]
    if wrong:
        return [None] * num_slots, f"stated layer ids {wrong} do not exist in a target of {target.num_layers} layers"
    wanted = [None if k is None else Candidate(EMBEDDING if k == -1 else LAYER, k) for k in ids] + last
    return [None if one is None else candidates.index(one) for one in wanted], ""


def audit_states(source: StateSource, target: Target, num_samples: int = 8, seed: int = 0, *,
                 layer_ids: Sequence[int] | None = None, computed_in: str | None = None, scan: str = "all",
                 name: str = "", on_sample: Callable[[int, int], None] | None = None) -> Audit:
    """Recomputes `num_samples` samples with the target and says what every slot of them holds.

    source: any layout's reader; target: loaded, float32 on a CPU; seed: of the random choice. layer_ids: what the
    tapped slots are said to hold (our numbering), instead of what the source states. computed_in: "float32" if the
    states were computed so, which sharpens the limits; None = found out from the states. scan: "all" looks through
    every sample's values and ids first (no target), "audited" through those that are recomputed. name: of the source,
    for commands in the report. on_sample(done, total) is called as samples are done.

    Raises StoreError when there is nothing to audit.
    """
    if len(source) == 0:
        raise StoreError(f"{name or source.format}: no samples here, so there is nothing to audit")
    if num_samples < 1 or scan not in ("all", "audited"):
        raise StoreError(f"audit: at least one sample and scan \"all\" or \"audited\" are needed, got {num_samples} "
                         f"and {scan!r}")
    scanned = scan_source(source, target, everything=scan == "all", num_samples=num_samples, seed=seed,
                          layer_ids=layer_ids)
    norm = FinalNorm(target)
    candidates = list_candidates(target, norm)
    audited = Audited(source, target, norm, candidates, scanned.lengths, [])
    chosen, num_drawn = choose_samples(
        [n if usable else -1 for n, usable in zip(scanned.lengths, scanned.usable, strict=True)], num_samples, seed)
    problems = list(scanned.faults)
    if chosen:
        first = source.read(chosen[0])
        audited.claims, wrong = read_claims(source, first.states.shape[1], target, candidates, layer_ids)
        if wrong:
            problems.append(SampleFault(faults.WRONG_LAYER, chosen[0], None, wrong, (faults.WRONG_LAYER, "stated")))
        with quiet_transformers():  # that fast kernels are missing is in the load report
            problems += _recompute(audited, chosen, on_sample)
            _recognise(audited, computed_in, target)
            problems += last_state_faults(audited, target)
            audited.remark = find_remarks(audited).text
            for sample in audited.samples:
                _explain(audited, sample)
            _padding_of_one_token(audited)
    return summarise(audited, scanned, problems, chosen, num_drawn, name)


def _recompute(audited: Audited, chosen: Sequence[int], on_sample: Callable[[int, int], None] | None
               ) -> list[SampleFault]:
    """Fills audited.samples. Returns what keeps a sample that the scan let pass from being compared."""
    problems = []
    for done, i in enumerate(chosen):
        stored = audited.source.read(i)
        reference = audited.reference(i)
        if stored.states.shape[1] != len(audited.claims):
            problems.append(SampleFault(
                faults.NUM_SLOTS, i, None, f"{stored.name}: {stored.states.shape[1]} slots where the others have "
                f"{len(audited.claims)}", (faults.NUM_SLOTS, stored.states.shape[1])))
        elif reference is None:
            problems.append(SampleFault(faults.BAD_IDS, i, None, f"{stored.name}: the target cannot run its ids",
                                        (faults.BAD_IDS,)))
        else:
            audited.samples.append(_direct(i, stored, reference, audited))
        if on_sample is not None:
            on_sample(done + 1, len(chosen))
    return problems


def _direct(i: int, stored: SourceSample, reference: Reference, audited: Audited) -> AuditedSample:
    states, rounding = stored.decoded(), stored_rounding(stored)
    direct = compare(states, rounding, reference, "bfloat16")
    return AuditedSample(i, stored.name, audited.ids[i], stored, states, rounding, reference, direct)


def _recognise(audited: Audited, computed_in: str | None, target: Target) -> None:
    """What each slot holds, over all samples, and in which type it was computed; then each sample's readings."""
    samples = audited.samples
    if not samples:
        return
    audited.slots = _best_candidates(audited)
    votes = [_computed_in_float32(samples, slot, candidate) for slot, candidate in enumerate(audited.slots)]
    if target.report.dtype == "float32" and (computed_in == "float32" or True in votes and False not in votes):
        audited.level = "float32"
        for sample in samples:
            sample.direct = sample.direct.in_float32()
        audited.slots = _best_candidates(audited)
    for sample in samples:
        fit = scores(sample.direct)
        for slot, candidate in enumerate(audited.slots):
            own = int(fit[slot].argmax())
            if fit[slot, own] >= OWN and fit[slot, candidate] < SIMILAR * fit[slot, own]:
                candidate = own
            sample.readings.append(read_slot(sample, slot, candidate))


def _best_candidates(audited: Audited) -> list[int]:
    """Per slot the candidate that fits best over all samples; the stated one when it fits about as well."""
    fit = torch.stack([scores(sample.direct) for sample in audited.samples]).mean(0)
    middle = torch.stack([sample.direct.medians() for sample in audited.samples]).median(0).values
    audited.pooled = fit
    chosen = []
    for slot, claim in enumerate(audited.claims):
        least = RECOGNISED if claim is None else OWN  # a statement is not given up for a few rows
        best = int(fit[slot].argmax()) if fit[slot].max() >= least else None
        if claim is not None and (best is None or fit[slot, claim] >= SIMILAR * fit[slot, best]):
            best = claim
        chosen.append(int(middle[slot].argmin()) if best is None else best)
    return chosen


def _computed_in_float32(samples: list[AuditedSample], slot: int, candidate: int) -> bool | None:
    """Whether most samples that fit are the recomputed states as their type rounds them, not merely close to them.
    None when no sample fits."""
    votes = []
    for sample in samples:
        if sample.direct.fits[:, slot, candidate].float().mean() < 0.5:
            continue
        truth = sample.reference.of(candidate)[:sample.num_rows]
        rounded = stored_as(sample.stored, slot, truth)
        stored = sample.states[:sample.num_rows, slot].to(truth.device)
        own = (stored - rounded).norm(dim=-1).median()
        votes.append(bool(own <= 0.5 * (truth - rounded).norm(dim=-1).median() + 1e-4 * truth.norm(dim=-1).median()))
    return sum(votes) > len(votes) / 2 if votes else None


def _explain(audited: Audited, sample: AuditedSample) -> None:
    """Fills sample.faults: every row that does not fit is explained, or said not to be."""
    readings, found = sample.readings, sample.faults
    num_rows, num_tokens = len(sample.states), len(sample.ids)
    if num_rows != num_tokens:
        fewer = num_rows < num_tokens
        found.append(SampleFault(faults.FEWER if fewer else faults.MORE, sample.index, None,
                                 f"{num_rows} rows of states for {num_tokens} tokens",
                                 (faults.FEWER if fewer else faults.MORE,), abs(num_rows - num_tokens)))
    for reading in readings:
        if reading.unclear:
            reading.bad[:] = True
        if reading.bad.any():
            found += explain_values(sample, reading)
    before = {reading.slot: reading.bad.clone() for reading in readings}
    for reading in readings:
        for explain in (lambda r: explain_misread(sample, r, audited.level),
                        lambda r: explain_shift(sample, r, audited.level),
                        lambda r: explain_scale(sample, r, audited.slots[r.slot])):
            fault = explain(reading) if reading.bad.any() else None
            if fault is not None:
                found.append(fault)
    others = {s.index: s.reference for s in audited.samples if s.index != sample.index}
    for reading in readings:
        if reading.bad.any():
            found += explain_rows(sample, reading, audited.level, others, _unknown(audited, reading.slot))
    explain_history(audited, sample, before)


def _padding_of_one_token(audited: Audited) -> None:
    """A special token in front whose own state is not stored is padding of one token, unless every sample has it."""
    some = any(not sample.faults for sample in audited.samples) or any(
        fault.code == faults.LEFT_PADDING for sample in audited.samples for fault in sample.faults)
    for sample in audited.samples if some else []:
        sample.faults = [
            replace(fault, code=faults.LEFT_PADDING, key=(faults.LEFT_PADDING,))
            if fault.code == faults.BOS and fault.evidence["offset"] == -1 else fault for fault in sample.faults]


def _unknown(audited: Audited, slot: int) -> bool:
    """Whether no sample shows what the slot holds, and nothing is stated either."""
    return audited.claims[slot] is None and float(audited.pooled[slot].max()) < RECOGNISED

