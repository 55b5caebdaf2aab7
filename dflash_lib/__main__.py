"""python -m dflash_lib <command>: the workbench from a shell.

Exit codes: 0 done, 1 a notebook failed or a store is not as it should be, 2 something to put right in what was asked
(one clear message, no traceback), 130 interrupted.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from dflash_lib.workbench.pipeline import PipelineOptions, PipelineResult, run_pipeline
from dflash_lib.workbench.runs import REPOSITORY, input_path, load_record, to_json


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return options.function(options)
    except (ValueError, OSError) as error:  # OSError: missing, unwritable, full; its text names the path
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from what is finished", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dflash_lib", description="The DFlash workbench.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run every notebook of a job in order, then build the report")
    run.add_argument("params", type=Path, help="parameter file, such as notebooks/params/demo.yaml")
    run.add_argument("--from", dest="start", metavar="NB", help="start at this notebook, such as 06_train")
    run.add_argument("--to", dest="stop", metavar="NB", help="stop after this notebook")
    run.add_argument("--only", metavar="NB", help="look at this notebook only")
    run.add_argument("--force", action="store_true", help="execute notebooks even when nothing changed since")
    run.add_argument("--run-id", help="name of the run folder (default: the parameter file's name)")
    run.add_argument("--runs-dir", type=Path, help="default: the job's runs_dir, or runs/")
    run.add_argument("--plan", action="store_true", help="say what every stage takes, and what would stop it here; "
                     "nothing is executed or written")
    run.set_defaults(function=_run)

    doctor = commands.add_parser("doctor", help="look at this machine: a green, amber or red line each")
    doctor.add_argument("model", nargs="?", help="folder of a target: does it fit? (only config.json is read)")
    doctor.add_argument("--data", type=Path, default=REPOSITORY, help="where hidden states will go (default: here)")
    doctor.add_argument("--dtype", default="bfloat16", help="of the target (default: %(default)s)")
    doctor.add_argument("--device", help="of the target (default: cuda where there is one, else cpu)")
    doctor.set_defaults(function=_doctor)

    trial = commands.add_parser("trial", help="five samples of a job on one device, and a diagnosis")
    trial.add_argument("params", type=Path, help="parameter file, such as notebooks/params/demo.yaml")
    trial.add_argument("--runs-dir", type=Path, help="default: the job's runs_dir, or runs/")
    trial.set_defaults(function=_trial)

    report = commands.add_parser("report", help="build the report of a run again")
    report.add_argument("run", type=Path, help="run folder, such as runs/demo")
    report.set_defaults(function=_report)

    regenerate = commands.add_parser("regenerate", help="let a target answer the user turns of conversations itself")
    regenerate.add_argument("source", type=Path, help="conversations or prompts, in any form of 04_extract")
    regenerate.add_argument("out", type=Path, help="file to write (JSONL); a second call goes on where one was cut off")
    regenerate.add_argument("--model", required=True, help="folder or hub id of the target")
    regenerate.add_argument("--max-new-tokens", type=int, default=144, help="of one answer (default: %(default)s)")
    regenerate.add_argument("--batch-size", type=int, default=64, help="conversations at once (default: %(default)s)")
    regenerate.add_argument("--max-samples", type=int, help="the first so many conversations (default: all)")
    _add_rendering(regenerate)
    regenerate.add_argument("--dtype", default="float32", help="default: %(default)s")
    regenerate.add_argument("--device", default="cpu", help="default: %(default)s")
    regenerate.set_defaults(function=_regenerate)

    prompts = commands.add_parser("prompts", help="let a target write user turns, to be answered by `regenerate`")
    prompts.add_argument("out", type=Path, help="file to write (JSONL); a second call goes on where one was cut off")
    prompts.add_argument("--model", required=True, help="folder or hub id of the target")
    prompts.add_argument("--num", type=int, required=True, help="how many different prompts")
    prompts.add_argument("--max-new-tokens", type=int, default=48, help="of one prompt (default: %(default)s)")
    prompts.add_argument("--temperature", type=float, default=1.0, help="default: %(default)s")
    prompts.add_argument("--batch-size", type=int, default=256, help="prompts at once (default: %(default)s)")
    prompts.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    prompts.add_argument("--dtype", default="float32", help="default: %(default)s")
    prompts.add_argument("--device", default="cpu", help="default: %(default)s")
    prompts.set_defaults(function=_prompts)

    evaluate = commands.add_parser("evaluate", help="decode with and without drafters: acceptance, speed")
    evaluate.add_argument("--drafter", dest="drafters", type=Path, action="append", required=True, metavar="DIR",
                          help="a run folder, its drafter/best, or an exported drafter; repeat it for several")
    evaluate.add_argument("--model", help="folder or hub id of the target")
    evaluate.add_argument("--server", metavar="URL", help="base URL of a running vLLM or SGLang, such as "
                          "http://localhost:8000: send it the prompts of the run's 07_evaluate, and compare")
    evaluate.add_argument("--timeout", type=float, default=600.0, metavar="S", help="with --server: seconds without a "
                          "byte of an answer (default: %(default)s)")
    evaluate.add_argument("--no-target", action="store_true", help="with --server: do not load the target here: texts "
                          "that part are not judged, the training's walk is left out")
    evaluate.add_argument("--prompts", nargs="+", default=[], metavar="NAME=FILE",
                          help="named prompt sets (default: those in data/eval_prompts)")
    evaluate.add_argument("--num-prompts", type=int, help="the first so many of each set (default: all)")
    evaluate.add_argument("--max-new-tokens", type=int, default=64, help="of one answer (default: %(default)s)")
    _add_rendering(evaluate)
    evaluate.add_argument("--dtype", default="float32", help="of target and drafters (default: %(default)s)")
    evaluate.add_argument("--device", default="cpu", help="default: %(default)s")
    evaluate.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's own choice)")
    evaluate.add_argument("--out", type=Path, help="new folder for results.json, figures and page")
    evaluate.set_defaults(function=_evaluate)

    describe = commands.add_parser("describe", help="print what a hidden-state store holds")
    describe.add_argument("store", type=Path, help="store folder, such as runs/demo/states")
    describe.set_defaults(function=_describe)

    verify = commands.add_parser("verify", help="check a hidden-state store against its prepared rows")
    verify.add_argument("store", type=Path, help="store folder, such as runs/demo/states")
    verify.add_argument("prepared", type=Path, help="folder of prepared rows, such as runs/demo/prepared")
    verify.set_defaults(function=_verify)

    convert = commands.add_parser("convert", help="hidden states of any tool into a store, or into speculators' layout")
    convert.add_argument("source", type=Path, help="folder: a store, or speculators', SpecForge's, Model-Optimizer's")
    convert.add_argument("destination", type=Path, help="folder to write; the same command goes on after a kill")
    convert.add_argument("--to", choices=("store", "speculators"), help="default: speculators from a store, else store")
    convert.add_argument("--encoding", default="", help="bf16 or bf16+zstd of a store, bf16 or fp8 of speculators "
                         "(default: the source's, else bf16)")
    convert.add_argument("--drop-last", action="store_true", help="leave the last state out of the store")
    convert.add_argument("--rows-only", action="store_true", help="to speculators: its Arrow data set without states")
    convert.add_argument("--target", metavar="MODEL", help="folder or hub id of the model whose states they are, where "
                         "no plan comes with them")
    convert.add_argument("--dtype", default="float32", help="that the target ran in (default: %(default)s)")
    convert.add_argument("--samples-per-shard", type=int, default=64, help="of a new store (default: %(default)s)")
    _add_states(convert)
    convert.set_defaults(function=_convert)

    audit = commands.add_parser("audit", help="are these hidden states, of any tool, what they are said to be?")
    audit.add_argument("states", type=Path, help="folder of hidden states, such as runs/demo/states")
    audit.add_argument("--target", required=True, metavar="MODEL", help="folder or hub id of the model they are of")
    audit.add_argument("--samples", type=int, default=12, help="recomputed with the target (default: %(default)s)")
    audit.add_argument("--seed", type=int, default=0, help="of their random choice (default: %(default)s)")
    audit.add_argument("--scan", choices=("all", "audited"), default="all",
                       help="whose values are looked at without the target (default: %(default)s)")
    audit.add_argument("--computed-in", choices=("float32", "bfloat16"),
                       help="that the states were computed in (default: found out)")
    audit.add_argument("--json", type=Path, metavar="FILE", help="write all that was found, as JSON")
    audit.add_argument("--figure", type=Path, metavar="FILE", help="draw each slot against every layer (PNG)")
    audit.add_argument("--repair", type=Path, metavar="NEW", help="write a store of repaired states, where they can be")
    audit.add_argument("--dtype", default="float32", help="of the target here (default: %(default)s)")
    audit.add_argument("--device", default="cpu", help="default: %(default)s")
    _add_states(audit)
    audit.set_defaults(function=_audit)

    fetch = commands.add_parser("fetch-demo-model", help="fetch SmolLM2-135M-Instruct into data/models, once")
    fetch.set_defaults(function=_fetch_demo_model)
    return parser


def _add_states(parser: argparse.ArgumentParser) -> None:
    """How to read a folder of hidden states, where its files do not say."""
    parser.add_argument("--from", dest="format", choices=("store", "speculators", "specforge", "model-optimizer"),
                        help="layout of the states (default: by their files)")
    parser.add_argument("--target-layer-ids", type=int, nargs="+", metavar="K",
                        help="the layers, in stored order; ours: K is the output of layer K, from 0")
    parser.add_argument("--hidden-size", type=int, help="of the target, for SpecForge's files")
    parser.add_argument("--dataset", type=Path, metavar="DIR", help="speculators' Arrow data set, if it lies elsewhere")


def _add_rendering(parser: argparse.ArgumentParser) -> None:
    """How the chat template renders prompts."""
    parser.add_argument("--thinking", choices=("default", "on", "off"), default="default",
                        help="of the chat template, as 04_extract's parameter (default: the template's own mode)")
    parser.add_argument("--template-kwargs", type=_json_object, default={}, metavar="JSON",
                        help="more variables for the chat template, as 04_extract's template_kwargs")


def _json_object(text: str) -> dict:
    """An argument that is a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, such as {{\"preserve_thinking\": true}}")
    return value


# Commands import what they need when called: `--help` and a misspelled parameter need not wait for torch.


def _run(options: argparse.Namespace) -> int:
    from dflash_lib.report.pages import build_report

    if options.plan:
        from dflash_lib.workbench.job_plan import plan_job

        plan = plan_job(options.params, options.runs_dir, options.run_id, start=options.start, stop=options.stop,
                        only=options.only)
        print(plan.text())
        return 1 if plan.obstacles else 0
    result = run_pipeline(PipelineOptions(
        params_file=options.params, run_id=options.run_id, start=options.start, stop=options.stop, only=options.only,
        force=options.force, runs_dir=options.runs_dir))
    page = build_report(result.folder)
    print(f"\n{summary_table(result)}\n\nreport: {page}")
    if result.error:
        print(f"\n{result.error}", file=sys.stderr)
        return 1
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


def _doctor(options: argparse.Namespace) -> int:
    import torch

    from dflash_lib.workbench.doctor import examine, exit_code

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    lines = examine(options.data, options.model, options.dtype, device)
    print("\n".join(map(str, lines)))
    return exit_code(lines)


def _trial(options: argparse.Namespace) -> int:
    from dflash_lib.workbench.trial import run_trial

    trial = run_trial(options.params, options.runs_dir)
    print("\nThe job runs here." if trial.passed else f"\nThe job does not run here yet; see {trial.folder}.")
    return 0 if trial.passed else 1


def _report(options: argparse.Namespace) -> int:
    from dflash_lib.report.pages import build_report

    print(build_report(options.run))
    return 0


def _evaluate_served(options: argparse.Namespace) -> int:
    """`evaluate --server`: prompts, answers and files are those of the one run."""
    from dflash_lib.decoding.served_comparison import Reference, evaluate_served, walk_references
    from dflash_lib.decoding.server import ServerOptions
    from dflash_lib.files import write_json
    from dflash_lib.progress import Progress
    from dflash_lib.report.figures_serving import served_figure, served_table
    from dflash_lib.target.loading import load_target

    given = [name for name in ("model", "out", "prompts") if getattr(options, name)]
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
    with Progress(len(references), "served", "prompts") as progress:
        comparison = evaluate_served(
            options.server, references, parameters["eval_max_new_tokens"], results["block_size"],
            run / "served" / "answers.jsonl", target=target, walked=walked, on_answer=progress.set,
            options=ServerOptions(timeout_s=options.timeout, api_key=os.environ.get("DFLASH_SERVER_KEY")))
    write_json(run / "served" / "comparison.json", to_json(comparison.to_dict()))
    served_figure(comparison).savefig(run / "served" / "served.png")
    print(served_table(comparison))
    return 0 if comparison.verdict == "agree" else 1


def _regenerate(options: argparse.Namespace) -> int:
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


def _prompts(options: argparse.Namespace) -> int:
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


def _evaluate(options: argparse.Namespace) -> int:
    import torch

    from dflash_lib.conversations.rendering import ChatTemplate, TemplateOptions
    from dflash_lib.decoding.comparison import compare_drafters, drafter_names, open_drafters
    from dflash_lib.decoding.eval_prompts import parse_prompt_sets, read_prompt_sets
    from dflash_lib.report.evaluation_page import claim_folder, rendering_notes, summary, write_evaluation
    from dflash_lib.target.loading import load_target

    if options.server is not None:
        return _evaluate_served(options)
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


def _describe(options: argparse.Namespace) -> int:
    from dflash_lib.hidden_states.store import HiddenStateStore

    with HiddenStateStore.open(options.store, allow_incomplete=True) as store:
        print(store.describe())
    return 0


def _verify(options: argparse.Namespace) -> int:
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


def _convert(options: argparse.Namespace) -> int:
    from dflash_lib.hidden_states.formats import open_states
    from dflash_lib.hidden_states.formats.convert import ConvertOptions, convert

    source = open_states(options.source, options.format, target_layer_ids=options.target_layer_ids,
                         hidden_size=options.hidden_size, dataset=options.dataset)
    print(source.describe())
    to = options.to or ("speculators" if source.format == "store" else "store")
    done = convert(source, options.destination, ConvertOptions(
        to=to, encoding=options.encoding, target=options.target, dtype=options.dtype, drop_last=options.drop_last,
        samples_per_shard=options.samples_per_shard, with_states=not options.rows_only))
    for note in done.notes:
        print(f"note: {note}")
    print(f"{options.destination}: {to}, {done.num_samples} samples, the same as the source's (verified); "
          f"{done.num_written} {'shards' if to == 'store' else 'files'} written now")
    return 0


def _audit(options: argparse.Namespace) -> int:
    from dflash_lib.files import write_json
    from dflash_lib.hidden_states.audit.command import run_audit
    from dflash_lib.report.figures_audit import audit_figure

    audit = run_audit(options)
    if options.json is not None:
        write_json(options.json, to_json(audit.to_dict()))
    if options.figure is not None:
        audit_figure(audit).savefig(options.figure)
    return 0 if audit.ok else 1


def _fetch_demo_model(_options: argparse.Namespace) -> int:
    from dflash_lib.target.demo_model import fetch_demo_model

    print(fetch_demo_model(REPOSITORY / "data" / "models"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
