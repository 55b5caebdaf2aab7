"""Which samples are recomputed, and what may be said of the others."""

from collections.abc import Sequence
from math import lgamma

import numpy as np

CONFIDENCE = 0.95


def choose_samples(lengths: Sequence[int], num_samples: int, seed: int) -> tuple[list[int], int]:
    """Indices to audit, ascending, and how many of them were drawn at random.

    First, last, a shortest and a longest sample always (where `num_samples` has room), the others drawn without
    replacement. lengths: tokens of each sample, -1 where it cannot be read (never chosen).
    """
    usable = [i for i, n in enumerate(lengths) if n > 0]
    if num_samples >= len(usable):
        return usable, len(usable)
    several = [i for i in usable if lengths[i] > 1] or usable
    always = [usable[0], usable[-1], max(usable, key=lambda i: lengths[i]), min(several, key=lambda i: lengths[i])]
    chosen = list(dict.fromkeys(always))[:num_samples]
    rest = sorted(set(usable) - set(chosen))
    drawn = np.random.default_rng(seed).choice(rest, num_samples - len(chosen), replace=False).tolist()
    return sorted([*chosen, *drawn]), len(drawn)


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def least_seen(num_others: int, num_drawn: int) -> int:
    """The smallest number of faulty samples among `num_others` of which at least one is among `num_drawn` random ones
    with CONFIDENCE (hypergeometric, exact)."""
    low, high = 1, num_others  # that many are always seen, since num_drawn >= 1
    while low < high:
        middle = (low + high) // 2
        unseen = num_others - middle
        missed = -np.inf if unseen < num_drawn else _log_choose(unseen, num_drawn) - _log_choose(num_others, num_drawn)
        low, high = (low, middle) if missed <= np.log(1 - CONFIDENCE) else (middle + 1, high)
    return low


def coverage(num_samples: int, num_audited: int, num_drawn: int) -> str:
    """What the random choice allows to say about samples that were not recomputed."""
    if num_audited >= num_samples:
        return f"every one of the {num_samples} samples was recomputed"
    if num_drawn == 0:
        return (f"{num_audited} of {num_samples} samples were recomputed, none of them drawn at random: nothing can be "
                "said of the others")
    least = least_seen(num_samples - (num_audited - num_drawn), num_drawn)
    return (f"{num_audited} of {num_samples} samples were recomputed: a fault in {least} or more samples "
            f"({100 * least / num_samples:.2g} %) would have been seen with {100 * CONFIDENCE:.0f} % probability, a "
            "rarer one may have been missed")
