"""`python -m dflash_lib audit`: what was found as text, and the commands that put it right."""

import shlex
from collections.abc import Sequence
from dataclasses import replace

from dflash_lib.hidden_states.audit import faults
from dflash_lib.hidden_states.audit.auditing import audit_states
from dflash_lib.hidden_states.audit.faults import Finding
from dflash_lib.hidden_states.audit.repair import RepairedSource
from dflash_lib.hidden_states.audit.result import Audit
from dflash_lib.hidden_states.formats.convert import ConvertOptions, convert
from dflash_lib.hidden_states.formats.detect import detect_formats, open_states
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.progress import Progress
from dflash_lib.target.loading import find_target, load_target, read_config


def audit_text(audit: Audit, command: Sequence[str] = ()) -> str:
    """Verdict, table, findings, what to do. command: the audit's own words, such as ["audit", "states", "--target",
    "MODEL"], which a repair repeats."""
    lines = [audit.verdict]
    if audit.slots:
        lines.append("")
        rows = audit.rows()
        shown = {name: [_cell(row[name]) for row in rows] for name in rows[0]}
        widths = {name: max(len(name), *map(len, cells)) for name, cells in shown.items()}
        lines.append("  ".join(name.ljust(widths[name]) for name in shown))
        lines += ["  ".join(shown[name][i].ljust(widths[name]) for name in shown).rstrip() for i in range(len(rows))]
        lines += ["", f"Distances are relative, per token, position 0 apart. {audit.basis}",
                  "The limits are fp8's: nothing finer than its rounding can be seen." if audit.coarse else
                  f"The limits are those of states that were computed in {audit.level}."]
        lines += [audit.remark] if audit.remark else []
    for finding in audit.findings:
        lines += ["", f"{finding.fault.upper()}: {finding.text}"]
    if audit.findings:
        lines += ["", *advice(audit, command)]
    return "\n".join(lines)


def _cell(value) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def advice(audit: Audit, command: Sequence[str] = ()) -> list[str]:
    """What to do, as lines; commands as they are typed."""
    if not audit.audited and faults.WRONG_SIZE in audit.faults:
        stated = f" The store says that its states are of {audit.stated_target}." if audit.stated_target else ""
        return [f"Check --target: its hidden size is not that of the states, so none could be recomputed.{stated}"]
    lines = []
    words = ["python", "-m", "dflash_lib", *command]
    partial = len(audit.audited) < audit.num_samples
    if partial and audit.about_states and (audit.extract_again or audit.repair and audit.repair.drop):
        lines += ["Only recomputing every sample tells which ones are wrong:",
                  f"    {shlex.join([*words, '--samples', str(audit.num_samples)])}"]
    if audit.repair is not None:
        unseen = audit.num_samples - len(audit.audited) - len(set(audit.repair.drop) - set(audit.audited))
        kept = len(set(audit.audited) - set(audit.repair.drop))
        lines.append(f"The repair was tried on the {kept} recomputed samples that it keeps: they are right afterwards."
                     + (f" That the {unseen} others are like them is assumed: audit the result." if unseen > 0 else ""))
        lines += ["A repair is possible. It " + "; ".join(audit.repair.describe()) + ":",
                  f"    {shlex.join([*words, '--samples', str(max(1, len(audit.audited))), '--repair', 'NEW_FOLDER'])}"]
    else:
        lines.append(f"No repair: {audit.no_repair}")
    again = audit.extract_again
    if again:
        lines.append(f"To be extracted again, as far as recomputed: {len(again)} samples: {', '.join(again[:12])}"
                     f"{', ...' if len(again) > 12 else ''}")
    return lines


def repeated(options) -> list[str]:
    """The options that a second call has to repeat, as words."""
    words = ["audit", str(options.states), "--target", str(options.target)]
    for name, value in (("--from", options.format), ("--hidden-size", options.hidden_size),
                        ("--dataset", options.dataset), ("--computed-in", options.computed_in)):
        if value is not None:
            words += [name, str(value)]
    if options.target_layer_ids is not None:
        words += ["--target-layer-ids", *map(str, options.target_layer_ids)]
    for name, value, usual in (("--dtype", options.dtype, "float32"), ("--device", options.device, "cpu"),
                               ("--seed", options.seed, 0), ("--scan", options.scan, "all")):
        if value != usual:
            words += [name, str(value)]
    return words


def run_audit(options) -> Audit:
    """Audits a folder as the command's options say, prints what was found, and writes the repaired states if asked to.

    Raises StoreError for a folder without states, when a repair is asked for that is not possible, and what loading a
    target raises.
    """
    config = read_config(find_target(options.target)).get_text_config()
    source = open_states(options.states, options.format, target_layer_ids=options.target_layer_ids,
                         hidden_size=options.hidden_size or _width(options, config), dataset=options.dataset)
    print(source.describe())
    if options.samples < 1:
        raise StoreError(f"--samples {options.samples}: at least one has to be recomputed")
    target = load_target(options.target, options.dtype, options.device)
    stated, computed_in = stated_identity(source), options.computed_in
    if computed_in is None and stated is not None and stated["dtype"] == options.dtype == "float32":
        computed_in = "float32"
    with Progress(min(options.samples, len(source)), "audit", "samples") as progress:
        audit = audit_states(source, target, options.samples, options.seed, layer_ids=options.target_layer_ids,
                             computed_in=computed_in, scan=options.scan, name=str(options.states),
                             on_sample=lambda done, _total: progress.set(done))
    if stated is not None and stated["weights"] != target.identity["weights"]:
        verdict = audit.verdict if audit.findings else f"WRONG TARGET, or states of another one. {audit.verdict}"
        audit = replace(audit, verdict=verdict, findings=[*audit.findings, Finding(
            faults.OTHER_MODEL, f"the store says that it was made by {stated['name']} with weights "
            f"{stated['weights'][:12]}, --target has {target.identity['weights'][:12]}: is it the right one? However "
            "near they are, a drafter trained on these states serves another target.", (), ())])
    print(audit_text(audit, repeated(options)))
    if options.repair is not None:
        if audit.repair is None:
            why = audit.no_repair or "nothing is wrong, so there is nothing to repair"
            raise StoreError(f"{options.states}: {why}")
        if set(audit.repair.drop) & set(audit.audited) and len(audit.audited) < audit.num_samples:
            raise StoreError(f"{options.states}: the repair leaves samples out, and only {len(audit.audited)} of "
                             f"{audit.num_samples} were recomputed: which others are wrong is not known. Give "
                             f"--samples {audit.num_samples}.")
        done = convert(RepairedSource(source, audit.repair, target), options.repair,
                       ConvertOptions(to="store", target=str(options.target), dtype=options.dtype))
        again = ["python", "-m", "dflash_lib", "audit", str(options.repair), "--target", str(options.target)]
        print(f"{options.repair}: {done.num_samples} samples repaired. Audit them, all of them for certainty: "
              f"{shlex.join([*again, '--samples', str(done.num_samples)])}")
    return audit


def stated_identity(source) -> dict[str, str] | None:
    """The target that a store says it was extracted from; None for other layouts and for converted stores, whose states
    another tool computed, in a type that is not known."""
    plan = getattr(source, "plan", None)
    return None if plan is None or "converted_from" in plan.data else plan.target


def _width(options, config) -> int | None:
    """The target's hidden size for SpecForge's files, which do not say how wide a layer is."""
    known = options.format or next(iter(detect_formats(options.states)), None) if options.states.is_dir() else None
    return config.hidden_size if known == "specforge" else None
