"""What each command does, from its parsed options to its exit code; `__main__` has the options.

Commands import what they need when called: `--help` and a misspelled parameter need not wait for torch.
"""

import argparse
import os
import sys
from pathlib import Path

from dflash_lib.launch import ONE_MACHINE, Nodes
from dflash_lib.workbench.pipeline import (
    Job,
    PipelineOptions,
    PipelineResult,
    check_job,
    run_pipeline,
    sigterm_interrupts,
)
from dflash_lib.workbench.run_control import print_logs, start_detached, stop_run
from dflash_lib.workbench.run_state import describe_run, find_run
from dflash_lib.workbench.runs import REPOSITORY, input_path, load_record, to_json

EXTRACTION = "04_extract"  # the notebook whose job spans machines


def run_command(options: argparse.Namespace) -> int:
    if options.plan:
        if options.detach or options.nnodes is not None:
            raise ValueError("--plan executes nothing; leave out " + ("--detach" if options.detach else "--nnodes"))
        from dflash_lib.workbench.job_plan import plan_job

        plan = plan_job(options.params, options.runs_dir, options.run_id, start=options.start, stop=options.stop,
                        only=options.only)
        print(plan.text())
        return 1 if plan.obstacles else 0
    nodes = _nodes(options)
    settings = PipelineOptions(
        params_file=options.params, run_id=options.run_id, start=options.start, stop=options.stop, only=options.only,
        force=options.force or nodes.num > 1, runs_dir=options.runs_dir, nodes=nodes)  # current or not: the others wait
    if options.detach:
        return _run_detached(options, check_job(settings).folder, nodes)
    if nodes.rank > 0:
        return _join(check_job(settings), nodes)
    from dflash_lib.report.pages import build_report

    result = run_pipeline(settings)
    page = build_report(result.folder)
    print(f"\n{summary_table(result)}\n\nreport: {page}")
    if result.error:
        print(f"\n{result.error}", file=sys.stderr)
        return 1
    return 0


def _nodes(options: argparse.Namespace) -> Nodes:
    """The machines of `run`. Raises ValueError for options that do not go together."""
    if options.nnodes is None:
        given = [name for name in ("node-rank", "rendezvous") if getattr(options, name.replace("-", "_")) is not None]
        if given:
            raise ValueError(f"--{given[0]} goes with --nnodes N, the number of machines")
        return ONE_MACHINE
    if options.only != EXTRACTION:
        raise ValueError(f"--nnodes {options.nnodes}: only the extraction spans machines; add --only {EXTRACTION}")
    missing = [name for name in ("node-rank", "rendezvous") if getattr(options, name.replace("-", "_")) is None]
    if missing and options.nnodes > 1:
        raise ValueError(f"--nnodes {options.nnodes} needs {' and '.join(f'--{name}' for name in missing)}: this "
                         "machine's number, from 0, and HOST:PORT of machine 0, the same on all of them")
    return Nodes(options.nnodes, options.node_rank or 0, options.rendezvous or "")


def _join(job: Job, nodes: Nodes) -> int:
    """What a machine behind the first does: no notebook, no lock of the run; it ends with the job."""
    from dflash_lib.hidden_states.extraction import join_extraction

    logs = job.folder / "logs"
    print(f"node {nodes.rank} of {nodes.num}: waits for node 0's job in {logs}, and works on it", flush=True)
    with sigterm_interrupts():
        join_extraction(logs, nodes, job.params.get("gpus"), job.params["num_workers"])
    print(f"node {nodes.rank} of {nodes.num}: the job has ended")
    return 0


def _run_detached(options: argparse.Namespace, folder: Path, nodes: Nodes) -> int:
    """`run --detach`: the same call in a session of its own; the machine of a higher rank has no lock to wait for."""
    arguments = ["run", str(options.params)]
    for name in ("start", "stop", "only", "run_id", "runs_dir", "nnodes", "node_rank", "rendezvous"):
        value = getattr(options, name)
        if value is not None:
            flag = {"start": "from", "stop": "to"}.get(name, name.replace("_", "-"))
            arguments += [f"--{flag}", str(value)]
    arguments += ["--force"] if options.force else []
    pid = start_detached(folder, arguments, f"run.node{nodes.rank}.log" if nodes.rank else "run.log",
                         wait=nodes.rank == 0)
    print(f"{folder}: started as process {pid}, which goes on when this terminal closes. To look at it, and to end it:")
    for command in (f"status {folder}", f"logs {folder} --follow", f"stop {folder}"):
        print(f"  python -m dflash_lib {command}")
    return 0


def status_command(options: argparse.Namespace) -> int:
    text, code = describe_run(find_run(options.run))
    print(text)
    return code


def stop_command(options: argparse.Namespace) -> int:
    return stop_run(find_run(options.run), sys.stdout)


def logs_command(options: argparse.Namespace) -> int:
    print_logs(find_run(options.run), options.lines, options.follow, sys.stdout)
    return 0


def summary_table(result: PipelineResult) -> str:
    """One line a notebook: state, checks, seconds, outcome."""
    lines = [f"{'notebook':<18} {'state':<8} {'checks':>7} {'seconds':>8}  outcome"]
    for stage in result.stages:
        record = load_record(result.folder, stage.notebook)
        checks = record["checks"] if record else []
        passed = f"{sum(c['passed'] for c in checks)}/{len(checks)}" if record else "-"
        seconds = f"{stage.seconds or (record['seconds'] if record else 0):.0f}"
        earlier = "earlier: " if record and stage.state == "not run" else ""
        lines.append(f"{stage.notebook:<18} {stage.state:<8} {passed:>7} {seconds:>8}  "
                     f"{earlier}{record['outcome'] if record else '-'}")
    return "\n".join(lines)


def study_command(options: argparse.Namespace) -> int:
    from dflash_lib.report.pages import build_report
    from dflash_lib.workbench.studies import run_study

    run = find_run(options.run)
    error = run_study(options.name, run, dict(options.set))
    print(f"\nreport: {build_report(run)}")
    if error:
        print(f"\n{error}", file=sys.stderr)
    return 1 if error else 0


def doctor_command(options: argparse.Namespace) -> int:
    import torch

    from dflash_lib.workbench.doctor import examine, exit_code

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    lines = examine(options.data, options.model, options.dtype, device)
    print("\n".join(map(str, lines)))
    return exit_code(lines)


def trial_command(options: argparse.Namespace) -> int:
    from dflash_lib.workbench.trial import run_trial

    trial = run_trial(options.params, options.runs_dir)
    print("\nThe job runs here." if trial.passed else f"\nThe job does not run here yet; see {trial.folder}.")
    return 0 if trial.passed else 1


def report_command(options: argparse.Namespace) -> int:
    from dflash_lib.report.pages import build_report

    print(build_report(options.run))
    return 0


def evaluate_served_command(options: argparse.Namespace) -> int:
    """`evaluate --server`: prompts, answers and files are those of the one run."""
    from dflash_lib.decoding.served_comparison import Reference, evaluate_served, walk_references
    from dflash_lib.decoding.server import ServerOptions
    from dflash_lib.drafter.export import export_differences
    from dflash_lib.files import write_json
    from dflash_lib.progress import Progress
    from dflash_lib.report.figures_serving import served_figure, served_table
    from dflash_lib.target.loading import load_target

    unused = {"model": None, "out": None, "prompts": [], "max_new_tokens": 64, "dtype": "float32", "device": "cpu",
              "threads": None, "thinking": "default", "template_kwargs": {}}  # they are those of the run
    given = [name.replace("_", "-") for name, default in unused.items() if getattr(options, name) != default]
    if len(options.drafters) != 1 or given:
        raise ValueError("--server compares with one run's 07_evaluate: give one --drafter RUN, and no "
                         + " or ".join(f"--{name}" for name in given or ["drafter more"]))
    run, = options.drafters
    record = load_record(run, "07_evaluate")
    if record is None:
        raise ValueError(f"{run}: no results of 07_evaluate; run it first")
    results, parameters = record["results"], record["parameters"]
    references = [Reference.from_record(one, results["block_size"])
                  for one in results["decoded"][:options.num_prompts]]
    if not references:
        raise ValueError(f"{run}: no prompts to ask (--num-prompts {options.num_prompts})")
    target = walked = None
    if not options.no_target:
        model = input_path("model", parameters["model"])
        target = load_target(model, parameters["dtype"], parameters["device"], audit="quick")
        walked = walk_references(target, run / "drafter" / "best", references)
        export = run / "drafter" / "export" / "zlab"
        wrong = export_differences(run / "drafter" / "best", target, export) if export.is_dir() else []
        if wrong:
            raise ValueError(f"{export}: not an export of {run / 'drafter' / 'best'}, so a server that loaded it has "
                             f"another drafter: {'; '.join(wrong[:5])}. Run 07_evaluate again")
    with Progress(len(references), "served", "prompts") as progress:
        comparison = evaluate_served(
            options.server, references, parameters["eval_max_new_tokens"], results["block_size"],
            run / "served" / "answers.jsonl", target=target, walked=walked, on_answer=progress.set,
            sample_from_anchor=results.get("sample_from_anchor", False),
            options=ServerOptions(timeout_s=options.timeout, api_key=os.environ.get("DFLASH_SERVER_KEY")))
    write_json(run / "served" / "comparison.json", to_json(comparison.to_dict()))
    served_figure(comparison).savefig(run / "served" / "served.png")
    print(served_table(comparison))
    return 0 if comparison.verdict == "agree" else 1


def regenerate_command(options: argparse.Namespace) -> int:
    from dflash_lib.target.loading import load_target
    from dflash_lib.target.regenerate import RegenerateOptions, regenerate
    from dflash_lib.target.resume import refuse_existing

    settings = RegenerateOptions(
        max_new_tokens=options.max_new_tokens, batch_size=options.batch_size, max_samples=options.max_samples,
        thinking=options.thinking, template_kwargs=options.template_kwargs)
    refuse_existing(options.out)  # before a large target is loaded
    target = load_target(options.model, options.dtype, options.device)
    meta = regenerate(target, options.source, options.out, settings)
    print(f"{options.out}: {meta['conversations']} conversations, {meta['generated_tokens']} generated tokens")
    return 0


def prompts_command(options: argparse.Namespace) -> int:
    from dflash_lib.target.loading import load_target
    from dflash_lib.target.prompts import PromptOptions, sample_prompts
    from dflash_lib.target.resume import refuse_existing

    settings = PromptOptions(
        num_prompts=options.num, max_new_tokens=options.max_new_tokens, temperature=options.temperature,
        batch_size=options.batch_size, seed=options.seed)
    refuse_existing(options.out)  # before a large target is loaded
    target = load_target(options.model, options.dtype, options.device)
    batches = sample_prompts(target, options.out, settings)
    print(f"{options.out}: {options.num} prompts out of {batches * options.batch_size} drawn")
    return 0


def evaluate_command(options: argparse.Namespace) -> int:
    import torch

    from dflash_lib.conversations.rendering import ChatTemplate, TemplateOptions
    from dflash_lib.decoding.comparison import compare_drafters, drafter_names, open_drafters
    from dflash_lib.decoding.eval_prompts import parse_prompt_sets, read_prompt_sets
    from dflash_lib.report.evaluation_page import claim_folder, rendering_notes, summary, write_evaluation
    from dflash_lib.target.loading import load_target

    if options.server is not None:
        return evaluate_served_command(options)
    missing = [name for name in ("model", "out") if not getattr(options, name)]
    if missing:
        raise ValueError(f"evaluate needs {' and '.join(f'--{name}' for name in missing)}")
    if options.max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens {options.max_new_tokens}: an answer needs at least 2, for a verify step")
    rendering = TemplateOptions(thinking=options.thinking, template_kwargs=options.template_kwargs)
    sets = parse_prompt_sets(options.prompts)
    drafter_names(options.drafters)  # before a large target is loaded: are they there?
    out = claim_folder(options.out)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    target = load_target(options.model, options.dtype, options.device)
    prompts = read_prompt_sets(sets, ChatTemplate(target.tokenizer, rendering), options.num_prompts)
    drafters = open_drafters(options.drafters, target)
    comparison = compare_drafters(target, drafters, prompts, options.max_new_tokens)
    about = {"target": str(options.model), "dtype": target.report.dtype, "device": str(target.device),
             "threads": torch.get_num_threads(), "max_new_tokens": options.max_new_tokens,
             "prompt_sets": {name: str(path) for name, path in sets.items()}, "num_prompts": len(prompts),
             "thinking": options.thinking, "template_kwargs": options.template_kwargs}
    checks = write_evaluation(out, comparison, target.tokenizer, about, rendering_notes(drafters, rendering))
    print(f"\n{summary(comparison)}\n\npage: {out / 'index.html'}")
    failed = [check for check in checks if not check["passed"]]
    for check in failed:
        print(f"{check['name']}: measured {check['value']:.6g}, must be {check['op']} {check['limit']}",
              file=sys.stderr)
    return 1 if failed else 0


def describe_command(options: argparse.Namespace) -> int:
    from dflash_lib.hidden_states.store import HiddenStateStore

    with HiddenStateStore.open(options.store, allow_incomplete=True) as store:
        print(store.describe())
    return 0


def verify_command(options: argparse.Namespace) -> int:
    from dflash_lib.conversations.prepare import PreparedRows
    from dflash_lib.hidden_states.store import HiddenStateStore
    from dflash_lib.hidden_states.verify import verify_store

    with HiddenStateStore.open(options.store) as store:
        checks = verify_store(store, PreparedRows.load(options.prepared))
        print(f"{options.store}: {store.num_samples} samples")
    for check in checks:
        print(f"ok    {check.name}" if check.ok
              else f"FAIL  {check.name}: {check.num_faults}, first: {check.first_fault}")
    return 0 if all(check.ok for check in checks) else 1


def convert_command(options: argparse.Namespace) -> int:
    from dflash_lib.hidden_states.formats import open_states
    from dflash_lib.hidden_states.formats.convert import ConvertOptions, convert

    source = open_states(options.source, options.format, target_layer_ids=options.target_layer_ids,
                         hidden_size=options.hidden_size, dataset=options.dataset)
    print(source.describe())
    to = options.to or ("speculators" if source.format == "store" else "store")
    done = convert(source, options.destination, ConvertOptions(
        to=to, encoding=options.encoding, target=options.target, dtype=options.dtype, last_state=options.last_state,
        samples_per_shard=options.samples_per_shard, with_states=not options.rows_only))
    for note in done.notes:
        print(f"note: {note}")
    rounded = options.encoding.startswith("fp8") and not source.encoding.startswith("fp8")
    same = "the source's, rounded to fp8" if rounded else "the same as the source's"
    print(f"{options.destination}: {to}, {done.num_samples} samples, {same} (verified); "
          f"{done.num_written} {'shards' if to == 'store' else 'files'} written now")
    return 0


def audit_command(options: argparse.Namespace) -> int:
    from dflash_lib.files import write_json
    from dflash_lib.hidden_states.audit.command import run_audit
    from dflash_lib.report.figures_audit import audit_figure

    audit = run_audit(options)
    if options.json is not None:
        write_json(options.json, to_json(audit.to_dict()))
    if options.figure is not None:
        audit_figure(audit).savefig(options.figure)
    return 0 if audit.ok else 1


def fetch_demo_model_command(_options: argparse.Namespace) -> int:
    from dflash_lib.target.demo_model import fetch_demo_model

    print(fetch_demo_model(REPOSITORY / "data" / "models"))
    return 0
