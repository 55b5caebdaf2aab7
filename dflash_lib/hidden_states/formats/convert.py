"""Converts hidden states of any layout into a store or into speculators' layout, sample by sample, and verifies.

The destination's `conversion.json` is written first: what it is made from and how. The same command goes on where a
kill stopped it, because every file of the destination is whole or absent; at the end all of it is read back and
compared with the source bit for bit. From a store to speculators the plan and the notes of quarantined samples travel
in that JSON, and the way back makes the same store, byte for byte. speculators itself does not read it: through its
hands they are lost, and a store made from its files needs to be told the target.

What cannot be: a last state behind the norm does not become one before it (`drop_last` leaves it out), and fp8 does
not get its lost bits back: a store made from it says so in its plan.
"""

import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflash_lib.files import canonical_json, read_json, write_text
from dflash_lib.hidden_states.formats.destinations import Destination, SpeculatorsDestination, StoreDestination
from dflash_lib.hidden_states.formats.detect import CONVERSION_FILE
from dflash_lib.hidden_states.formats.hdf5 import StoreSource
from dflash_lib.hidden_states.formats.reading import Samples
from dflash_lib.hidden_states.formats.source import POST_NORM, PRE_NORM
from dflash_lib.hidden_states.formats.survey import survey
from dflash_lib.hidden_states.plan import PLAN_FILE, ExtractionOptions, ExtractionPlan, make_plan
from dflash_lib.hidden_states.schema import ENCODINGS, StoreError, get_encoding
from dflash_lib.locks import LOCK_NAME, folder_lock
from dflash_lib.progress import Progress
from dflash_lib.target.capture import check_layer_ids
from dflash_lib.target.loading import read_config, target_identity

SPECULATORS_ENCODINGS = ("bf16", "fp8")


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """to: "store" or "speculators". encoding: of a store one of ENCODINGS, of speculators bf16 or fp8 ("" = the
    source's where it has such a one, else bf16). target: folder or hub id of the model that the states are of, needed
    for a store whenever no plan comes with them; dtype: that it ran in. last_state: of a store, "all", "supervised" or
    "none" as in `ExtractionOptions` ("" = what the source has before the norm, in its form). samples_per_shard: of a
    store that is planned here. with_states=False: to speculators, write its Arrow data set alone, for training straight
    from a store."""

    to: str = "store"
    encoding: str = ""
    target: str | None = None
    dtype: str = "float32"
    last_state: str = ""
    samples_per_shard: int = 64
    with_states: bool = True

    def __post_init__(self) -> None:
        known = {"store": tuple(ENCODINGS), "speculators": SPECULATORS_ENCODINGS}
        if self.to not in known:
            raise StoreError(f"to: {self.to!r}; states are written as {' or '.join(known)}")
        if self.encoding and self.encoding not in known[self.to]:
            raise StoreError(f"encoding: {self.encoding!r} is not one of a {self.to}'s here: "
                             f"{', '.join(known[self.to])}")
        if self.last_state and self.to == "speculators":
            raise StoreError("last_state: speculators' layout needs every token's; only a store can do with less")
        if self.last_state not in ("", "all", "supervised", "none"):
            raise StoreError(f"last_state: {self.last_state!r}; a conversion writes it at all tokens, at supervised "
                             "ones or at none")
        if not self.with_states and self.to != "speculators":
            raise StoreError("rows only: that is a part of speculators' layout; a store has no use for it")


@dataclass(frozen=True)
class ConversionReport:
    """num_samples of the destination, num_written: files or shards written now; notes: what there is to know, as lines;
    seconds: of writing and of verifying."""

    num_samples: int
    num_written: int
    notes: list[str]
    convert_seconds: float
    verify_seconds: float


def convert(source: Samples, destination: Path | str, options: ConvertOptions, show: bool = True) -> ConversionReport:
    """Writes `source` into the folder `destination`, goes on with what an earlier call left, and verifies all of it.

    show: print progress. Raises StoreError for a source that is not whole or lacks what the destination needs, a
    destination that belongs to something else or was begun in another way, one that cannot be written, and a
    difference found at the end; TargetError for a target that cannot be read.
    """
    destination = Path(destination)
    _check_whole(source)
    encoding = options.encoding or _default_encoding(source, options.to)
    notes = _check_source(source, options, encoding)
    settings = {**asdict(options), "encoding": encoding, "source": source.identity(),
                "target_layer_ids": source.target_layer_ids}
    carried, quarantined = _carried(source)
    with _claimed(source, destination, settings):
        head: dict[str, Any] = {"settings": settings}
        if options.to == "store":
            plan = _store_plan(source, destination, options, encoding, carried, quarantined, show)
            indices = [index for index in range(plan.num_samples) if index not in quarantined]
            target: Destination = StoreDestination(source, destination, plan, dict(zip(indices, range(len(source)),
                                                                                    strict=True)), quarantined)
        else:
            target = SpeculatorsDestination(source, destination, encoding, _num_layers(source, options, carried),
                                            options.with_states, carried and carried.num_tokens)
            if carried is not None:
                head |= {"plan": asdict(_marked(carried, source)), "quarantined": sorted(quarantined.items())}
        try:
            write_text(destination / CONVERSION_FILE, canonical_json(head) + "\n")
            if options.to == "store" and not (destination / PLAN_FILE).exists():
                plan.save(destination)
        except OSError as error:
            raise StoreError(f"{destination}: cannot be written ({error}). Name another folder.") from error
        return _run(target, notes, show)


def _run(target: Destination, notes: list[str], show: bool) -> ConversionReport:
    began, stream = time.monotonic(), None if show else io.StringIO()
    todo = target.todo()
    total = sum(map(target.size, target.units))
    with Progress(total, "convert", "samples", start=total - sum(map(target.size, todo)), stream=stream) as progress:
        for unit in todo:
            target.write(unit)
            progress.update(target.size(unit))
        notes = [*notes, *target.finish()]
    converted = time.monotonic()
    with Progress(total, "verify", "samples", stream=stream) as progress:
        for unit in target.units:
            target.check(unit)
            progress.update(target.size(unit))
    return ConversionReport(total, len(todo), notes, converted - began, time.monotonic() - converted)


def _default_encoding(source: Samples, to: str) -> str:
    known: Sequence[str] = tuple(ENCODINGS) if to == "store" else ("bf16",)
    plan, _ = _carried(source)
    stored = plan.encoding if plan is not None else source.encoding
    return stored if stored in known else "bf16"


def _check_whole(source: Samples) -> None:
    for names, what in ((source.missing, "have no file, though they ought to be there"),
                        (source.extra, "belong to no row of the data set")):
        if names:
            raise StoreError(f"{source.path}: {len(names)} samples {what}: {', '.join(names[:3])}"
                             f"{', ...' if len(names) > 3 else ''}. Extract them again, or put the folder in order.")


def _held_last(source: Samples) -> str:
    """The form in which a source has the last state before the norm, as `ExtractionOptions` names it."""
    if isinstance(source, StoreSource):
        return source.plan.last_state
    return "all" if source.last == PRE_NORM else "none"


def _check_source(source: Samples, options: ConvertOptions, encoding: str) -> list[str]:
    """What will be lost or changed, as lines. Raises StoreError for a last state that the destination cannot have."""
    notes = []
    normed = "its last state is behind the final norm, which cannot be undone"
    if options.to == "speculators" and options.with_states and source.last != PRE_NORM:
        why = normed if source.last else f"its last state is stored {source.last_elsewhere}" if (
            source.last_elsewhere) else "it holds no last state"
        raise StoreError(f"{source.path}: {why}; speculators' layout needs every token's, before the norm. "
                         + ("Convert it into a store (--to store), or extract anew." if source.last else
                            "Extract anew, in bf16 with last_state: all."))
    has, wanted = _held_last(source), options.last_state
    if options.to == "store" and wanted != "none" and source.last == POST_NORM:
        raise StoreError(f"{source.path}: {normed}; a store holds the one before it. --last-state none leaves it out: "
                         "enough for cross-entropy, not for a KL loss.")
    if options.to == "store" and wanted not in ("", "none", has) and (has, wanted) != ("all", "supervised"):
        held = source.last_elsewhere and f"stored {source.last_elsewhere}" or "not stored"
        raise StoreError(f"{source.path}: its last state is {held}; --last-state {wanted} cannot be made of that. "
                         "Leave the option out to keep what there is, or take none.")
    if options.to == "store" and (has if wanted == "" else wanted) == "none":
        why = " (the source's, behind the norm, was left out)" if source.last == POST_NORM else ""
        notes.append(f"the store has no last state{why}: no KL loss can be trained from it")
    if options.to == "store" and encoding.startswith("fp8") and source.encoding not in ("fp8", "fp8+zstd"):
        notes.append("fp8 keeps 3 mantissa bits of the tapped layers' states")
    if source.encoding in ("fp32", "fp64", "fp16"):
        notes.append(f"{source.encoding} was rounded to bf16")
    if source.encoding.startswith("fp8") and not encoding.startswith("fp8"):
        notes.append("the source is fp8: the states are what is left of them"
                     + (", the last one included" if source.last else ""))
    if options.to == "speculators" and encoding == "fp8" and source.encoding != "fp8":
        notes.append("fp8 keeps 3 mantissa bits, of the last state too: the way back gives rounded states")
    return notes


def _carried(source: Samples) -> tuple[ExtractionPlan | None, dict[int, str]]:
    """The plan that comes with a source, and the samples that it names and the source left out, with reasons."""
    plan = getattr(source, "plan", None)
    if plan is not None:
        return plan, {entry["sample_index"]: entry["reason"] for content in source.store.shards.values()
                      for entry in json.loads(content.quarantined)}
    conversion = getattr(source, "conversion", None) or {}
    if "plan" not in conversion:
        return None, {}
    try:
        plan = ExtractionPlan.from_dict(conversion["plan"])
        quarantined = {int(index): str(reason) for index, reason in conversion["quarantined"]}
    except (TypeError, KeyError, ValueError) as error:
        raise StoreError(f"{source.path}: its {CONVERSION_FILE} is damaged ({error}). Without that file, give "
                         "--target and --target-layer-ids.") from error
    if plan.num_samples != len(source) + len(quarantined):
        raise StoreError(f"{source.path}: {len(source)} samples, but its {CONVERSION_FILE} speaks of "
                         f"{plan.num_samples - len(quarantined)}. Files were added or removed since: without that "
                         "file, give --target and --target-layer-ids.")
    return plan, quarantined


def _store_plan(source: Samples, destination: Path, options: ConvertOptions, encoding: str,
                carried: ExtractionPlan | None, quarantined: dict[int, str], show: bool) -> ExtractionPlan:
    """The plan of the store to write: the one that an earlier call wrote, the source's own, or a new one."""
    if (destination / PLAN_FILE).exists():
        return ExtractionPlan.load(destination)
    last_state = options.last_state or _held_last(source)
    if carried is None and options.target is None:
        raise StoreError(f"{source.path}: nothing here says of which model these states are, and a store must: give "
                         "--target MODEL")
    identity = None if options.target is None else target_identity(options.target, options.dtype)
    if carried is not None:
        wrong = [key for key in ("weights", "config", "tokenizer")
                 if identity is not None and identity[key] != carried.target[key]]
        if wrong:
            raise StoreError(f"{source.path}: made with another target than {options.target} ({', '.join(wrong)} "
                             "differ)")
        if source.target_layer_ids != carried.target_layer_ids:
            raise StoreError(f"{source.path}: its plan says layers {carried.target_layer_ids}, not "
                             f"{source.target_layer_ids}")
        topk = carried.topk if last_state == "topk" else 0
        return _marked(replace(carried, encoding=encoding, last_state=last_state, topk=topk), source)
    if source.target_layer_ids is None:
        raise StoreError(f"{source.path}: the files do not say which layers they hold: give --target-layer-ids (ours: "
                         "id k is the output of layer k). `audit` finds them.")
    config = read_config(options.target).get_text_config()
    check_layer_ids(source.target_layer_ids, config.num_hidden_layers)
    width = source.probe().states.shape[2]
    if width != config.hidden_size:
        raise StoreError(f"{source.path}: states {width} wide, but {options.target} has hidden size "
                         f"{config.hidden_size}. Is it another model, or are the layers cut up wrongly "
                         "(--target-layer-ids, --hidden-size)?")
    with Progress(len(source), "survey", "samples", stream=None if show else io.StringIO()) as progress:
        rows = survey(source, identity["tokenizer"], progress)
    plan = make_plan(identity, config, rows, ExtractionOptions(
        target_layer_ids=source.target_layer_ids, last_state=last_state, encoding=encoding,
        samples_per_shard=options.samples_per_shard))
    return _marked(plan, source)


def _marked(plan: ExtractionPlan, source: Samples) -> ExtractionPlan:
    """The plan, with where the states come from unless they are as they were extracted under it: states that were fp8
    are not, and fp8 of rounded states is not that of the target's own."""
    same = isinstance(source, StoreSource) and source.fp8 == get_encoding(plan.encoding).fp8
    back = getattr(source, "conversion", None) and source.encoding == "bf16" and not get_encoding(plan.encoding).fp8
    if same or back:
        return plan
    return replace(plan, data={**plan.data, "converted_from": f"{source.format} {source.encoding}"})


def _num_layers(source: Samples, options: ConvertOptions, carried: ExtractionPlan | None) -> int | None:
    if carried is not None:
        return carried.num_hidden_layers
    if options.target is not None:
        return read_config(options.target).get_text_config().num_hidden_layers
    return getattr(source, "num_hidden_layers", None)


@contextmanager
def _claimed(source: Samples, destination: Path, settings: dict[str, Any]) -> Iterator[None]:
    """The destination, made if need be, for this process alone. Raises StoreError when it is not this conversion's,
    Locked while another process works there."""
    here, there = source.path.resolve(), destination.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise StoreError(f"{destination}: source and destination lie in each other; name another folder")
    if destination.exists() and not destination.is_dir():
        raise StoreError(f"{destination}: a file; name a folder")
    with ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(destination, "conversion"))
        except OSError as error:
            raise StoreError(f"{destination}: cannot be written ({error}). Name another folder.") from error
        held = {name for name in os.listdir(destination) if not name.startswith(LOCK_NAME)}
        held -= {f".{CONVERSION_FILE}.partial"}
        if held and CONVERSION_FILE not in held:
            raise StoreError(f"{destination}: holds something else ({min(held)}); it is left alone. Name an empty or a "
                             "new folder.")
        if held:
            before = read_json(destination / CONVERSION_FILE).get("settings", {})
            now = json.loads(canonical_json(settings))
            changed = [f"  {key}: then {json.dumps(before.get(key))}, now {json.dumps(now.get(key))}"
                       for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
            if changed:
                raise StoreError(f"{destination}: begun as another conversion:\n" + "\n".join(changed)
                                 + "\nName another folder, or remove this one.")
        yield
