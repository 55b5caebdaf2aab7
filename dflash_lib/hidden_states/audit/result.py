"""What an audit found: one line, a table, findings with their evidence, and what to do."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_lib.hidden_states.audit import faults
from dflash_lib.hidden_states.audit.context import Audited
from dflash_lib.hidden_states.audit.faults import Finding, SampleFault
from dflash_lib.hidden_states.audit.layers import HoldsSlot, layer_findings, slot_holds
from dflash_lib.hidden_states.audit.reference import LAYER, ROUNDING
from dflash_lib.hidden_states.audit.repair import Repair, plan_repair, to_extract_again
from dflash_lib.hidden_states.audit.repair_check import check_repair
from dflash_lib.hidden_states.audit.sampling import coverage
from dflash_lib.hidden_states.audit.scan import Scan

SAME_FACTOR = 1.02  # factors of one cause: a sample's own is known to less than rounding's 0.4 %
SEEN_BY_BOTH = {faults.ZEROS, faults.NOT_FINITE, faults.FP16, faults.FEWER, faults.MORE, faults.OTHER_SAMPLE}


@dataclass(frozen=True)
class SlotResult:
    """One slot, over all audited samples. stated, holds: in words, stated "" where nothing is; median, worst: relative
    distance over rows behind position 0 that belong to the slot's candidate; limit: of the median; next_best and
    next_distance: the nearest other layer; num_fit of num_rows rows are within their limit, num_remarks are
    beyond it and no fault."""

    slot: int
    stated: str
    holds: str
    median: float
    worst: float
    limit: float
    at_0: float
    next_best: str
    next_distance: float
    num_fit: int
    num_rows: int
    faults: tuple[str, ...]
    num_remarks: int = 0

    @property
    def finding(self) -> str:
        """In words, for the table."""
        rows = f"{self.num_remarks} row{'s' if self.num_remarks > 1 else ''} beyond the limit, see the remark"
        return "; ".join([*self.faults, *([rows] if self.num_remarks else [])]) or "as it should be"


@dataclass(frozen=True)
class Audit:
    """verdict: one line; findings: what is wrong, empty = nothing; slots: the table; layers: [K, N + 1] median distance
    of each slot to the embedding and every layer; by_token: per audited sample (name, [rows, K] distances to what the
    slot holds); coverage: what may be said of the samples that were not recomputed; basis: where the limits come from;
    remark: on rows beyond them that are no fault; repair: what makes usable states of these, or None and `no_repair`,
    why there is no way; stated_target: the model that a store says it is of; coarse: stored in a type whose rounding
    hides how the states were computed (fp8).
    """

    name: str
    verdict: str
    findings: list[Finding]
    slots: list[SlotResult]
    layers: np.ndarray
    by_token: list[tuple[str, np.ndarray]]
    limits: list[np.ndarray]
    coverage: str
    basis: str
    level: str
    num_samples: int
    audited: tuple[int, ...]
    scanned: int
    sample_names: dict[int, str] = field(default_factory=dict)
    repair: Repair | None = None
    no_repair: str = ""
    remark: str = ""
    stated_target: str = ""
    coarse: bool = False

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def faults(self) -> list[str]:
        """The faults' names, each once."""
        return list(dict.fromkeys(finding.fault for finding in self.findings))

    @property
    def about_states(self) -> list[Finding]:
        """Findings about stored states, not about files, ids or masks alone."""
        return [finding for finding in self.findings if finding.fault not in faults.ABOUT_DATA]

    @property
    def extract_again(self) -> list[str]:
        """Names of samples whose states nothing repairs, as far as they were seen."""
        return [self.sample_names.get(i, f"sample {i}") for i in to_extract_again(self.findings)]

    def rows(self) -> list[dict[str, Any]]:
        """The table, for a DataFrame: one row a slot."""
        return [{"slot": s.slot, "stated": s.stated or "-", "holds": s.holds, "median": s.median, "limit": s.limit,
                 "worst token": s.worst, "next best": f"{s.next_best} ({s.next_distance:.2g})",
                 "rows that fit": f"{s.num_fit}/{s.num_rows}", "finding": s.finding}
                for s in self.slots]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"source": self.name, "verdict": self.verdict, "ok": self.ok, "coverage": self.coverage,
                "basis": self.basis, "remark": self.remark, "computed_in": self.level, "num_samples": self.num_samples,
                "audited": list(self.audited), "scanned": self.scanned,
                "slots": [{**vars(s), "faults": list(s.faults)} for s in self.slots],
                "findings": [{"fault": f.fault, "text": f.text, "slots": list(f.slots), "samples": list(f.samples),
                              "evidence": f.evidence, "repair": None if f.repair is None else list(f.repair)}
                             for f in self.findings]}


def summarise(audited: Audited, scanned: Scan, problems: list[SampleFault], chosen: list[int], num_drawn: int,
              name: str) -> Audit:
    """Gathers everything into an Audit."""
    explained = {sample.index for sample in audited.samples}
    problems = [p for p in problems if not (p.sample in explained and p.code in SEEN_BY_BOTH)]
    holds = [slot_holds(audited, slot) for slot in range(len(audited.claims))] if audited.samples else []
    single = [*(fault for sample in audited.samples for fault in sample.faults), *problems]
    found = [*layer_findings(audited, holds), *_merge(audited, single)]
    found = sorted(found, key=lambda finding: finding.fault in faults.ABOUT_DATA)
    said = coverage(len(audited.source), len(audited.samples), min(num_drawn, len(audited.samples)))
    slots = [_slot_result(audited, hold, found) for hold in holds]
    repair, no_repair = None, "" if audited.samples or not found else "no sample could be recomputed. Extract again."
    if found and audited.samples:
        repair, no_repair = plan_repair(found, [audited.candidates[h.candidate] for h in holds],
                                        audited.source.last is not None, audited.target.num_layers)
        why = "" if repair is None else check_repair(audited, repair)
        if why:
            repair, no_repair = None, (f"what would repair a part was tried on the recomputed samples, and {why}. "
                                       "Extract again.")
    layers = np.zeros((0, 0))
    if audited.samples:
        columns = audited.target.num_layers + 1
        layers = np.median([s.direct.medians()[:, :columns].double().cpu().numpy() for s in audited.samples], axis=0)
    return Audit(
        name=name or audited.source.format, verdict=_verdict(audited, found, scanned, said), findings=found,
        slots=slots, layers=layers, coverage=said, basis=_basis(audited), level=audited.level,
        num_samples=len(audited.source),
        by_token=[(s.name, np.stack([s.direct.distance[:, h.slot, h.candidate].cpu().numpy() for h in holds], axis=1))
                  for s in audited.samples],
        limits=[np.stack([s.direct.limit[:, h.slot, h.candidate].cpu().numpy() for h in holds], axis=1)
                for s in audited.samples],
        audited=tuple(s.index for s in audited.samples), scanned=scanned.num_scanned,
        sample_names=dict(enumerate(audited.source.names)) if len(audited.source) < 10_000 else {
            s.index: s.name for s in audited.samples}, repair=repair, no_repair=no_repair,
        remark=audited.remark, stated_target=str(getattr(getattr(audited.source, "plan", None), "target", {}).get(
            "name", "")),
        coarse=bool(audited.samples) and audited.samples[0].rounding.relative > 2 * ROUNDING["bfloat16"])


def _merge(audited: Audited, single: list[SampleFault]) -> list[Finding]:
    """One finding for what is the same fault."""
    groups: dict[tuple, list[SampleFault]] = {}
    for fault in single:
        groups.setdefault(fault.key or (fault.code,), []).append(fault)
    found = []
    for (code, *_), same in groups.items():
        samples = tuple(sorted({f.sample for f in same if f.sample >= 0}))
        slots = tuple(sorted({f.slot for f in same if f.slot is not None}))
        first = same[0]
        where = "" if first.sample < 0 else f"sample {first.sample}"
        if first.slot is not None:
            where += f", slot {first.slot}"
        more = []
        if len(samples) > 1:
            more.append(f"in {len(samples)} samples")
        if slots and len(slots) > 1:
            more.append(f"in slots {', '.join(map(str, slots))}")
        told = not where or first.text.startswith(f"{where}: ")  # a store's names are "sample 3"
        text = first.text if told else f"{where}: {first.text}"
        factors = [f.evidence["factor"] for f in same if "factor" in f.evidence]
        if factors and max(factors) > SAME_FACTOR * min(factors):
            more.append(f"by factors from {min(factors):.4g} to {max(factors):.4g}")
        if more:
            text += f"; {' and '.join(more)}"
        found.append(Finding(code, text, slots, samples, first.evidence, _repair(audited, code, same, samples)))
    return found


def _repair(audited: Audited, code: str, same: list[SampleFault], samples: tuple[int, ...]) -> tuple | None:
    """What a repair can do about it: only what hits the same slots of every audited sample alike is put right; samples
    are left out where others are whole. `check_repair` tries it."""
    everywhere = {sample.index for sample in audited.samples} <= set(samples)
    slots = {f.slot for f in same}
    uniform = everywhere and len({(f.sample, f.slot) for f in same}) == len(slots) * len(samples)
    whole = uniform and len(slots) >= len(audited.claims)
    if code == faults.TOKENS_SHIFTED and whole and same[0].evidence["shift"] > 0:
        return ("shift", same[0].evidence["shift"])
    if code in (faults.BOS, faults.IDS_SHIFTED) and everywhere and same[0].evidence.get("offset") == 0 and (
            "without their first" in same[0].text):
        return ("drop first id",)
    if code == faults.SCALED and uniform:
        factors = {slot: [f.evidence["factor"] for f in same if f.slot == slot] for slot in sorted(slots)}
        if all(max(each) <= SAME_FACTOR * min(each) for each in factors.values()):
            return ("scale", {slot: float(np.median(each)) for slot, each in factors.items()})
        return None
    if code in (faults.DUPLICATED, faults.OTHER_SAMPLE, faults.ZEROS, faults.NOT_FINITE, faults.FP16, faults.FEWER,
                faults.MORE, faults.UNREADABLE, faults.IDS_DIFFER, faults.PACKING, faults.LEFT_PADDING, faults.BAD_IDS,
                faults.BAD_MASK, faults.ROWS_MOVED, faults.UNRECOGNISED, faults.TOKENS_SHIFTED, faults.NUM_SLOTS,
                faults.WRONG_SIZE, faults.SCALED, faults.ROW_SCALES, faults.OTHER_MODEL) and (
            not everywhere or not audited.samples) and samples:
        return ("drop samples", list(samples))
    return None


def _slot_result(audited: Audited, hold: HoldsSlot, found: list[Finding]) -> SlotResult:
    claim = audited.claims[hold.slot]
    columns = [s.direct.distance[:, hold.slot, hold.candidate].double().cpu().numpy() for s in audited.samples]
    distances = np.concatenate([column[1:] if len(column) > 1 else column for column in columns])
    fits = [s.direct.fits[:, hold.slot, hold.candidate] for s in audited.samples]
    medians = np.median([s.direct.medians()[hold.slot].double().cpu().numpy() for s in audited.samples], axis=0)
    layers = [i for i, c in enumerate(audited.candidates) if c.kind == LAYER and i != hold.candidate]
    following = min(layers, key=lambda i: medians[i]) if layers else hold.candidate
    finite = distances[np.isfinite(distances)]
    names = tuple(dict.fromkeys(f.fault for f in found if f.fault not in faults.ABOUT_DATA and (
        hold.slot in f.slots or not f.slots)))
    return SlotResult(
        hold.slot, "" if claim is None else audited.candidates[claim].name,
        audited.candidates[hold.candidate].name if hold.sure else f"not recognised (nearest: "
        f"{audited.candidates[hold.candidate].name})",
        float(np.median(distances)) if len(distances) else 0.0, float(finite.max()) if len(finite) else float("inf"),
        float(np.median([float(s.direct.middle[hold.slot, hold.candidate]) for s in audited.samples])),
        float(max(float(s.direct.distance[0, hold.slot, hold.candidate]) for s in audited.samples)),
        audited.candidates[following].name, float(medians[following]),
        int(sum(int(f.sum()) for f in fits)), int(sum(len(f) for f in fits)), names,
        sum(int(s.readings[hold.slot].remarks.sum()) for s in audited.samples))


def _verdict(audited: Audited, found: list[Finding], scanned: Scan, said: str) -> str:
    number = len(audited.source)
    seen = scanned.num_scanned
    looked = f"all {number} samples were" if seen == number else f"{seen} of {number} samples were"
    if found:
        names = list(dict.fromkeys(f.fault for f in found))
        return f"WRONG: {'; '.join(names)}. {said}; {looked} scanned."
    stated = "as stated" if all(claim is not None for claim in audited.claims) else "recognised"
    last = ", and so is the last state where it is stored" if getattr(audited.source, "last_elsewhere", "") else ""
    return f"RIGHT: every slot is {stated}{last}, no fault found. {said}; {looked} scanned."


def _basis(audited: Audited) -> str:
    if not audited.samples:
        return ""
    sample = audited.samples[0]
    dtype = str(sample.stored.states.dtype).removeprefix("torch.")
    noise = ROUNDING[audited.level]
    return (f"A row fits within the largest rounding of {dtype} ({sample.rounding.relative:.2g}, and what is too small "
            f"for it), plus 4 times what one rounding to {audited.level} ({noise:.2g}) at every module does to that "
            "row (vLLM's worst token: 2.4 times), plus 0.001 for this comparison; the median within twice such noise "
            "(vLLM: 1.0 times).")
