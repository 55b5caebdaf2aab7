"""Why stored rows of one slot are not the states they should be: what can be seen without running the target again."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dflash_lib.hidden_states.audit import faults
from dflash_lib.hidden_states.audit.faults import SampleFault
from dflash_lib.hidden_states.audit.matching import (
    ARITHMETIC,
    WORST_TOKEN,
    Comparison,
    Rounding,
    compare,
    nearest_rows,
)
from dflash_lib.hidden_states.audit.reference import ROUNDING, Reference
from dflash_lib.hidden_states.formats.source import SourceSample

LARGEST_FP16 = 65504.0
MOST = 0.8  # an explanation must fit this share of the rows in question, or it is none
RELATED = 0.5  # nearer than this share of the distance between unrelated tokens: the same text, another computation
SHIFTS = (1, -1, 2, -2, 3, -3)


@dataclass
class AuditedSample:
    """One sample with what it is compared with. states: float32 [n, K, H] as decoded, on the CPU; direct: every slot
    against every candidate, row t against token t; readings: filled by `read_slots`."""

    index: int
    name: str
    ids: list[int]
    stored: SourceSample
    states: Tensor
    rounding: Rounding
    reference: Reference
    direct: Comparison
    readings: list["SlotReading"] = field(default_factory=list)
    faults: list[SampleFault] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows that have a token."""
        return len(self.direct.distance)


@dataclass
class SlotReading:
    """What one slot of one sample holds. candidate: index of the best match; distance: float32 [n], limit: [n], fits:
    bool [n] under it; bad: rows that are still to be explained; unclear: the median alone is too large; remarks: bool
    [n], rows beyond the limit that are no fault."""

    slot: int
    candidate: int
    distance: Tensor
    limit: Tensor
    fits: Tensor
    bad: Tensor
    unclear: bool = False
    explained: str = ""
    remarks: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.remarks = torch.zeros_like(self.bad)

    @property
    def num_bad(self) -> int:
        return int(self.bad.sum())


def scores(comparison: Comparison, rows: Tensor | None = None) -> Tensor:
    """[K, C]: how well each candidate fits, 0 to 1: the mean over rows of 1 - distance / limit where that is positive.
    A row counts by how close it is, so that of two candidates within their limits the closer one wins."""
    values = (1 - comparison.distance / comparison.limit.clamp(min=1e-12)).clamp(min=0)
    if comparison.first == 0 and len(values) > 1:
        values = values[1:]
        rows = None if rows is None else rows[1:]
    if rows is not None:
        return (values * rows[..., None]).sum(0) / rows.sum(0).clamp(min=1)[:, None]
    return values.mean(0) if len(values) else torch.zeros(comparison.distance.shape[1:])


def read_slot(sample: AuditedSample, slot: int, candidate: int) -> SlotReading:
    """The slot under a candidate: which rows fit.

    Unclear, though every row fits: a median beyond its own limit, or a distance that lies in the rows' lengths alone,
    which rounding never does (of H directions it knows no special one).
    """
    direct = sample.direct
    truth = sample.reference.of(candidate)[:sample.num_rows]
    stored = sample.states[:sample.num_rows, slot].to(truth.device)
    exact = (stored - truth).norm(dim=-1)  # products cancel where states are nearly equal
    exact = torch.where(exact == 0, exact, exact / truth.norm(dim=-1)).nan_to_num(nan=torch.inf)
    direct.distance[:, slot, candidate] = exact
    distance, limit = exact, direct.limit[:, slot, candidate]
    fits = distance <= limit
    inner = distance[1:] if len(distance) > 1 else distance
    middle, direction = float(inner.median()), float(direct.direction[-len(inner):, slot, candidate].median())
    unclear = bool(fits.all()) and (middle > float(direct.middle[slot, candidate])
                                    or middle > 2 * ARITHMETIC and direction < 0.7 * middle)
    return SlotReading(slot, candidate, distance, limit, fits, ~fits, unclear)


def rows_text(bad: np.ndarray) -> str:
    """Rows in words: "all rows", "rows 12 to 30", "row 4", "7 rows, the first 3"."""
    where = np.flatnonzero(bad)
    if len(where) == 0:
        return "no row"
    first, last = int(where[0]), int(where[-1])
    if len(where) >= len(bad) - (first > 0) and first <= 1 and len(bad) > 1:
        return "all rows"
    if len(where) == 1:
        return f"row {first}"
    if len(where) == last - first + 1:
        return f"rows {first} to the end" if last == len(bad) - 1 else f"rows {first} to {last}"
    return f"{len(where)} of {len(bad)} rows, the first at {first}"


def _fault(sample: AuditedSample, reading: SlotReading, code: str, rows: Tensor, text: str, key: tuple = (),
           **evidence) -> SampleFault:
    """A fault over `rows`, which are taken off what is still to be explained."""
    reading.bad = reading.bad & ~rows
    reading.explained = reading.explained or code
    return SampleFault(code, sample.index, reading.slot, text, (code, *key), int(rows.sum()),
                       {"rows": rows_text(rows.cpu().numpy()), **evidence})


def explain_values(sample: AuditedSample, reading: SlotReading) -> list[SampleFault]:
    """Rows that are not finite, zero, or cut off at the largest number of a type."""
    found = []
    stored = sample.states[:sample.num_rows, reading.slot].to(reading.bad.device)
    truth = sample.reference.of(reading.candidate)[:sample.num_rows]
    lost = ~stored.isfinite().all(-1) & reading.bad
    if lost.any():
        infinite = stored.isinf() & lost[:, None]
        overflowed = truth[infinite].abs() > LARGEST_FP16 * 0.99
        if infinite.any() and not stored.isnan().any() and (
                sample.stored.states.dtype == torch.float16 or overflowed.float().mean() >= MOST):
            found.append(_fault(sample, reading, faults.FP16, lost,
                                f"infinite in {rows_text(lost.cpu().numpy())}: values up to "
                                f"{truth[lost].abs().max():,.0f} do not fit fp16, whose largest is 65,504"))
        else:
            count = int((~stored.isfinite()).sum())
            found.append(_fault(sample, reading, faults.NOT_FINITE, lost,
                                f"{count} values NaN or infinite in {rows_text(lost.cpu().numpy())}"))
    zero = (stored == 0).all(-1) & reading.bad
    if zero.any():
        found.append(_fault(sample, reading, faults.ZEROS, zero, f"zeros in {rows_text(zero.cpu().numpy())}"))
    largest = stored.nan_to_num(0, 0, 0).abs().amax()
    if reading.bad.any() and float(largest) in (LARGEST_FP16, 65536.0, 65280.0):  # as it is, or rounded to bf16
        clipped = truth.clamp(-LARGEST_FP16, LARGEST_FP16)
        distance = (stored - clipped).norm(dim=-1) / clipped.norm(dim=-1)
        cut = (distance <= reading.limit) & reading.bad
        if cut.sum() >= MOST * reading.num_bad:
            found.append(_fault(sample, reading, faults.FP16, cut, f"values cut off at 65,504, fp16's largest number, "
                                f"in {rows_text(cut.cpu().numpy())}"))
    return found


def explain_misread(sample: AuditedSample, reading: SlotReading, level: str) -> SampleFault | None:
    """bf16 bits stored under the name of fp16, or the reverse."""
    other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}.get(sample.stored.states.dtype)
    if other is None or reading.num_bad < MOST * sample.num_rows:
        return None
    states = sample.stored.states[:sample.num_rows, reading.slot:reading.slot + 1].contiguous().view(other).float()
    rounding = replace(sample.rounding, absolute=sample.rounding.absolute[:, :1])
    again = compare(states, rounding, sample.reference, level)
    best = int(scores(again)[0].argmax())
    if again.fits[:, 0, best].float().mean() < MOST:
        return None
    reading.candidate = best
    names = [str(t).removeprefix("torch.") for t in (other, sample.stored.states.dtype)]
    return _fault(sample, reading, faults.MISREAD, reading.bad, f"{names[0]} bits under the name of {names[1]}: read "
                  f"as {names[0]} they are {sample.reference.candidates[best].name}")


def explain_shift(sample: AuditedSample, reading: SlotReading, level: str) -> SampleFault | None:
    """The right states, stored some tokens early or late."""
    slot, best = slice(reading.slot, reading.slot + 1), None
    rounding = replace(sample.rounding, absolute=sample.rounding.absolute[:, slot])
    for shift in SHIFTS:
        if sample.num_rows <= abs(shift) + 1:
            continue
        moved = compare(sample.states[:sample.num_rows, slot], rounding, sample.reference, level, shift)
        rows = reading.bad[moved.first:moved.first + len(moved.distance)]
        if rows.sum() < max(1, MOST * (reading.num_bad - abs(shift))):
            continue
        fit = scores(moved, rows[:, None])[0]
        candidate = int(fit.argmax())
        share = float((moved.fits[:, 0, candidate] & rows).sum() / rows.sum())
        if share >= MOST and (best is None or float(fit[candidate]) > best[0]):
            middle = float(moved.distance[rows, 0, candidate].median())
            best = (float(fit[candidate]), shift, candidate, share, middle)
    if best is None:
        return None
    _, shift, candidate, share, middle = best
    if reading.num_bad >= MOST * sample.num_rows:
        reading.candidate = candidate
    where = rows_text(reading.bad.cpu().numpy())
    return _fault(sample, reading, faults.TOKENS_SHIFTED, reading.bad,
                  f"the state of token t is stored at t {'+' if shift > 0 else '-'} {abs(shift)} ({where}; "
                  f"{100 * share:.0f} % of them fit so, median distance {middle:.2g})", (shift,), shift=shift,
                  median=middle)


def explain_scale(sample: AuditedSample, reading: SlotReading, usual: int) -> SampleFault | None:
    """The right directions with wrong lengths: one factor for all rows, or another one for each. usual: what the slot
    holds in most samples, which is preferred: a norm may leave the direction alone."""
    if reading.num_bad == 0:
        return None
    direct, slot = sample.direct, reading.slot
    close = (direct.direction[:, slot] <= direct.limit[:, slot]) & reading.bad[:, None]  # [n, C]
    count = close.sum(0)
    best = usual if count[usual] >= MOST * reading.num_bad else reading.candidate
    if count[best] < MOST * reading.num_bad:
        middle = direct.direction[:, slot].median(0).values
        best = int(torch.where(count >= MOST * reading.num_bad, middle, torch.inf).argmin())
    if count[best] < MOST * reading.num_bad:
        return None
    rows, ratio = close[:, best], direct.ratio[:, slot, best]
    if direct.direction[rows, slot, best].median() > 0.7 * direct.distance[rows, slot, best].median():
        return None  # the length is not what is wrong
    if best == usual or reading.num_bad >= MOST * sample.num_rows:
        reading.candidate = best
    inner = torch.arange(len(rows), device=rows.device) > 0
    whole = ratio[inner & (direct.direction[:, slot, best] <= direct.limit[:, slot, best])]
    if len(whole) > 1 and float(whole.std(correction=0)) < min(0.1, 0.5 * abs(float(whole.median()) - 1)):
        ratio = whole  # rows within their limit have the same factor
    else:
        ratio = ratio[rows & inner] if rows.sum() > 1 else ratio[rows]
    middle, spread = float(ratio.median()), float(ratio.std(correction=0) / ratio.mean())
    largest = sample.stored.states[:sample.num_rows, slot].float().abs().amax(-1)[rows.cpu()]
    name, where = sample.reference.candidates[best].name, rows_text(rows.cpu().numpy())
    if spread <= min(0.1, 2 * float(direct.middle[slot, best])) and len(ratio) > 1:
        return _fault(sample, reading, faults.SCALED, reading.bad, f"{name} times {middle:.4g} ({where}; the factor "
                      f"varies by {100 * spread:.2g} %)", (round(float(np.log2(max(middle, 1e-30)))),), factor=middle)
    info = torch.finfo(torch.float8_e4m3fn)
    full = sample.stored.scales is None and float(
        ((largest > info.max / 2) & (largest <= info.max)).float().mean()) >= MOST
    why = (", and every row reaches up to 448, fp8's largest number: fp8 without its scales" if full else
           ", each row by a factor of its own: scales lost, or applied to other rows, or a norm without weight")
    return _fault(sample, reading, faults.ROW_SCALES, reading.bad,
                  f"directions of {name} are right, lengths are wrong by {float(ratio.min()):.3g} to "
                  f"{float(ratio.max()):.3g} times ({where}){why}", (), least=float(ratio.min()),
                  most=float(ratio.max()), fp8=full)


def explain_rows(sample: AuditedSample, reading: SlotReading, level: str, others: dict[int, Reference],
                 all_candidates: bool) -> list[SampleFault]:
    """Rows that are another token's of this sample, or some token's of another sample: the nearest of all rows."""
    found = []
    device = reading.bad.device
    stored = sample.states[:sample.num_rows, reading.slot].to(device).nan_to_num(0, 0, 0)
    for other, reference in {sample.index: sample.reference, **others}.items():
        if not reading.bad.any():
            break
        where = torch.nonzero(reading.bad)[:, 0]
        candidates = [reading.candidate]
        if all_candidates:  # the layer is not known yet: look for a few rows in all of them
            few = where[torch.linspace(0, len(where) - 1, min(16, len(where)), device=device).long()]
            by = [nearest_rows(stored[few], reference.of(c))[1].median() for c in range(len(reference.candidates))]
            candidates = [int(torch.stack(by).argmin())]
        candidate = candidates[0]
        index, distance = nearest_rows(stored[where], reference.of(candidate))
        noise = reference.noise[:, candidate] * (ROUNDING[level] / ROUNDING["bfloat16"])
        small = sample.rounding.absolute[:sample.num_rows, reading.slot].to(device)[where] / stored[where].norm(dim=-1)
        limit = (WORST_TOKEN * torch.maximum(noise[index], noise.median()) + sample.rounding.relative + ARITHMETIC
                 + small.nan_to_num(0, 0, 0))
        hit = distance <= limit
        if other == sample.index:
            hit &= index != where
        if hit.sum() < max(1, MOST * len(where)):
            continue
        offsets = (where - index)[hit]
        common = int(offsets.mode().values)
        rows = torch.zeros_like(reading.bad)
        rows[where[hit]] = True
        if all_candidates:
            reading.candidate = candidate
        text = rows_text(rows.cpu().numpy())
        offset_text = "" if common == 0 else f", {abs(common)} tokens {'on' if common > 0 else 'before'}"
        if other == sample.index:
            found.append(_fault(sample, reading, faults.ROWS_MOVED, rows, f"{text} are rows of other tokens of the "
                                f"same sample (row {int(where[hit][0])} is that of token {int(index[hit][0])})", ()))
        else:
            found.append(_fault(sample, reading, faults.OTHER_SAMPLE, rows, f"{text} are those of sample {other}"
                                f"{offset_text} (median distance {float(distance[hit].median()):.2g})", (),
                                other=other, offset=common))
    return found
