"""Every form of a hidden-state store, with what it costs: bytes, error, and the speed of writing and reading.

A form is an encoding of the aux states and a form of the last state (`ExtractionOptions`). All stores come from one
pass of the target, so whatever differs behind them is the form's doing.
"""

import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.drafter.dataset import seeded_generator
from dflash_lib.hidden_states.encode import encode_sample, predicting_rows
from dflash_lib.hidden_states.extraction import plan_extraction
from dflash_lib.hidden_states.parity import relative_errors
from dflash_lib.hidden_states.plan import PLAN_FILE, ExtractionOptions, ExtractionPlan, describe_differences
from dflash_lib.hidden_states.schema import ENCODINGS, LAST_STATES, StoreError, get_encoding, shard_name, to_raw
from dflash_lib.hidden_states.shards import ShardWriter
from dflash_lib.hidden_states.store import HiddenStateStore, StoredSample, missing_shards
from dflash_lib.progress import Progress
from dflash_lib.target.capture import CapturedSample, capture_batch
from dflash_lib.target.loading import Target, quiet_transformers
from dflash_lib.workbench.variants import Outcome

NUM_REPEATS = 3


@dataclass(frozen=True)
class Form:
    """encoding, last_state, topk: as in `ExtractionOptions`."""

    encoding: str
    last_state: str
    topk: int = 0

    @property
    def name(self) -> str:
        """Such as "bf16+zstd, last supervised" or "fp8, last top 32"."""
        return f"{self.encoding}, last {f'top {self.topk}' if self.last_state == 'topk' else self.last_state}"

    @property
    def values(self) -> tuple[bool, str, int]:
        """Equal for forms that hold the same values for a trainer: zstd loses nothing, and rows that predict no
        supervised token are read by no loss."""
        return (get_encoding(self.encoding).fp8, "supervised" if self.last_state == "all" else self.last_state,
                self.topk)


@dataclass(frozen=True)
class FormCost:
    """bytes_per_token: of the whole store's shard files. write_s, read_s: seconds for measured_tokens in files of
    measured_bytes, one thread, files in the system's cache: encoding, checksums, compression, writing, fsync, rename;
    reading and decoding every sample in a random order. aux_error, last_error: |stored - captured| / |captured| of the
    median token behind position 0, the worst layer's, and of the median stored row of the last state, NaN without one;
    covered: the target's probability within the top k in the mean row, NaN for other forms."""

    form: Form
    store: Path
    bytes_per_token: float
    measured_bytes: int
    measured_tokens: int
    write_s: float
    read_s: float
    aux_error: float
    last_error: float
    covered: float


def all_forms(topk: int) -> list[Form]:
    """Every encoding with every form of the last state."""
    return [Form(encoding, last_state, topk if last_state == "topk" else 0)
            for encoding in ENCODINGS for last_state in LAST_STATES]


def forms_to_train(forms: Sequence[Form]) -> list[Form]:
    """The first of the forms that hold the same values."""
    return list({form.values: form for form in reversed(forms)}.values())[::-1]


def same_values(stores: Sequence[Path], indices: Sequence[int]) -> bool:
    """Whether samples read back from all of these stores with the same values, bit for bit, as far as training reads
    them: the aux states, and the last state (or the top-k logits) at rows that predict a supervised token."""
    opened = [HiddenStateStore.open(store) for store in stores]
    return all(_what_training_reads(opened[0].read(i)) == _what_training_reads(other.read(i))
               for i in indices for other in opened[1:])


def _what_training_reads(sample: StoredSample) -> list[bytes]:
    last = sample.last_hidden_state_prenorm
    if last is not None and sample.last_rows is None:
        last = last[torch.from_numpy(predicting_rows(sample.loss_mask))]
    found = [sample.aux_hidden_states, last, *(vars(sample.top_logits).values() if sample.top_logits else ())]
    return [to_raw(values).tobytes() for values in found if values is not None]


def forms_table(costs: Sequence[FormCost], outcomes: Sequence[Outcome]):
    """A row a form, as a pandas DataFrame of text; outcomes: of `forms_to_train`'s, by the form's name, the first of
    them the one that the others are compared with."""
    import pandas as pd

    trained = {form.values: form.name for form in forms_to_train([cost.form for cost in costs])}
    by_name = {outcome.name: outcome for outcome in outcomes}
    rows = []
    for cost in costs:
        outcome = by_name.get(trained[cost.form.values])
        last = f"{cost.covered:.1%} covered" if np.isfinite(cost.covered) else (
            f"{cost.last_error:.2g}" if np.isfinite(cost.last_error) else "-")
        row = [cost.form.encoding, cost.form.name.partition("last ")[2], f"{cost.bytes_per_token:,.0f}",
               f"{costs[0].bytes_per_token / cost.bytes_per_token:.2f}",
               f"{cost.measured_bytes / 1e6 / cost.write_s:,.0f}", f"{cost.measured_bytes / 1e6 / cost.read_s:,.0f}",
               f"{cost.measured_tokens / cost.read_s / 1000:,.0f}", f"{cost.aux_error:.2g}", last]
        if outcome is None:
            row += ["not trained", "", ""]
        else:
            same = "" if outcome.name == cost.form.name else " (same values)"
            row += [f"{outcome.acceptance}{same}",
                    *(("", "") if outcome is outcomes[0] else (
                        outcome.ahead_of(outcomes[0]).signed(), outcome.ahead_by_seed(outcomes[0]).signed()))]
        rows.append(row)
    return pd.DataFrame(rows, columns=[
        "aux states", "last state", "bytes a token", "times smaller", "write MB/s", "read MB/s", "read k tokens/s",
        "aux error", "last state's error", "acceptance length (95 %)", "difference (prompts)", "difference (seeds)"]
        ).set_index(["aux states", "last state"])


def plan_forms(target: Target, prepared: PreparedRows, forms: Sequence[Form], options: ExtractionOptions
               ) -> list[ExtractionPlan]:
    """A plan for each form; all have the batches of `options`."""
    return [plan_extraction(target.path, prepared, replace(options, encoding=form.encoding, last_state=form.last_state,
                                                           topk=form.topk), target.report.dtype) for form in forms]


@quiet_transformers()  # that fast kernels are missing is in the load report
@torch.no_grad()
def write_forms(target: Target, prepared: PreparedRows, forms: Sequence[Form], options: ExtractionOptions,
                folder: Path) -> list[Path]:
    """Writes the store of every form into a folder of its own below `folder`, as far as shards are missing there, from
    one pass over the rows; returns these folders. Raises StoreError for a folder that was begun with other settings."""
    plans = plan_forms(target, prepared, forms, options)
    stores = [folder / form.name.replace(", ", "-").replace(" ", "-") for form in forms]
    todo: set[int] = set()
    for store, plan in zip(stores, plans, strict=True):
        if (store / PLAN_FILE).exists():
            found = ExtractionPlan.load(store).differences(plan)
            if found:
                raise StoreError(f"{store}: begun with other settings:\n"
                                 f"{describe_differences(found, 'the store has', 'asked for')}\nRemove {folder}, or "
                                 "choose another study_dir.")
        store.mkdir(parents=True, exist_ok=True)
        plan.save(store)
        todo.update(missing_shards(store, plan)[0])
    total = sum(plans[0].shard_tokens)
    with Progress(total, "forms", "tokens", start=total - sum(plans[0].shard_tokens[i] for i in todo)) as progress:
        for shard in sorted(todo):
            masks = [prepared.row(index)[1] for index in plans[0].samples_of(shard)]
            with ExitStack() as stack:
                writers = [stack.enter_context(ShardWriter(store, plan, shard, masks))
                           for store, plan in zip(stores, plans, strict=True)]
                for index, sample in _capture(target, prepared, plans[0], [shard]):
                    ids, mask = prepared.row(index)
                    for writer, plan in zip(writers, plans, strict=True):
                        writer.add(index, ids, mask, encode_sample(target, plan, mask, sample))
                    progress.update(len(ids))
    return stores


def _capture(target: Target, prepared: PreparedRows, plan: ExtractionPlan, shards: Sequence[int]):
    """Yields (sample index, captured sample) of whole shards in the plan's order."""
    for batch in (batch for shard in shards for batch in plan.shards[shard]):
        captured = capture_batch(target, [prepared.row(index)[0] for index in batch], plan.target_layer_ids)
        yield from zip(batch, captured, strict=True)


@quiet_transformers()
@torch.no_grad()
def measure_forms(target: Target, prepared: PreparedRows, forms: Sequence[Form], options: ExtractionOptions,
                  stores: Sequence[Path], num_tokens: int = 20_000) -> list[FormCost]:
    """Costs of stores that `write_forms` wrote, from the shards in the middle that hold about `num_tokens` tokens.

    Writing and reading are measured `NUM_REPEATS` times, the forms in turn, and the median counts.
    """
    plans = plan_forms(target, prepared, forms, options)
    shards = _middle_shards(plans[0], num_tokens)
    captured = dict(_capture(target, prepared, plans[0], shards))
    writing, reading = np.zeros((2, len(forms), NUM_REPEATS))
    scratch = Path(tempfile.mkdtemp(dir=stores[0].parent, prefix=".measured-"))
    try:
        for repeat in range(NUM_REPEATS):
            for number, (store, plan) in enumerate(zip(stores, plans, strict=True)):
                writing[number, repeat] = _write_again(target, prepared, plan, shards, captured, scratch)
                reading[number, repeat] = _read(store, list(captured))
    finally:
        shutil.rmtree(scratch)
    costs = []
    for number, (form, store, plan) in enumerate(zip(forms, stores, plans, strict=True)):
        sizes = [(store / shard_name(i)).stat().st_size for i in range(len(plan.shards))]
        with HiddenStateStore.open(store) as opened:
            held = set(opened.sample_indices)
            errors = [_errors(opened.read(index), sample) for index, sample in captured.items() if index in held]
        aux, last, covered = (np.concatenate(parts) for parts in zip(*errors, strict=True))
        costs.append(FormCost(
            form, store, sum(sizes) / plan.num_tokens, sum(sizes[i] for i in shards),
            sum(plan.shard_tokens[i] for i in shards), float(np.median(writing[number])),
            float(np.median(reading[number])), float(np.median(aux, axis=0).max()),
            float(np.median(last)) if len(last) else float("nan"),
            float(covered.mean()) if len(covered) else float("nan")))
    return costs


def _middle_shards(plan: ExtractionPlan, num_tokens: int) -> list[int]:
    """Neighbouring shards around the middle of the plan (its samples are sorted by length) with that many tokens."""
    first = last = len(plan.shards) // 2
    while sum(plan.shard_tokens[first:last + 1]) < num_tokens and (first > 0 or last < len(plan.shards) - 1):
        first, last = max(0, first - 1), min(len(plan.shards) - 1, last + 1)
    return list(range(first, last + 1))


def _write_again(target: Target, prepared: PreparedRows, plan: ExtractionPlan, shards: Sequence[int],
                 captured: dict[int, CapturedSample], folder: Path) -> float:
    """Seconds to write the shards anew into `folder`."""
    began = time.monotonic()
    for shard in shards:
        rows = [(index, *prepared.row(index)) for index in plan.samples_of(shard)]
        with ShardWriter(folder, plan, shard, [mask for _, _, mask in rows]) as writer:
            for index, ids, mask in rows:
                writer.add(index, ids, mask, encode_sample(target, plan, mask, captured[index]))
    return time.monotonic() - began


def _read(store: Path, indices: Sequence[int]) -> float:
    """Seconds to read samples in a random order, as training does."""
    with HiddenStateStore.open(store) as opened:
        held = set(opened.sample_indices)
        indices = [index for index in indices if index in held]
        order = torch.randperm(len(indices), generator=seeded_generator(0)).tolist()
        opened.read(indices[0])
        began = time.monotonic()
        for i in order:
            opened.read(indices[i])
        return time.monotonic() - began


def _errors(stored: StoredSample, captured: CapturedSample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of one sample: aux errors [T - 1, L], errors of the stored rows of the last state [R], probability within the top
    k [R]; empty where there is no such thing."""
    none = np.zeros(0)
    aux = relative_errors(stored.aux_hidden_states, captured.aux_hidden_states.cpu())[1:].numpy()
    if stored.top_logits is not None:
        top = stored.top_logits
        return aux, none, (top.logits - top.logsumexp[:, None]).exp().sum(dim=-1).numpy()
    if stored.last_hidden_state_prenorm is None:
        return aux, none, none
    last = captured.last_hidden_state_prenorm.cpu()
    rows = slice(None) if stored.last_rows is None else stored.last_rows
    return aux, relative_errors(stored.last_hidden_state_prenorm, last[rows]).numpy(), none
