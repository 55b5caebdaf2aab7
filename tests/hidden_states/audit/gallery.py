"""Runs planted faults and compares what the audit names with what was planted."""

import copy
import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch

from dflash_lib.hidden_states.audit import Audit, audit_states
from dflash_lib.hidden_states.audit import faults as names
from dflash_lib.target.loading import Target
from tests.hidden_states.audit import more_faults  # noqa: F401  registers its faults
from tests.hidden_states.audit.faults import PLANTS, Case, Planted

# Faults that a sample may show beside the one that was planted, because they are the same damage seen elsewhere.
WRITES_INTO_THE_STREAM = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "embed_tokens.weight")


def loud(target: Target) -> Target:
    """A copy whose residual stream is thousands of times larger: beyond fp16, and otherwise the same (RMS norms)."""
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(WRITES_INTO_THE_STREAM):
                parameter.mul_(60_000)
    return replace(target, model=model)


def tuned(target: Target, strength: float, seed: int = 0) -> Target:
    """A copy with every weight changed by `strength` times its matrix's own spread."""
    model, generator = copy.deepcopy(target.model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs().mean()
            parameter.add_(strength * spread * torch.randn(parameter.shape, generator=generator))
    return replace(target, model=model)


def other(target: Target, seed: int = 0) -> Target:
    """A model of the same shape whose weights are drawn anew, with the spread of the old ones."""
    model, generator = copy.deepcopy(target.model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.std() * torch.randn(parameter.shape, generator=generator))
    return replace(target, model=model)


@dataclass
class Outcome:
    """wrong: what the audit should have said otherwise, "" when it was right."""

    plant: str
    planted: Planted
    audit: Audit
    wrong: str


def make_case(target: Target, plant: str, seed: int, encoding: str) -> Case:
    rng = np.random.default_rng([zlib.crc32(plant.encode()), seed])
    return Case(target, rng, encoding, make_loud=lambda: loud(target),
                make_tuned=lambda strength: tuned(target, strength, seed),
                make_other=lambda: other(target, seed))


def run_plant(target: Target, plant: str, seed: int, encoding: str = "bf16", num_samples: int = 8) -> Outcome:
    """Plants one fault, audits, and judges."""
    planted = PLANTS[plant](make_case(target, plant, seed, encoding))
    audit = audit_states(planted.source, planted.target or target, num_samples, seed)
    return Outcome(plant, planted, audit, judge(planted, audit))


def judge(planted: Planted, audit: Audit) -> str:
    """What is wrong with the audit's answer: a planted fault that it does not name, one that it makes up, or another
    slot or sample than was hit."""
    found = set(audit.faults)
    if not found & planted.must:
        return f"says {sorted(found)}, planted {sorted(planted.must)}"
    extra = found - planted.must - planted.may
    if extra:
        return f"also says {sorted(extra)}"
    findings = [f for f in audit.findings if f.fault in planted.must]
    slots = {slot for f in findings for slot in f.slots}
    if planted.slots is not None and slots and slots != planted.slots:
        return f"slots {sorted(slots)}, planted in {sorted(planted.slots)}"
    samples = {sample for f in findings for sample in f.samples}
    if planted.samples is not None and samples and not samples <= planted.samples:
        return f"samples {sorted(samples)}, planted in {sorted(planted.samples)}"
    if planted.samples is not None and names.OTHER_SAMPLE not in planted.must and samples != planted.samples:
        return f"samples {sorted(samples)} only, planted in {sorted(planted.samples)}"
    return ""
