"""Which samples are recomputed, and what may be said of the others."""

from collections.abc import Sequence
from math import ceil

import numpy as np

CONFIDENCE = 0.95


def choose_samples(lengths: Sequence[int], num_samples: int, seed: int) -> tuple[list[int], int]:
    """Indices to audit, ascending, and how many of them were drawn at random.

    The first and the last sample always (where `num_samples` has room); one drawn from the shorter half and one from
    the longer half; from 8 on a shortest and a longest one; the others drawn from what is left. lengths: tokens of each
    sample, -1 where it cannot be read (never chosen).
    """
    usable = [i for i, n in enumerate(lengths) if n > 0]
    if num_samples >= len(usable):
        return usable, len(usable)
    generator = np.random.default_rng(seed)
    several = [i for i in usable if lengths[i] > 1] or usable
    always = [usable[0], usable[-1]]
    if num_samples >= 8:
        always += [max(usable, key=lambda i: lengths[i]), min(several, key=lambda i: lengths[i])]
    chosen = list(dict.fromkeys(always))[:num_samples]
    num_always = len(chosen)
    by_length = sorted(set(several) - set(chosen), key=lambda i: (lengths[i], i))
    for half in (by_length[:len(by_length) // 2], by_length[len(by_length) // 2:]):
        if half and len(chosen) < num_samples:
            chosen.append(int(generator.choice(half)))
    rest = sorted(set(usable) - set(chosen))
    chosen += generator.choice(rest, num_samples - len(chosen), replace=False).tolist()
    return sorted(chosen), num_samples - num_always


def least_seen(num_others: int, num_drawn: int) -> int:
    """The smallest number of faulty samples among `num_others` of which `num_drawn` random ones miss every one with at
    most 1 - CONFIDENCE: (1 - share) ** num_drawn, which drawing without putting back, and from halves, only lowers."""
    share = 1 - (1 - CONFIDENCE) ** (1 / num_drawn)
    return min(num_others, ceil(num_others * share))


def coverage(num_samples: int, num_audited: int, num_drawn: int) -> str:
    """What the random choice allows to say about samples that were not recomputed."""
    if num_audited >= num_samples:
        return f"every one of the {num_samples} samples was recomputed"
    if num_drawn == 0:
        return (f"{num_audited} of {num_samples} samples were recomputed, none of them drawn at random: nothing can be "
                "said of the others")
    least = least_seen(num_samples - (num_audited - num_drawn), num_drawn)
    picked = num_audited - num_drawn
    names = "the first and the last" if picked <= 2 else "the first, the last, the longest and the shortest"
    how = f", {num_drawn} drawn at random" + (f" and {picked} picked ({names})" if picked else "")
    return (f"{num_audited} of {num_samples} samples were recomputed{how}: a fault in {least} or more samples "
            f"({100 * least / num_samples:.2g} %) would have been seen with at least {100 * CONFIDENCE:.0f} % "
            "probability, a rarer one may have been missed")
