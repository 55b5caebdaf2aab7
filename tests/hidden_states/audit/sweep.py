"""Faults planted with many seeds: what the audit says wrongly, and how many of them.

    python -m tests.hidden_states.audit.sweep MODEL FIRST_SEED:LAST_SEED [PLANT ...]

Each seed has its own slots, samples, strengths and, in turns, encodings; with the seed come clean states as well.
"""

import sys
from collections import Counter

import torch

from dflash_lib.hidden_states.audit import audit_states
from dflash_lib.target.loading import load_target
from tests.hidden_states.audit.faults import PLANTS
from tests.hidden_states.audit.gallery import make_case, run_plant

ENCODINGS = ("bf16", "fp8", "fp8 a token", "fp16", "fp32")


def main(model: str, seeds: str, *plants: str) -> int:
    torch.set_num_threads(1)
    target = load_target(model, audit="quick")
    first, last = map(int, seeds.split(":"))
    wrong: Counter[str] = Counter()
    planted = false_alarms = 0
    for seed in range(first, last):
        encoding = ENCODINGS[seed % len(ENCODINGS)]
        clean = audit_states(make_case(target, "clean", seed, encoding).clean(), target, seed=seed)
        false_alarms += not clean.ok
        for plant in plants or PLANTS:
            outcome = run_plant(target, plant, seed, encoding)
            planted += 1
            if outcome.wrong:
                wrong[plant] += 1
                print(f"{plant}, seed {seed}, {encoding}: {outcome.wrong}")
                for finding in outcome.audit.findings[:4]:
                    print(f"    {finding.fault} {finding.slots} {finding.samples}: {finding.text[:200]}")
    print(f"{model}: {planted} planted, {planted - sum(wrong.values())} named; {last - first} clean, {false_alarms} "
          f"false alarms; wrong: {dict(wrong)}")
    return 1 if wrong or false_alarms else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
