"""Which use of the GPUs is the most economical? Splits of one box, simulated from rates that were measured or stated.

Ways to train a drafter from a target that needs its GPUs for itself:
    stream   E GPUs extract while the others train; nothing is stored, so every epoch extracts again
    keep     the same in the first epoch, but the states go to disk, too; then all GPUs train from there
    cache    all GPUs extract to disk, then all train from it: what the workbench does

Flows are steady, so a phase lasts as long as its slowest part needs: extracting, training, or the disk. Extraction
starts with loading the target; a new kind of work starts with loading, too. What is left idle is said as a share.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_lib.files import human_bytes
from dflash_lib.workbench.runs import RunError, load_record

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """extract_tokens_s: of one GPU (or CPU process) with the whole target; train_tokens_s: tokens of conversations that
    one of them trains on in a second; disk_write_mb_s and disk_read_mb_s: of the store's disk, shared by all; load_s:
    until the target is loaded; tensor_parallel_efficiency: what each GPU of a tensor-parallel group does, as a share of
    what it does alone; source: where they come from."""

    extract_tokens_s: float
    train_tokens_s: float
    disk_write_mb_s: float
    disk_read_mb_s: float
    load_s: float = 0.0
    tensor_parallel_efficiency: float = 0.7
    source: str = "stated"

    def __post_init__(self) -> None:
        for name in ("extract_tokens_s", "train_tokens_s", "disk_write_mb_s", "disk_read_mb_s",
                     "tensor_parallel_efficiency"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: a rate above 0 is needed, got {getattr(self, name)}")
        if not self.load_s >= 0:
            raise ValueError(f"load_s: seconds from 0 are needed, got {self.load_s}")


@dataclass(frozen=True, kw_only=True)
class Work:
    """num_tokens: of all conversations; epochs: how often each is trained on; bytes_per_token: in the store."""

    num_tokens: int
    epochs: int
    bytes_per_token: float

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.epochs < 1:
            raise ValueError(f"at least one token and one epoch are needed, got {self.num_tokens} and {self.epochs}")

    @property
    def store_bytes(self) -> float:
        return self.num_tokens * self.bytes_per_token


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a group of GPUs does from `start` to `end` (hours): "load", "extract", "train"; busy: share of the time."""

    work: str
    num_gpus: int
    start: float
    end: float
    busy: float


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """kind: "stream", "keep" or "cache"; of `num_gpus`, `num_extracting` extract in groups of `tensor_parallel` (in
    "cache" all of them)."""

    kind: str
    num_gpus: int
    num_extracting: int
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("stream", "keep", "cache"):
            raise ValueError(f"strategy {self.kind!r}: use stream, keep or cache")
        most = self.num_gpus if self.kind == "cache" else self.num_gpus - 1
        if not 1 <= self.num_extracting <= most or self.num_extracting % self.tensor_parallel:
            raise ValueError(f"{self.kind}: {self.num_extracting} of {self.num_gpus} GPUs cannot extract in groups of "
                             f"{self.tensor_parallel}" + ("" if self.kind == "cache" else " while others train"))

    @property
    def name(self) -> str:
        groups = f" (tensor parallel {self.tensor_parallel})" if self.tensor_parallel > 1 else ""
        if self.kind == "cache":
            return f"{self.num_gpus} extract{groups} to disk, then {self.num_gpus} train"
        split = f"{self.num_extracting} extract{groups} while {self.num_gpus - self.num_extracting} train"
        return split + (", every epoch" if self.kind == "stream" else f", then {self.num_gpus} train from disk")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """hours: from start to end; disk_bytes: for the store; starves: who waits for what, and how much of the time."""

    strategy: Strategy
    hours: float
    disk_bytes: float
    phases: tuple[Phase, ...]
    starves: str

    @property
    def gpu_hours(self) -> float:
        """Hours of all GPUs of the box: a GPU that waits is paid for, too."""
        return self.hours * self.strategy.num_gpus


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user has: bytes of disk, hours (None = no limit)."""

    disk_bytes: float | None = None
    hours: float | None = None

    def objection(self, outcome: Outcome) -> str:
        """Why an outcome is out of the question; "" when it is not."""
        found = []
        if self.disk_bytes is not None and outcome.disk_bytes > self.disk_bytes:
            found.append(f"{outcome.disk_bytes / 1e12:.3g} of {self.disk_bytes / 1e12:.3g} TB disk")
        if self.hours is not None and outcome.hours > self.hours:
            found.append(f"{outcome.hours:,.4g} of {self.hours:,.4g} hours")
        return ", ".join(found)


def simulate(strategy: Strategy, work: Work, rates: Rates) -> Outcome:
    """Hours, disk and idle shares of one strategy."""
    share = 1.0 if strategy.tensor_parallel == 1 else rates.tensor_parallel_efficiency
    extract = strategy.num_extracting * rates.extract_tokens_s * share
    write, read = (rate * 1e6 / work.bytes_per_token for rate in (rates.disk_write_mb_s, rates.disk_read_mb_s))
    load = rates.load_s / HOUR
    phases: list[Phase] = []
    said: list[str] = []
    now, epochs_left = 0.0, work.epochs
    if strategy.kind == "cache":
        now = _phase(phases, said, now, load, work.num_tokens, strategy.num_gpus,
                     {"extract": (strategy.num_extracting, extract), "writing": (0, write)})
    else:
        num_training = strategy.num_gpus - strategy.num_extracting
        flows = {"extract": (strategy.num_extracting, extract),
                 "train": (num_training, num_training * rates.train_tokens_s)}
        if strategy.kind == "keep":
            flows["writing"] = (0, write)
        passes = work.epochs if strategy.kind == "stream" else 1
        now = _phase(phases, said, now, load, work.num_tokens * passes, strategy.num_gpus, flows)
        epochs_left -= passes
    if epochs_left:
        now = _phase(phases, said, now, load, work.num_tokens * epochs_left, strategy.num_gpus,
                     {"train": (strategy.num_gpus, strategy.num_gpus * rates.train_tokens_s), "reading": (0, read)})
    return Outcome(strategy=strategy, hours=now, phases=tuple(phases),
                   starves="; ".join(dict.fromkeys(said)) or "nothing",
                   disk_bytes=0.0 if strategy.kind == "stream" else work.store_bytes)


def _phase(phases: list[Phase], said: list[str], now: float, load: float, num_tokens: float, num_gpus: int,
           flows: Mapping[str, tuple[int, float]]) -> float:
    """Adds a phase in which `num_tokens` pass through all `flows` (name -> GPUs, tokens/s) at once; returns its end."""
    slowest = min(flows, key=lambda name: flows[name][1])
    rate = flows[slowest][1]
    if load:
        phases.append(Phase(work="load", num_gpus=num_gpus, start=now, end=now + load, busy=1.0))
    begin, end = now + load, now + load + num_tokens / rate / HOUR
    for name, (gpus, own) in flows.items():
        if gpus:
            phases.append(Phase(work=name, num_gpus=gpus, start=begin, end=end, busy=rate / own))
            if rate < 0.995 * own:
                who = {"extract": "extracting GPUs", "train": "training GPUs"}[name]
                what = {"extract": "extraction", "train": "training"}.get(slowest, f"{slowest} of the disk")
                said.append(f"{who} wait for {what} {1 - rate / own:.0%} of the time")
    return end


def strategies(num_gpus: int, tensor_parallel: Iterable[int] = (1, 2, 4)) -> list[Strategy]:
    """Every split of a box, each kind and group size."""
    found = []
    for group in tensor_parallel:
        if group <= num_gpus and num_gpus % group == 0:
            found.append(Strategy(kind="cache", num_gpus=num_gpus, num_extracting=num_gpus, tensor_parallel=group))
        found += [Strategy(kind=kind, num_gpus=num_gpus, num_extracting=num, tensor_parallel=group)
                  for kind in ("stream", "keep") for num in range(group, num_gpus, group)]
    return found


def asked_for(num_gpus: int) -> dict[str, Strategy]:
    """The three that the project was born from: (A) half and half, (B) tensor parallel 2 beside the rest, (C) all to
    disk first; those that this number of GPUs allows."""
    found = {}
    if num_gpus >= 2:
        found["A"] = Strategy(kind="stream", num_gpus=num_gpus, num_extracting=num_gpus // 2)
    if num_gpus >= 3:
        found["B"] = Strategy(kind="stream", num_gpus=num_gpus, num_extracting=2, tensor_parallel=2)
    return found | {"C": Strategy(kind="cache", num_gpus=num_gpus, num_extracting=num_gpus)}


@dataclass(frozen=True, kw_only=True)
class GpuPlan:
    """outcomes by letter: A, B, C, and the best other split of each kind that streams; winner: the letter with the
    fewest GPU-hours within the limits (then the least disk), None when every one is out of the question."""

    work: Work
    rates: Rates
    limits: Limits
    outcomes: dict[str, Outcome]
    winner: str | None

    def table(self):
        """One row an outcome, as a pandas DataFrame of text."""
        import pandas as pd

        rows = [[letter, o.strategy.name, f"{o.hours:,.4g}", f"{o.gpu_hours:,.4g}", f"{o.disk_bytes / 1e12:,.3g}",
                 o.starves, "winner" if letter == self.winner else self.limits.objection(o) or "-"]
                for letter, o in self.outcomes.items()]
        return pd.DataFrame(rows, columns=["", "use of the GPUs", "hours", "GPU-hours", "disk (TB)", "who waits",
                                           "verdict"]).set_index("")

    def sentence(self) -> str:
        """The answer in words."""
        if self.winner is None:
            nearest = min(self.outcomes.values(), key=lambda o: o.gpu_hours)
            return (f"Nothing fits the limits; the cheapest would be {nearest.strategy.name}: "
                    f"{self.limits.objection(nearest)}.")
        best = self.outcomes[self.winner]
        return (f"{self.winner}: {best.strategy.name}: {best.hours:,.3g} hours, {best.gpu_hours:,.3g} GPU-hours, "
                f"{human_bytes(best.disk_bytes)} of disk.")


def plan_gpus(num_gpus: int, work: Work, rates: Rates, limits: Limits = Limits()) -> GpuPlan:
    """Simulates A, B, C and every other split; of the others the best of each kind is kept."""
    if num_gpus < 1:
        raise ValueError(f"num_gpus: at least 1 is needed, got {num_gpus}")
    outcomes = {letter: simulate(strategy, work, rates) for letter, strategy in asked_for(num_gpus).items()}
    known = [outcome.strategy for outcome in outcomes.values()]
    others = [simulate(s, work, rates) for s in strategies(num_gpus) if s not in known]
    for letter, kind in (("D", "stream"), ("E", "keep")):
        if of_kind := [o for o in others if o.strategy.kind == kind]:
            outcomes[letter] = min(of_kind, key=lambda o: (bool(limits.objection(o)), o.gpu_hours))
    fitting = [letter for letter, outcome in outcomes.items() if not limits.objection(outcome)]
    winner = min(fitting, key=lambda k: (round(outcomes[k].gpu_hours, 9), outcomes[k].disk_bytes)) if fitting else None
    return GpuPlan(work=work, rates=rates, limits=limits, outcomes=outcomes, winner=winner)


def epochs_table(num_gpus: int, work: Work, rates: Rates, limits: Limits, epochs: Iterable[int] = (1, 2, 3, 6, 10)):
    """GPU-hours of every strategy by epochs, and the winner, as a pandas DataFrame of text."""
    import pandas as pd

    plans = {n: plan_gpus(num_gpus, replace(work, epochs=n), rates, limits) for n in epochs}
    letters = list(next(iter(plans.values())).outcomes)
    rows = [[n, *(f"{plan.outcomes[k].gpu_hours:,.4g}" for k in letters), plan.winner or "none"]
            for n, plan in plans.items()]
    return pd.DataFrame(rows, columns=["epochs", *(f"{k} (GPU-hours)" for k in letters), "winner"]).set_index("epochs")


def measured_rates(run: Path | str, rates: Rates) -> Rates:
    """`rates` with those that a run measured in their place: of 04_extract and 06_train, per process.

    A notebook that has not run, or found its work done already, leaves the stated rate. Raises RunError for a folder
    that is no run.
    """
    run, found, named = Path(run), {}, []
    if not (run / "params.yaml").is_file():
        raise RunError(f"rates_from: {run}: no params.yaml, so this is not a run folder")
    for notebook, rate in (("04_extract", "extract_tokens_s"), ("06_train", "train_tokens_s")):
        results: dict[str, Any] = (load_record(run, notebook) or {}).get("results", {})
        if results.get("tokens_per_second"):
            found[rate] = results["tokens_per_second"] / results.get("num_workers", 1)
            named.append(notebook)
    return replace(rates, **found, source=f"measured in {run.name} ({', '.join(named)})") if named else rates
