"""python -m dflash_lib <command>: the workbench from a shell.

Exit codes: 0 done, 1 a notebook failed, a run ended too early or a store is not as it should be, 2 something to put
right in what was asked (one clear message, no traceback), 130 interrupted.
"""

import argparse
import json
import sys
from pathlib import Path

import yaml

from dflash_lib import commands
from dflash_lib.workbench.runs import REPOSITORY, study_names


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
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")

    run = subparsers.add_parser("run", help="run every notebook of a job in order, then build the report")
    run.add_argument("params", type=Path, help="parameter file, such as notebooks/params/demo.yaml")
    run.add_argument("--from", dest="start", metavar="NB", help="start at this notebook, such as 06_train")
    run.add_argument("--to", dest="stop", metavar="NB", help="stop after this notebook")
    run.add_argument("--only", metavar="NB", help="look at this notebook only")
    run.add_argument("--force", action="store_true", help="execute notebooks even when nothing changed since")
    run.add_argument("--run-id", help="name of the run folder (default: the parameter file's name)")
    run.add_argument("--runs-dir", type=Path, help="default: the job's runs_dir, or runs/")
    run.add_argument("--plan", action="store_true", help="say what every stage takes, and what would stop it here; "
                     "nothing is executed or written")
    run.add_argument("--detach", action="store_true", help="start it in a session of its own, which a lost "
                     "connection or a closed terminal does not end; its output goes to logs/run.log of the run")
    nodes = run.add_argument_group("machines", "Extraction on several that share a file system (--only "
                                   f"{commands.EXTRACTION}): the same command on each, with its own rank.")
    nodes.add_argument("--nnodes", type=_count, metavar="N", help="how many machines")
    nodes.add_argument("--node-rank", type=_rank, metavar="R", help="this one's number, from 0; 0 leads")
    nodes.add_argument("--rendezvous", metavar="HOST:PORT", help="where machine 0 listens")
    run.set_defaults(function=commands.run_command)

    status = subparsers.add_parser("status", help="is a run alive, how far is it, what was its last error? "
                                   "(exit code 0: alive or finished)")
    stop = subparsers.add_parser("stop", help="end a run, or the job of a notebook, as Ctrl-C does; it can go on later")
    logs = subparsers.add_parser("logs", help="the last lines of a run's logs, the newest last")
    for command, function in ((status, commands.status_command), (stop, commands.stop_command),
                              (logs, commands.logs_command)):
        command.add_argument("run", type=Path, help="run folder, such as runs/demo; its name; or its parameter file")
        command.set_defaults(function=function)
    logs.add_argument("--follow", action="store_true", help="go on printing until the run has ended")
    logs.add_argument("--lines", type=_count, default=20, metavar="N", help="of each log (default: %(default)s)")

    study = subparsers.add_parser("study", help="execute a notebook of notebooks/studies on a run")
    study.add_argument("name", help=f"one of {', '.join(study_names())}")
    study.add_argument("run", type=Path, help="run folder, such as runs/demo_hybrid; its name; or its parameter file")
    study.add_argument("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE",
                       help="a parameter of the study, its value as YAML; repeat it for several")
    study.set_defaults(function=commands.study_command)

    doctor = subparsers.add_parser("doctor", help="look at this machine: a green, amber or red line each")
    doctor.add_argument("model", nargs="?", help="folder of a target: does it fit? (only config.json is read)")
    doctor.add_argument("--data", type=Path, default=REPOSITORY, help="where hidden states will go (default: here)")
    doctor.add_argument("--dtype", default="bfloat16", help="of the target (default: %(default)s)")
    doctor.add_argument("--device", help="of the target (default: cuda where there is one, else cpu)")
    doctor.set_defaults(function=commands.doctor_command)

    trial = subparsers.add_parser("trial", help="five samples of a job on one device, and a diagnosis")
    trial.add_argument("params", type=Path, help="parameter file, such as notebooks/params/demo.yaml")
    trial.add_argument("--runs-dir", type=Path, help="default: the job's runs_dir, or runs/")
    trial.set_defaults(function=commands.trial_command)

    report = subparsers.add_parser("report", help="build the report of a run again")
    report.add_argument("run", type=Path, help="run folder, such as runs/demo")
    report.set_defaults(function=commands.report_command)

    regenerate = subparsers.add_parser("regenerate", help="let a target answer the user turns of conversations itself")
    regenerate.add_argument("source", type=Path, help="conversations or prompts, in any form of 04_extract")
    regenerate.add_argument("out", type=Path, help="file to write (JSONL); a second call goes on where one was cut off")
    regenerate.add_argument("--model", required=True, help="folder or hub id of the target")
    regenerate.add_argument("--max-new-tokens", type=_count, default=144,
                            help="of one answer (default: %(default)s)")
    regenerate.add_argument("--batch-size", type=_count, default=64, help="rows at once (default: %(default)s)")
    regenerate.add_argument("--max-samples", type=_count, help="the first so many conversations (default: all)")
    _add_rendering(regenerate)
    regenerate.add_argument("--dtype", default="float32", help="default: %(default)s")
    regenerate.add_argument("--device", default="cpu", help="default: %(default)s")
    regenerate.set_defaults(function=commands.regenerate_command)

    prompts = subparsers.add_parser("prompts", help="let a target write user turns, to be answered by `regenerate`")
    prompts.add_argument("out", type=Path, help="file to write (JSONL); a second call goes on where one was cut off")
    prompts.add_argument("--model", required=True, help="folder or hub id of the target")
    prompts.add_argument("--num", type=_count, required=True, help="how many different prompts")
    prompts.add_argument("--max-new-tokens", type=_count, default=48, help="of one prompt (default: %(default)s)")
    prompts.add_argument("--temperature", type=float, default=1.0, help="default: %(default)s")
    prompts.add_argument("--batch-size", type=_count, default=256, help="prompts at once (default: %(default)s)")
    prompts.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    prompts.add_argument("--dtype", default="float32", help="default: %(default)s")
    prompts.add_argument("--device", default="cpu", help="default: %(default)s")
    prompts.set_defaults(function=commands.prompts_command)

    evaluate = subparsers.add_parser("evaluate", help="decode with and without drafters: acceptance, speed")
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
    evaluate.add_argument("--num-prompts", type=_count, help="the first so many of each set (default: all)")
    evaluate.add_argument("--max-new-tokens", type=_count, default=64, help="of one answer (default: %(default)s)")
    _add_rendering(evaluate)
    evaluate.add_argument("--dtype", default="float32", help="of target and drafters (default: %(default)s)")
    evaluate.add_argument("--device", default="cpu", help="default: %(default)s")
    evaluate.add_argument("--threads", type=_count, help="CPU threads (default: PyTorch's own choice)")
    evaluate.add_argument("--out", type=Path, help="new folder for results.json, figures and page")
    evaluate.set_defaults(function=commands.evaluate_command)

    describe = subparsers.add_parser("describe", help="print what a hidden-state store holds")
    describe.add_argument("store", type=Path, help="store folder, such as runs/demo/states")
    describe.set_defaults(function=commands.describe_command)

    verify = subparsers.add_parser("verify", help="check a hidden-state store against its prepared rows")
    verify.add_argument("store", type=Path, help="store folder, such as runs/demo/states")
    verify.add_argument("prepared", type=Path, help="folder of prepared rows, such as runs/demo/prepared")
    verify.set_defaults(function=commands.verify_command)

    convert = subparsers.add_parser("convert", help="hidden states of any tool as a store, or in speculators' layout")
    convert.add_argument("source", type=Path, help="folder: a store, or speculators', SpecForge's, Model-Optimizer's")
    convert.add_argument("destination", type=Path, help="folder to write; the same command goes on after a kill")
    convert.add_argument("--to", choices=("store", "speculators"), help="default: speculators from a store, else store")
    convert.add_argument("--encoding", default="", help="bf16, bf16+zstd, fp8 or fp8+zstd of a store, bf16 or "
                         "fp8 of speculators (default: the source's, else bf16)")
    convert.add_argument("--last-state", choices=("all", "supervised", "none"), default="", help="of a store: of every "
                         "token, of rows that predict supervised ones, or none (default: all that the source has)")
    convert.add_argument("--rows-only", action="store_true", help="to speculators: its Arrow data set without states")
    convert.add_argument("--target", metavar="MODEL", help="folder or hub id of the model whose states they are, where "
                         "no plan comes with them")
    convert.add_argument("--dtype", default="float32", help="that the target ran in (default: %(default)s)")
    convert.add_argument("--samples-per-shard", type=_count, default=64, help="of a new store (default: %(default)s)")
    _add_states(convert)
    convert.set_defaults(function=commands.convert_command)

    audit = subparsers.add_parser("audit", help="are these hidden states, of any tool, what they are said to be?")
    audit.add_argument("states", type=Path, help="folder of hidden states, such as runs/demo/states")
    audit.add_argument("--target", required=True, metavar="MODEL", help="folder or hub id of the model they are of")
    audit.add_argument("--samples", type=_count, default=12, help="recomputed with the target (default: %(default)s)")
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
    audit.set_defaults(function=commands.audit_command)

    fetch = subparsers.add_parser("fetch-demo-model", help="fetch SmolLM2-135M-Instruct into data/models, once")
    fetch.set_defaults(function=commands.fetch_demo_model_command)
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


def _count(text: str) -> int:
    """An argument that counts something: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number of at least 1 is needed")
    return int(text)


def _rank(text: str) -> int:
    """An argument that numbers something from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 0 is needed")
    return int(text)


def _setting(text: str) -> tuple[str, object]:
    """An argument NAME=VALUE, its value in YAML."""
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r}: NAME=VALUE is needed")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: the value is not valid YAML ({error})") from error


def _json_object(text: str) -> dict:
    """An argument that is a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, such as {{\"preserve_thinking\": true}}")
    return value


if __name__ == "__main__":
    sys.exit(main())
