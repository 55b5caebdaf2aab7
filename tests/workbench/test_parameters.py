import pytest

from dflash_lib.workbench.parameters import (
    BOUNDS,
    NEEDED,
    ParameterError,
    all_declarations,
    declared_parameters,
    read_parameters_file,
    resolve_parameters,
)
from dflash_lib.workbench.runs import notebook_paths
from tests.workbench.fake_notebooks import write_notebook


def declare(folder, lines, name="01_a"):
    return declared_parameters(write_notebook(folder, name, lines))


def test_declarations_are_read_with_type_default_and_comment(tmp_path):
    found = declare(tmp_path, 'steps: int = 400  # optimizer steps\nids: list[int] | None = None  # null = the rule\n'
                              'rate: float = -3e-3\nname: str = "a # b"  # with a hash\n')
    assert list(found) == ["run_dir", "steps", "ids", "rate", "name"]
    steps = found["steps"]
    assert (steps.default, steps.annotation, steps.comment) == (400, "int", "optimizer steps")
    assert found["ids"].default is None and found["rate"].default == -0.003 and found["rate"].comment == ""
    assert (found["name"].default, found["name"].comment) == ("a # b", "with a hash")


@pytest.mark.parametrize(("lines", "message"), [
    ("steps = 3\n", "line 2: write `name: type = literal"),
    ("steps: int\n", "write `name: type"),
    ("steps: int = 2 * 3\n", "plain literal"),
    ("def f(): pass\n", "write `name: type"),
    ("steps: int = 3\nsteps: int = 4\n", "declared twice"),
    ("steps: int = 'three'\n", "steps must be int"),
    ("steps: Steps = 3\n", "annotation 'Steps' is not understood"),
    ("steps: int = (\n", "line 2"),
])
def test_a_bad_parameters_cell_is_refused_with_its_line(tmp_path, lines, message):
    with pytest.raises(ParameterError, match="01_a.ipynb") as caught:
        declare(tmp_path, lines)
    assert message in str(caught.value)


def test_a_notebook_without_parameters_cell_or_run_dir_is_refused(tmp_path):
    path = write_notebook(tmp_path, "01_a", "")
    path.write_text(path.read_text().replace('"parameters"', '"others"'))
    with pytest.raises(ParameterError, match="0 cells are tagged"):
        declared_parameters(path)
    path = write_notebook(tmp_path, "01_a", "")
    path.write_text(path.read_text().replace("run_dir: str", "folder: str"))
    with pytest.raises(ParameterError, match="must declare run_dir"):
        declared_parameters(path)


def test_one_name_cannot_have_two_types(tmp_path):
    notebooks = [write_notebook(tmp_path, "01_a", "steps: int = 3\n"),
                 write_notebook(tmp_path, "02_b", "steps: str = ''\n")]
    with pytest.raises(ParameterError, match="steps is annotated int in 01_a and str in 02_b"):
        all_declarations(notebooks)


@pytest.fixture
def declarations(tmp_path):
    return all_declarations([
        write_notebook(tmp_path, "01_a", "learning_rate: float = 1e-3\nseed: int = 0\nids: list | None = None\n"),
        write_notebook(tmp_path, "02_b", "block_size: int = 8\nseed: int = 1\n")])


def test_a_misspelled_key_is_refused_with_the_nearest_known(declarations):
    with pytest.raises(ParameterError, match="job.yaml: no notebook declares the parameter 'blok_size'; did you mean "
                                             "'block_size'"):
        resolve_parameters({"blok_size": 8, "seed": 0}, declarations, "job.yaml")
    with pytest.raises(ParameterError, match="known: block_size, ids, learning_rate, seed"):
        resolve_parameters({"zzz": 8, "seed": 0}, declarations, "job.yaml")
    with pytest.raises(ParameterError, match="--run-id"):
        resolve_parameters({"run_dir": "x"}, declarations, "job.yaml")


def test_types_are_checked_and_yaml_floats_understood(declarations):
    resolved = resolve_parameters({"learning_rate": "3e-3", "seed": 5, "ids": [1, 2]}, declarations, "job.yaml")
    assert resolved == {"learning_rate": 0.003, "seed": 5, "ids": [1, 2], "block_size": 8}
    assert resolve_parameters({"learning_rate": 1, "seed": 5}, declarations, "")["learning_rate"] == 1.0
    for bad in ({"seed": "5"}, {"seed": True}, {"seed": 5.0}, {"learning_rate": "fast"}, {"ids": 3}):
        with pytest.raises(ParameterError, match="must be"):
            resolve_parameters({"seed": 5, **bad}, declarations, "job.yaml")


def test_a_key_left_out_needs_one_default(declarations):
    with pytest.raises(ParameterError, match="set seed; its defaults differ: 0 in 01_a, 1 in 02_b"):
        resolve_parameters({}, declarations, "job.yaml")


def test_parameter_files_that_are_not_flat_mappings_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such parameter file"):
        read_parameters_file(tmp_path / "none.yaml")
    path = tmp_path / "job.yaml"
    for text, message in (("- a\n- b\n", "expected lines"), ("a: [1\n", "not valid YAML"), ("1: 2\n", "expected lines"),
                          ("a: 1\nb: 2\na: 3\n", "given twice: a"), ("a: !!python/object:os.system x\n", "not valid")):
        path.write_text(text)
        with pytest.raises(ParameterError, match=message):
            read_parameters_file(path)
    path.write_text("# nothing\n")
    assert read_parameters_file(path) == {}


@pytest.mark.parametrize("text, value", [
    ("010", "010"), ("1:30", "1:30"), ("0x10", "0x10"), ("1:30.5", "1:30.5"), (".", "."), ("12", 12), ("-5", -5),
    ("1_000", 1000), ("0", 0), ("0.5", 0.5), (".5", 0.5), ("1.", 1.0), ("3.0e-3", 0.003), ("[1, 2]", [1, 2])])
def test_numbers_in_yaml_are_what_they_look_like(tmp_path, text, value):
    """YAML 1.1 reads 010 as 8, 1:30 as 90 and 0x10 as 16."""
    (tmp_path / "job.yaml").write_text(f"a: {text}\n")
    assert read_parameters_file(tmp_path / "job.yaml") == {"a": value}


def test_merge_keys_and_anchors(tmp_path):
    (tmp_path / "job.yaml").write_text("kept: &kept {x: 1, y: 2}\nmine:\n  <<: *kept\n  x: 3\n")
    assert read_parameters_file(tmp_path / "job.yaml")["mine"] == {"x": 3, "y": 2}
    (tmp_path / "job.yaml").write_text("mine: {x: 3, x: 4}\n")
    with pytest.raises(ParameterError, match="given twice: x"):
        read_parameters_file(tmp_path / "job.yaml")


@pytest.mark.parametrize("name, value, bound", [
    ("learning_rate", 0, "> 0"), ("learning_rate", float("nan"), "float"), ("learning_rate", "inf", "float"),
    ("gamma", -1, "> 0"), ("warmup_steps", -1, ">= 0"), ("drafter_intermediate_size", 0, ">= 1"),
    ("draft_vocab_size", 0, ">= 1"), ("validation_samples", 0, ">= 1"), ("validation_interval", -1, ">= 1"),
    ("samples_per_shard", 0, ">= 1"), ("threads", 0, ">= 1"), ("seed", -1, ">= 0"), ("eval_max_new_tokens", 1, ">= 2"),
    ("min_acceptance_length", float("nan"), "float"), ("max_disk_tb", float("nan"), "float"), ("model", "", "empty"),
    ("conversations", "", "empty"), ("steps", 0, ">= 1"), ("max_length", 1, ">= 2")])
def test_a_value_out_of_its_bounds_is_refused_before_anything_runs(name, value, bound):
    declarations = all_declarations(notebook_paths())
    with pytest.raises(ParameterError, match=f"job.yaml: {name} (must be|is) {bound}"):
        resolve_parameters({name: value}, declarations, "job.yaml")


def test_every_bound_is_of_a_declared_parameter():
    declared = {name for of_notebook in all_declarations(notebook_paths()).values() for name in of_notebook}
    assert declared.issuperset(BOUNDS) and declared.issuperset(NEEDED)


def test_a_file_that_aliases_blow_up_is_refused(tmp_path):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (tmp_path / "job.yaml").write_text("\n".join(lines))
    with pytest.raises(ParameterError, match="10000 values at most"):
        read_parameters_file(tmp_path / "job.yaml")
    for depth in (30, 3000):
        (tmp_path / "job.yaml").write_text("a: " + "{x: " * depth + "1" + "}" * depth)
        with pytest.raises(ParameterError, match="nested 20 deep|not valid YAML"):
            read_parameters_file(tmp_path / "job.yaml")


@pytest.mark.parametrize("changes, message", [
    ({"last_state": "none"}, "kl_weight 0.7 needs the target's last state, and last_state is none"),
    ({"slot_weighting": "dpace"}, "slot_weighting: dpace weighs a slot by all .*set slots_per_anchor to 8"),
    ({"slot_weighting": "dpcae"}, "slot_weighting is one of"), ({"precision": "fp16"}, ".* precision one of"),
    ({"num_sliding_layers": 2}, "num_sliding_layers must be 0 to num_layers"),
    ({"num_sliding_layers": 1}, "num_sliding_layers 1 needs a sliding_window"),
    ({"sliding_window": 64}, "sliding_window 64 with num_sliding_layers 0: no layer would have it"),
    ({"spike_factor": 0.5}, "spike_factor must be more than 1"), ({"dpace_alpha": 2.0}, "dpace_alpha must be 0 to 1"),
    ({"shard": True}, "shard: weights can be divided among processes only"),
    ({"shard": True, "num_processes": 2, "optimizer": "muon"}, "optimizer: muon needs whole matrices"),
    ({"num_processes": 8, "batch_samples": 4, "device": "cuda"}, "batch_samples: 4 conversations a step leave some"),
    ({"accumulate": 3, "batch_samples": 2}, ".* = 3 passes with nothing to compute; set batch_samples to 3 or more"),
    ({"num_processes": 2, "device": "cuda:0"}, "num_processes 2 on device cuda:0; with device: cuda each process"),
    ({"last_state": "topk"}, "topk: 0 with last_state 'topk'"), ({"topk": 8}, "topk: 8 with last_state 'supervised'"),
    ({"encoding": "fp16"}, "encoding: 'fp16' is not known"), ({"last_state": "some"}, "last_state: 'some' is not"),
    ({"gpus": [0], "device": "cpu"}, r"gpus \[0\] with device cpu"),
    ({"gpus": [1], "device": "cuda:0"}, r"gpus \[1\] with device cuda:0")])
def test_values_that_contradict_each_other_are_refused_before_anything_runs(changes, message):
    declarations = all_declarations(notebook_paths())
    with pytest.raises(ParameterError, match=f"job.yaml: {message}"):
        resolve_parameters({"mask_token_id": 3, **changes}, declarations, "job.yaml")
    for fine in ({"last_state": "none", "kl_weight": 0.0}, {"last_state": "topk", "topk": 8},
                 {"gpus": [0], "device": "cuda"}):
        resolve_parameters({"mask_token_id": 3, **fine}, declarations, "job.yaml")
