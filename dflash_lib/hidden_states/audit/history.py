"""Why rows are wrong when their values alone do not tell: they were computed from something else.

Other token ids, padding or another sample in front, another sample altogether: each is run and compared. What nothing
explains is judged by how close it is: a fine-tune is close at every token, another text not at all.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dflash_lib.hidden_states.audit import faults
from dflash_lib.hidden_states.audit.alternatives import (
    Alternative,
    packing_alternatives,
    padding_alternatives,
    padding_amounts,
    special_ids,
    token_alternatives,
)
from dflash_lib.hidden_states.audit.context import Audited
from dflash_lib.hidden_states.audit.explain import (
    MOST,
    RELATED,
    AuditedSample,
    SlotReading,
    explain_rows,
    rows_text,
)
from dflash_lib.hidden_states.audit.faults import SampleFault
from dflash_lib.hidden_states.audit.matching import Rounding, compare, unrelated_distance
from dflash_lib.hidden_states.audit.reference import Reference, run_batch, run_row

DEEP_SAMPLES = 3  # searching without a hint takes dozens of forwards: so many samples that end without an answer
NUM_REFINED = 24  # amounts of padding tried around the best rough one
MAX_PROBED = 4096  # one-token rows run to find out with which token a row began
PROBED_AT_ONCE = 64
MAX_SAME_LENGTH = 8  # samples of the same length that are recomputed in search of the owner of rows


def explain_history(audited: Audited, sample: AuditedSample, before: Mapping[int, Tensor]) -> None:
    """Explains what is left of a sample, into `sample.faults`. before: the rows that were bad before shifts were tried:
    ids in front, or one too few, look nearly like a shift, and are told from it here."""
    bad = [reading for reading in sample.readings if reading.bad.any()]
    if not bad:
        shifted = [f for f in sample.faults if f.code == faults.TOKENS_SHIFTED]
        if len(shifted) == len(sample.readings) and len({f.key for f in shifted}) == 1:
            _ids_instead_of_shift(audited, sample, shifted, before)
        return
    trial = _Trial(audited, sample, bad)
    deep = audited.searched < DEEP_SAMPLES
    if trial.find(deep):
        _replace_shifts(audited, sample, before, trial.best)
        return
    for i in _owners(audited, sample, deep):
        reference = audited.reference(i)
        for reading in bad:
            if reference is not None and reading.bad.any():
                sample.faults += explain_rows(sample, reading, audited.level, {i: reference}, False)
    bad = [reading for reading in bad if reading.bad.any()]
    if bad and not trial.accept_nearly():
        audited.searched += deep
        concluded = conclude(audited, sample, bad)
        if any(fault.code == faults.IDS_DIFFER for fault in concluded):  # early layers hardly see what is in front
            sample.faults = [fault for fault in sample.faults if fault.code != faults.TOKENS_SHIFTED]
        sample.faults += concluded


def _ids_instead_of_shift(audited: Audited, sample: AuditedSample, shifted: list[SampleFault],
                          before: Mapping[int, Tensor]) -> None:
    """Replaces a shift of every slot by other ids where these fit clearly better."""
    middle = sum(f.evidence["median"] for f in shifted) / len(shifted)
    for reading in sample.readings:
        reading.bad = before[reading.slot].clone()
    trial = _Trial(audited, sample, sample.readings)
    trial.search(token_alternatives(audited.target, sample.ids, _first_tokens(audited)))
    if trial.share >= MOST and trial.middle < 0.7 * middle:
        sample.faults = [f for f in sample.faults if f not in shifted]
        trial.accept()
    for reading in sample.readings:
        reading.bad[:] = False


def _replace_shifts(audited: Audited, sample: AuditedSample, before: Mapping[int, Tensor], best: Alternative) -> None:
    """Takes back the shift of slots that the same alternative explains: early layers hardly see the token in front."""
    shifted = {f.slot: f for f in sample.faults if f.code == faults.TOKENS_SHIFTED}
    readings = [reading for reading in sample.readings if reading.slot in shifted]
    for reading in readings:
        reading.bad = before[reading.slot].clone()
        if _Trial(audited, sample, [reading]).measure(best)[0] >= MOST:
            sample.faults.remove(shifted[reading.slot])
            reading.explained = best.code
        reading.bad[:] = False


def _first_tokens(audited: Audited) -> list[int]:
    return list(dict.fromkeys(ids[0] for ids in audited.ids.values()))


def _owners(audited: Audited, sample: AuditedSample, deep: bool) -> list[int]:
    """Samples whose rows these may be: neighbours, and those of the same length; what was audited was tried before."""
    i, known = sample.index, {s.index for s in audited.samples}
    near = [i - 1, i + 1, i - 2, i + 2]
    rows = len(sample.states)
    same = [j for j, n in enumerate(audited.lengths) if n == rows or n == len(sample.ids)] if deep else []
    wanted = dict.fromkeys([*near, *same[:MAX_SAME_LENGTH]])
    return [j for j in wanted if 0 <= j < len(audited.lengths) and j not in known]


class _Trial:
    """Alternatives tried on the bad rows of some slots of a sample; the best is kept. share: of bad rows that fit it;
    middle: their median distance under it; gain: that over the direct one."""

    def __init__(self, audited: Audited, sample: AuditedSample, readings: list[SlotReading]):
        self.audited, self.sample, self.readings = audited, sample, readings
        self.best: Alternative | None = None
        self.share, self.middle, self.gain, self.chosen = 0.0, float("inf"), 1.0, []
        slots = [reading.slot for reading in readings]
        self.states = sample.states[:, slots]
        self.rounding = Rounding(sample.rounding.relative, sample.rounding.absolute[:, slots])
        self.direct = [float(r.distance[r.bad].median()) for r in readings]

    def measure(self, alternative: Alternative) -> tuple[float, float, float, list[int]]:
        """(share, middle, gain, candidates) of one alternative."""
        own = self.sample.reference
        residual = run_row(self.audited.target, alternative.row, alternative.positions)
        reference = Reference(residual, own.noise.median(0).values.expand(len(residual), -1), own.candidates, own.norm)
        found = compare(self.states, self.rounding, reference, self.audited.level, alternative.offset)
        shares, middles, gains, chosen = [], [], [], []
        for k, reading in enumerate(self.readings):
            rows = reading.bad[found.first:found.first + len(found.distance)]
            if not rows.any():
                return 0.0, float("inf"), 1.0, []
            medians = found.distance[rows, k].median(dim=0).values
            fitting = found.fits[rows, k].float().mean(0)
            candidate = self.audited.slots[reading.slot]  # what other samples hold, unless only something else fits
            if fitting[candidate] < MOST and fitting.max() >= MOST:
                candidate = int(torch.where(fitting >= MOST, medians, torch.inf).argmin())
            shares.append(float(fitting[candidate]))
            middles.append(float(medians[candidate]))
            gains.append(middles[-1] / max(self.direct[k], 1e-9))
            chosen.append(candidate)
        mean = len(shares)
        return sum(shares) / mean, sum(middles) / mean, sum(gains) / mean, chosen

    def search(self, alternatives: Iterable[Alternative]) -> bool:
        """Tries them until one fits nearly every row; True then."""
        for alternative in alternatives:
            size = self.audited.target.embedding.weight.shape[0]
            if not alternative.row or max(alternative.row) >= size:
                continue
            share, middle, gain, chosen = self.measure(alternative)
            if (share, -middle) > (self.share, -self.middle):
                self.best, self.share, self.middle, self.gain, self.chosen = alternative, share, middle, gain, chosen
            if share >= 0.95:
                return True
        return False

    def find(self, deep: bool) -> bool:
        """Searches, what explained earlier samples first, and accepts what fits; True then."""
        audited, ids, i = self.audited, self.sample.ids, self.sample.index
        tokens = [*token_alternatives(audited.target, ids, _first_tokens(audited))]
        packed = [*packing_alternatives(audited.target, ids, self._before())]
        pads = special_ids(audited.target)
        if not deep:
            tokens = [a for a in tokens if a.key in audited.hints]
            packed = [a for a in packed if a.key in audited.hints]
            pads = [pad for kind, pad in (h for h in audited.hints if len(h) == 2) if kind == faults.LEFT_PADDING]
        near = [audited.lengths[j] - len(ids) for j in range(max(0, i - 8), min(len(audited.lengths), i + 9))]
        likely, amounts = padding_amounts(max(audited.lengths) - len(ids), near)
        known = [pad for pad in pads if (faults.LEFT_PADDING, pad) in audited.hints]
        hinted = [*(a for a in (*tokens, *packed) if a.key in audited.hints),
                  *(a for pad in known for a in padding_alternatives(ids, pad, likely))]
        fits = self.search(hinted) or self.search(tokens) or self.search(packed)
        if not fits and self._may_be_padded():
            for some in (likely, amounts):
                for pad in pads:
                    fits = fits or self.search(padding_alternatives(ids, pad, some))
            fits = fits or self._refine(sorted({*likely, *amounts}))
        if self.share >= MOST:
            self.accept()
            return True
        return False

    def _may_be_padded(self) -> bool:
        """Padding is seen most in the last layers, and there in the first rows."""
        layers = [self.sample.reference.candidates[r.candidate].layer for r in self.sample.readings]
        deepest = layers.index(max(layers))
        return any(r.slot == deepest and bool(r.bad[:3].any()) for r in self.readings)

    def _refine(self, amounts: list[int]) -> bool:
        """Amounts between those that were tried, around the best."""
        best = self.best
        if best is None or best.code != faults.LEFT_PADDING:
            return False
        amount, token = -best.offset, best.row[0]
        low = max([n for n in amounts if n < amount], default=0)
        high = min([n for n in amounts if n > amount], default=amount + 1)
        between = sorted((n for n in range(low + 1, high) if n != amount), key=lambda n: abs(n - amount))
        return self.search(padding_alternatives(self.sample.ids, token, between[:NUM_REFINED]))

    def _before(self) -> dict[str, list[int]]:
        """What may have stood before the row in one that was packed, by name."""
        audited, i = self.audited, self.sample.index
        found = {}
        for near in ([i - 1], [i - 2, i - 1], [i + 1], [i - 3, i - 2, i - 1], [i - 2]):
            rows = [audited.read_ids(j) if j >= 0 else None for j in near]
            if all(row is not None for row in rows):
                name = f"sample{'s' if len(near) > 1 else ''} {', '.join(map(str, near))}"
                found[name] = [k for row in rows for k in row]
        return found

    def accept(self, nearly: bool = False) -> None:
        """Takes the best alternative as the explanation of its rows."""
        best, readings = self.best, self.readings
        rows = rows_text(torch.stack([r.bad for r in readings]).any(0).cpu().numpy())
        fit = (f"the same damage, not the same amount: median distance {self.middle:.2g} instead of "
               f"{self.middle / self.gain:.2g}" if nearly else
               f"{100 * self.share:.0f} % of {rows} fit so, median distance {self.middle:.2g}")
        key = (best.code, best.row[0]) if best.code == faults.LEFT_PADDING else best.key
        if key not in self.audited.hints:
            self.audited.hints.append(key)
        self.sample.faults.append(SampleFault(
            best.code, self.sample.index, None, f"{best.text} ({fit})", (best.code, best.offset)
            if best.code in (faults.BOS, faults.IDS_SHIFTED) else (best.code,), max(r.num_bad for r in readings),
            {"median": self.middle, "direct": self.middle / max(self.gain, 1e-9), "share": self.share,
             "offset": best.offset}))
        for reading, candidate in zip(readings, self.chosen, strict=True):
            if reading.num_bad >= MOST * self.sample.num_rows:
                reading.candidate = candidate
            reading.bad = torch.zeros_like(reading.bad)
            reading.explained = reading.explained or (faults.UNRECOGNISED if nearly else best.code)

    def accept_nearly(self) -> bool:
        """Padding or packing of another amount than could be tried still brings the states much nearer."""
        if self.best is None or self.best.code not in (faults.LEFT_PADDING, faults.PACKING) or self.gain > 0.5:
            return False
        unrelated = [unrelated_distance(self.sample.reference, candidate) for candidate in self.chosen]
        if self.middle > RELATED * sum(unrelated) / len(unrelated):
            return False
        self.accept(nearly=True)
        return True


def conclude(audited: Audited, sample: AuditedSample, bad: list[SlotReading]) -> list[SampleFault]:
    """What can be said of rows that no explanation fits. Empties `bad`'s rows."""
    rest = [r for r in sample.readings if not r.explained or r in bad]
    unrelated = [max(unrelated_distance(sample.reference, r.candidate), 1e-6) for r in bad]
    first = [int(torch.nonzero(r.bad)[0]) for r in bad]
    middle = [float(r.distance[r.bad].median()) for r in bad]
    near = sum(m <= RELATED * u for m, u in zip(middle, unrelated, strict=True)) > len(bad) / 2
    many = sum(r.num_bad >= 0.5 * sample.num_rows for r in bad) > len(bad) / 2
    together = len(bad) == len(rest) and len(bad) > len(sample.readings) / 2
    begins = max(first) if max(first) == min(first) else -1
    least = RELATED if begins < 3 else RELATED / 2  # a fine-tune does not spare the first rows of every slot
    jumps = [float(r.distance[f]) > least * u for r, f, u in zip(bad, first, unrelated, strict=True)]
    names = "; ".join(f"slot {r.slot}: {m:.2g} from {sample.reference.candidates[r.candidate].name} (unrelated tokens "
                      f"{u:.2g})" for r, m, u in zip(bad, middle, unrelated, strict=True))
    number = max(r.num_bad for r in bad)
    evidence = {"median": middle, "unrelated": unrelated, "first_row": first}
    rows = [r.bad for r in bad]
    for reading in bad:
        reading.bad, reading.explained = torch.zeros_like(reading.bad), reading.explained or faults.UNRECOGNISED
    if together and begins > 0 and all(jumps) and _one_cause(rows, begins):
        return [SampleFault(faults.IDS_DIFFER, sample.index, None, f"from token {begins} on the states are those of "
                            "other tokens than the ids say; before it every row fits", (faults.IDS_DIFFER,), number,
                            evidence)]
    if together and near and many:
        return [SampleFault(faults.OTHER_MODEL, sample.index, None, f"near, and not the same: median distance {names}",
                            (faults.OTHER_MODEL,), number, evidence)]
    if together and many:
        token = find_first_token(audited, sample, bad)
        if token is not None and token != sample.ids[0]:
            words = [audited.target.tokenizer.convert_ids_to_tokens(k) for k in (token, sample.ids[0])]
            return [SampleFault(faults.IDS_DIFFER, sample.index, None, f"row 0 is the state of token {token} "
                                f"({words[0]!r}), the ids begin with {sample.ids[0]} ({words[1]!r}): another "
                                "tokenizer, template or sample", (faults.IDS_DIFFER,), number, evidence)]
        if token == sample.ids[0]:
            return [SampleFault(faults.IDS_DIFFER, sample.index, None, "row 0 is right, and the others are states of "
                                "other tokens than the ids say", (faults.IDS_DIFFER,), number, evidence)]
        return [SampleFault(faults.OTHER_MODEL, sample.index, None, "no token of the target's vocabulary gives row 0, "
                            f"and no row resembles its state: median distance {names}", (faults.OTHER_MODEL,), number,
                            evidence)]
    return [SampleFault(faults.UNRECOGNISED, sample.index, r.slot, f"{rows_text(b.cpu().numpy())}: median distance "
                        f"{m:.2g} from {sample.reference.candidates[r.candidate].name} (unrelated tokens {u:.2g})",
                        (faults.UNRECOGNISED,), int(b.sum()), {"median": m, "unrelated": u})
            for r, b, m, u in zip(bad, rows, middle, unrelated, strict=True)]


def _one_cause(rows: list[Tensor], begins: int) -> bool:
    """Whether rows go wrong from `begins` on as a changed token does it: in one piece at first, fading later."""
    deepest = rows[-1][begins:]
    return bool(deepest[:4].float().mean() >= MOST) and (len(deepest) <= 4 or float(deepest.float().mean()) >= 0.25)


@torch.no_grad()
def find_first_token(audited: Audited, sample: AuditedSample, bad: list[SlotReading]) -> int | None:
    """Which token row 0 is the state of, None when none of those tried: the whole vocabulary where it is small, else
    the tokens of the audited samples and the special ones."""
    size = audited.target.embedding.weight.shape[0]
    seen = {k for ids in audited.ids.values() for k in ids}
    tokens = list(range(size)) if size <= MAX_PROBED else [*special_ids(audited.target), *sorted(seen)][:MAX_PROBED]
    slots = [r.slot for r in bad]
    own, best = sample.reference, (float("inf"), None)
    wanted = [audited.claims[slot] for slot in slots]
    for first in range(0, len(tokens), PROBED_AT_ONCE):
        part = tokens[first:first + PROBED_AT_ONCE]
        residual = run_batch(audited.target, [[token] for token in part])[:, 0]
        reference = Reference(residual, own.noise.median(0).values.expand(len(part), -1), own.candidates, own.norm)
        rounding = Rounding(sample.rounding.relative, sample.rounding.absolute[:1, slots].expand(len(part), -1))
        found = compare(sample.states[:1, slots].expand(len(part), -1, -1), rounding, reference, audited.level)
        excess = found.distance / found.limit
        value = sum(excess[:, k].min(-1).values if w is None else excess[:, k, w] for k, w in enumerate(wanted))
        token = int(value.argmin())
        if float(value[token]) / len(slots) < best[0]:
            best = (float(value[token]) / len(slots), part[token])
    return best[1] if best[0] <= 1 else None
