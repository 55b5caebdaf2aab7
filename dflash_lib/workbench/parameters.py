"""Parameters of a run: one flat YAML file drives every notebook, and each notebook declares the keys that it takes.

A notebook declares them in its cell tagged `parameters`, as plain literals with annotations and a trailing comment:

    max_samples: int | None = 450  # conversations to extract; None = all

The file is checked against all declarations before anything runs: papermill itself only warns of a key that no
notebook knows and goes on without it.
"""

import ast
import difflib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dflash_lib.files import read_json

TYPES = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "None": type(None)}
RUN_DIR = "run_dir"  # declared by every notebook, set by the pipeline, never in a parameter file


# What a value must be, wherever it stands: (operator, limit); None, where it is allowed, is looked at by nobody here.
BOUNDS = {
    **{name: (">=", 1) for name in (
        "max_samples", "num_aux_layers", "token_budget", "samples_per_shard", "num_workers", "threads",
        "num_trial_samples", "num_statistics_samples", "num_recomputed_samples", "num_audit_samples",
        "num_drafter_layers", "drafter_intermediate_size", "draft_vocab_size", "steps", "batch_samples",
        "anchors_per_sample", "slots_per_anchor", "validation_samples", "validation_interval", "num_gpus", "epochs",
        "eval_prompts", "num_processes", "accumulate", "sliding_window", "num_drafter_heads", "num_drafter_kv_heads",
        "drafter_head_dim")},
    **{name: (">=", 2) for name in ("max_length", "block_size", "eval_max_new_tokens")},
    **{name: (">=", 0) for name in ("warmup_steps", "seed", "mask_token_id", "kl_weight", "average", "load_s")},
    **{name: (">", 0) for name in ("learning_rate", "gamma", "extract_tokens_s", "train_tokens_s", "decode_tokens_s",
                                   "disk_mb_s", "max_disk_tb", "max_hours")}}
NEEDED = ("model", "conversations", "heldout_prompts")  # paths that may not be empty: that would be the repository


class ParameterError(ValueError):
    """A parameter file or a notebook's parameters cell that cannot be used; the message says what to change."""


@dataclass(frozen=True)
class Parameter:
    """One declaration: its default value, its annotation as written, the comment behind it, the notebook's name."""

    name: str
    default: Any
    annotation: str
    comment: str
    notebook: str


def read_notebook(path: Path) -> dict[str, Any]:
    """A notebook's JSON. Raises ParameterError when it has no cells."""
    notebook = read_json(path)
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise ParameterError(f"{path}: not a notebook (no cells)")
    return notebook


def declared_parameters(path: Path) -> dict[str, Parameter]:
    """What the `parameters` cell of the notebook at `path` declares, by name.

    Raises ParameterError when there is no such cell or more than one, for a line that is not an annotated literal, for
    a repeated name and when `run_dir` is missing.
    """
    cells = [cell for cell in read_notebook(path)["cells"] if "parameters" in cell.get("metadata", {}).get("tags", [])]
    if len(cells) != 1:
        raise ParameterError(f"{path}: {len(cells)} cells are tagged `parameters`; exactly one must be")
    source = cells[0]["source"] if isinstance(cells[0]["source"], str) else "".join(cells[0]["source"])
    lines = source.splitlines()
    parameters: dict[str, Parameter] = {}
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise ParameterError(f"{path}, parameters cell, line {error.lineno}: {error.msg}") from error
    for statement in statements:
        where = f"{path}, parameters cell, line {statement.lineno}"
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value):
            raise ParameterError(f"{where}: write `name: type = literal  # comment`, found {ast.unparse(statement)!r}")
        name, annotation = statement.target.id, ast.unparse(statement.annotation)
        try:
            value = ast.literal_eval(statement.value)
        except ValueError as error:
            raise ParameterError(f"{where}: {name} must be a plain literal") from error
        if name in parameters:
            raise ParameterError(f"{where}: {name} is declared twice")
        tail = lines[statement.end_lineno - 1].encode()[statement.end_col_offset:].decode()
        parameter = Parameter(name, value, annotation, tail.strip().removeprefix("#").strip(), path.stem)
        if convert(value, parameter, where) != value:
            raise ParameterError(f"{where}: {name} is annotated {annotation}, but its value is {value!r}")
        parameters[name] = parameter
    if RUN_DIR not in parameters:
        raise ParameterError(f'{path}: its parameters cell must declare {RUN_DIR}: str = ""')
    return parameters


def all_declarations(notebooks: list[Path]) -> dict[str, dict[str, Parameter]]:
    """`declared_parameters` of each notebook, by the notebook's name.

    Raises ParameterError when two notebooks annotate one name differently: a name means the same everywhere.
    """
    declarations = {path.stem: declared_parameters(path) for path in notebooks}
    first: dict[str, Parameter] = {}
    for of_notebook in declarations.values():
        for parameter in of_notebook.values():
            other = first.setdefault(parameter.name, parameter)
            if other.annotation != parameter.annotation:
                raise ParameterError(f"parameter {parameter.name} is annotated {other.annotation} in {other.notebook} "
                                     f"and {parameter.annotation} in {parameter.notebook}")
    return declarations


def convert(value: Any, parameter: Parameter, where: str) -> Any:
    """`value` as the annotation asks for it; an int is accepted for a float, and so is YAML's "3e-3", a string there.

    Raises ParameterError, starting with `where`, for any other type.
    """
    names = [name.strip() for name in parameter.annotation.split("|")]
    kinds = [TYPES.get(name.partition("[")[0]) for name in names]
    if None in kinds:
        raise ParameterError(f"{where}: annotation {parameter.annotation!r} is not understood; "
                             f"use {', '.join(TYPES)} and |")
    if float in kinds and type(value) in (int, float, str):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan  # a word where a number belongs
        if math.isfinite(number):
            return number
    elif type(value) in kinds and (type(value) is not list or _is_list_of(value, names)):
        return value
    raise ParameterError(f"{where}: {parameter.name} must be {parameter.annotation}, found {value!r} "
                         f"({type(value).__name__})")


def _is_list_of(values: list, names: list[str]) -> bool:
    """Whether one of the annotations `names` is a list whose element type all values have (`list` alone: any)."""
    elements = [name.removeprefix("list").strip("[]") for name in names if name.startswith("list")]
    return any(not element or all(type(value) is TYPES.get(element) for value in values) for element in elements)


def read_parameters_file(path: Path | str) -> dict[str, Any]:
    """The flat mapping in a YAML file. Raises FileNotFoundError, and ParameterError for anything but a flat mapping."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such parameter file")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
        _num_values(values)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ParameterError(f"{path}: not valid YAML ({error})") from error
    values = {} if values is None else values
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ParameterError(f"{path}: expected lines `name: value`")
    return values


MOST_VALUES, MOST_LEVELS = 10_000, 20


def _num_values(value: Any, level: int = 0) -> int:
    """Values in lists and mappings, those that aliases repeat counted each time. Raises ParameterError beyond what any
    parameter file needs: a few lines of aliases can stand for more than memory holds."""
    if level > MOST_LEVELS:
        raise ParameterError(f"a parameter file's values are nested {MOST_LEVELS} deep at most")
    found = 1
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        found += _num_values(part, level + 1)
        if found > MOST_VALUES:
            raise ParameterError(f"a parameter file holds {MOST_VALUES} values at most, aliases counted")
    return found


def resolve_parameters(values: dict[str, Any], declarations: dict[str, dict[str, Parameter]],
                       where: str) -> dict[str, Any]:
    """Every declared parameter of the job but `run_dir`: from `values`, else the notebooks' default.

    Raises ParameterError for a key that no notebook declares (naming the nearest), a value of the wrong type, and a
    key left out whose default differs between notebooks.
    """
    known: dict[str, list[Parameter]] = {}
    for of_notebook in declarations.values():
        for parameter in of_notebook.values():
            known.setdefault(parameter.name, []).append(parameter)
    known.pop(RUN_DIR, None)
    for key in values:
        if key == RUN_DIR:
            raise ParameterError(f"{where}: {RUN_DIR} is set by the pipeline; choose the run with --run-id")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise ParameterError(f"{where}: no notebook declares the parameter {key!r}; {hint}")
    resolved = {}
    for name, declared in known.items():
        if name in values:
            resolved[name] = convert(values[name], declared[0], where)
            _check_value(name, resolved[name], where)
            continue
        for other in declared[1:]:
            if other.default != declared[0].default:
                raise ParameterError(
                    f"{where}: set {name}; its defaults differ: {declared[0].default!r} in {declared[0].notebook}, "
                    f"{other.default!r} in {other.notebook}")
        resolved[name] = declared[0].default
    _check_together(resolved, where)
    return resolved


def _check_together(params: dict[str, Any], where: str) -> None:
    """Raises ParameterError for values that contradict each other: found before anything runs, not by the notebook that
    comes to it after hours."""
    last_state = params.get("last_state")
    if last_state is not None:
        from dflash_lib.hidden_states.schema import StoreError, state_datasets  # seconds, for PyTorch

        try:
            state_datasets(1, 1, params["encoding"], last_state, params["topk"])
        except StoreError as error:
            raise ParameterError(f"{where}: {error}") from error
    if last_state == "none" and params.get("kl_weight", 0) > 0:
        raise ParameterError(f"{where}: kl_weight {params['kl_weight']} needs the target's last state, and last_state "
                             "is none; set last_state: supervised, or kl_weight: 0")
    if {"steps", "block_size", "mask_token_id"} <= params.keys():
        from dflash_lib.drafter.recipe import check_compute
        from dflash_lib.workbench.variants import compute_options, train_options

        try:
            check_compute(train_options(params), compute_options(params))
        except ValueError as error:
            raise ParameterError(f"{where}: {error}") from error
    device = params.get("device")
    if params.get("num_processes", 1) > 1 and str(device).startswith("cuda:"):
        raise ParameterError(f"{where}: num_processes {params['num_processes']} on device {device}; with device: cuda "
                             "each process has a GPU of its own")
    if params.get("gpus") is not None and device is not None and device != "cuda":
        raise ParameterError(f"{where}: gpus {params['gpus']} with device {device}; gpus goes with device: cuda")


def _check_value(name: str, value: Any, where: str) -> None:
    """Raises ParameterError for a value out of its bounds."""
    if name in NEEDED and value == "":
        raise ParameterError(f"{where}: {name} is empty; give a path")
    if name == "gpus" and value is not None and (not value or min(value) < 0 or len(set(value)) < len(value)):
        raise ParameterError(f"{where}: gpus must name different devices, from 0 on, or be left out (null = all that "
                             f"nobody else is using), found {value!r}; how many the plan shares out is num_gpus")
    if name in BOUNDS and isinstance(value, int | float):
        operator, limit = BOUNDS[name]
        if not (value >= limit if operator == ">=" else value > limit):
            raise ParameterError(f"{where}: {name} must be {operator} {limit}, found {value!r}")


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML would silently keep the last, and that takes decimal
    integers only: YAML 1.1 reads 010 as 8 and 1:30 as 90; here they are text, which no number's place takes."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"given twice: {', '.join(sorted(twice))}",
                                                    node.start_mark)
        return super().construct_mapping(node, deep)


_INT = "tag:yaml.org,2002:int"
_UniqueKeyLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _INT and not (
        tag == "tag:yaml.org,2002:float" and ":" in pattern.pattern)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_UniqueKeyLoader.add_implicit_resolver(_INT, re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))
_UniqueKeyLoader.add_implicit_resolver(  # YAML 1.1's without its sexagesimal numbers
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
    list("-+0123456789."))
