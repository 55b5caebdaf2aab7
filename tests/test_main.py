import subprocess
import sys

import h5py
import pytest

from dflash_lib import __main__ as command
from dflash_lib import commands
from dflash_lib.files import read_json
from dflash_lib.locks import folder_lock
from dflash_lib.workbench.pipeline import PipelineResult, Stage
from dflash_lib.workbench.runs import REPOSITORY, open_run, write_params
from tests.hidden_states.rows import make_prepared, make_store
from tests.workbench.fake_notebooks import finishing, opening, write_notebook
from tests.workbench.fake_notebooks import write_params as write_job


@pytest.fixture
def job(tmp_path, monkeypatch):
    """One fake notebook in place of the repository's; returns the folder with job.yaml."""
    write_notebook(tmp_path / "notebooks", "01_a", "y: int = 1\n", opening("01_a", "y"), "run.check('small', y, 5)",
                   finishing("{'y': y}"))
    write_job(tmp_path)
    options = commands.PipelineOptions
    monkeypatch.setattr(commands, "PipelineOptions", lambda **k: options(**k, notebooks_dir=tmp_path / "notebooks"))
    return tmp_path


def call(*arguments):
    return command.main([str(argument) for argument in arguments])


def test_run_ends_with_a_table_and_the_reports_path(job, capsys):
    assert call("run", job / "job.yaml", "--runs-dir", job / "runs", "--run-id", "first") == 0
    printed = capsys.readouterr().out
    assert f"report: {job}/runs/first/report/index.html" in printed
    assert (job / "runs" / "first" / "report" / "01_a.html").is_file()
    row = next(line for line in printed.splitlines() if line.startswith("01_a "))
    assert row.split()[1:3] == ["passed", "1/1"] and row.endswith("So.")


def test_a_failing_check_exits_1_and_is_told_last(job, capsys):
    write_job(job, y=9)
    assert call("run", job / "job.yaml", "--runs-dir", job / "runs") == 1
    caught = capsys.readouterr()
    assert "01_a: 1 of 1 checks failed" in caught.err and "small: measured 9, must be <= 5" in caught.err
    assert "report: " in caught.out, "the report is built for a failed run too"


@pytest.mark.parametrize(("arguments", "message"), [
    (["run", "none.yaml"], "none.yaml: no such parameter file"),
    (["report", "nowhere"], "nowhere: no params.yaml"),
    (["regenerate", "a.jsonl", "b.jsonl", "--model", "nowhere"], "nowhere: no such model folder"),
])
def test_user_errors_are_one_line_and_exit_2(arguments, message, capsys):
    assert call(*arguments) == 2
    caught = capsys.readouterr()
    assert message in caught.err and caught.err.startswith("error: ") and "Traceback" not in caught.err


def test_a_misspelled_key_in_the_shell(tmp_path):
    """The whole way: interpreter, real notebooks' declarations, exit code."""
    (tmp_path / "job.yaml").write_text("max_sampels: 3\n")
    done = subprocess.run([sys.executable, "-m", "dflash_lib", "run", str(tmp_path / "job.yaml")], cwd=REPOSITORY,
                          capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "no notebook declares the parameter 'max_sampels'; did you mean 'max_samples'?" in done.stderr


def test_a_destination_that_cannot_be_written_is_one_line(job, capsys):
    (job / "file").write_text("")
    assert call("run", job / "job.yaml", "--runs-dir", job / "file") == 2
    caught = capsys.readouterr()
    assert "Not a directory" in caught.err and str(job / "file") in caught.err and "Traceback" not in caught.err


def test_bad_usage_exits_2(capsys):
    with pytest.raises(SystemExit) as caught:
        call("train")
    assert caught.value.code == 2


def test_interruption_exits_130(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run_pipeline", interrupt)
    assert call("run", "job.yaml") == 130
    assert "the same command goes on" in capsys.readouterr().err


NODES = ["--only", "04_extract", "--nnodes", "2", "--node-rank", "0", "--rendezvous", "host0:29500"]


@pytest.mark.parametrize(("options", "message"), [
    (["--nnodes", "2", "--node-rank", "0", "--rendezvous", "host0:29500"], "add --only 04_extract"),
    (["--only", "06_train", *NODES[2:]], "only the extraction spans machines"),
    (["--only", "04_extract", "--node-rank", "1"], "--node-rank goes with --nnodes"),
    (["--rendezvous", "host0:1"], "--rendezvous goes with --nnodes"),
    (NODES[:4], "needs --node-rank and --rendezvous"),
    (NODES[:6], "needs --rendezvous"),
    ([*NODES[:5], "2", *NODES[6:]], "ranks from 0 to 1, got rank 2"),
    ([*NODES[:7], "host0"], "HOST:PORT"),
    ([*NODES, "--plan"], "leave out --nnodes"),
    (["--detach", "--plan"], "leave out --detach"),
])
def test_machines_that_do_not_go_together_are_one_line(job, options, message, capsys):
    assert call("run", job / "job.yaml", "--runs-dir", job / "runs", *options) == 2
    caught = capsys.readouterr()
    assert message in caught.err and caught.err.count("\n") == 1 and not (job / "runs").exists()


def test_machine_0_tells_the_kernel_and_the_others_join_the_job(job, monkeypatch, capsys):
    from dflash_lib.hidden_states import extraction
    from dflash_lib.launch import Nodes

    write_notebook(job / "notebooks", "04_extract", "num_workers: int = 3\ngpus: list[int] | None = None\n",
                   opening("04_extract", "num_workers", "gpus"),
                   "import os\nprint('nodes', os.environ['DFLASH_NODES'])", finishing())
    command = ["run", job / "job.yaml", "--runs-dir", job / "runs", *NODES]
    for _ in range(2):  # a store that is complete does not let the others wait
        assert call(*command) == 0
        assert "nodes 2 0 host0:29500" in capsys.readouterr().out
    monkeypatch.delenv("DFLASH_NODES", raising=False)
    assert call(*command[:4], "--only", "04_extract", "--force") == 0
    assert "nodes \n" in capsys.readouterr().out, "one machine"
    before = sorted(path for path in (job / "runs").rglob("*"))
    seen = []
    monkeypatch.setattr(extraction, "join_extraction", lambda *a: seen.append(a))
    command[command.index("--node-rank") + 1] = "1"
    write_job(job, gpus=[0, 2])
    with folder_lock(job / "runs" / "job", "run"):  # node 0's
        assert call(*command) == 0
    assert seen == [(job / "runs" / "job" / "logs", Nodes(2, 1, "host0:29500"), [0, 2], 3)]
    assert sorted(path for path in (job / "runs").rglob("*")) == before, "it leaves the run folder alone"


def test_summary_table_of_stages_that_did_not_run(tmp_path):
    write_params(tmp_path, {})
    run = open_run(__notebook_name__="01_a", run_dir=str(tmp_path))
    run.finish(question="q", outcome="Fine.")
    table = commands.summary_table(PipelineResult(tmp_path, [Stage("01_a", "current"), Stage("02_b", "not run")]))
    first, second = (line.split() for line in table.splitlines()[1:])
    assert [*first[:3], *first[4:]] == ["01_a", "current", "0/0", "Fine."]  # behind the third come seconds
    assert second == ["02_b", "not", "run", "-", "0", "-"]


def test_describe_and_verify_a_store(tiny_llama, tmp_path, capsys):
    prepared = make_prepared(tiny_llama, num_samples=4)
    prepared.save(tmp_path / "prepared")
    make_store(tmp_path / "states", tiny_llama, prepared)
    assert call("describe", tmp_path / "states") == 0
    assert "outputs of layers [1, 3, 4]" in capsys.readouterr().out
    assert call("verify", tmp_path / "states", tmp_path / "prepared") == 0
    assert "4 samples\nok    checksums" in capsys.readouterr().out
    with h5py.File(tmp_path / "states" / "shard-00000.h5", "r+") as file:
        file["input_ids"][0] += 1
    assert call("verify", tmp_path / "states", tmp_path / "prepared") == 1
    assert "FAIL  token ids: 1, first: " in capsys.readouterr().out
    assert call("verify", tmp_path / "nowhere", tmp_path / "prepared") == 2


def test_prompts_writes_user_turns(tiny_llama_folder, tmp_path, capsys, monkeypatch):
    from dflash_lib.target import generate

    # random weights end a turn once in 384 tokens; here one token in four ends it
    monkeypatch.setattr(generate, "stop_token_ids", lambda target: list(range(2, 384, 4)))
    arguments = ["prompts", tmp_path / "out.jsonl", "--model", tiny_llama_folder, "--num", "3", "--batch-size", "300"]
    assert call(*arguments) == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3
    assert "3 prompts out of 300 drawn" in capsys.readouterr().out
    assert call(*arguments) == 2, "the destination is there already"


def test_regenerate_writes_conversations(tiny_llama_folder, tmp_path, capsys):
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"id": "a", "messages": [{"role": "user", "content": "What is rain?"}]}\n')
    arguments = ["regenerate", source, tmp_path / "out.jsonl", "--model", tiny_llama_folder, "--max-new-tokens", "4"]
    assert call(*arguments) == 0
    assert "1 conversations" in capsys.readouterr().out
    assert '"assistant"' in (tmp_path / "out.jsonl").read_text()
    assert read_json(tmp_path / "out.jsonl.meta.json")["thinking"] == "default"
    more = ["--thinking", "off", "--template-kwargs", '{"date": "1 May"}']
    assert call(*arguments[:2], tmp_path / "off.jsonl", *arguments[3:], *more) == 0
    meta = read_json(tmp_path / "off.jsonl.meta.json")
    assert meta["thinking"] == "off" and meta["template_kwargs"] == {"date": "1 May"}
    for wrong, message in ((["--thinking", "yes"], "invalid choice: 'yes'"), (["--template-kwargs", "{"], "not valid"),
                           (["--template-kwargs", "[]"], "no JSON object, such as"),
                           (["--batch-size", "0"], "--batch-size: '0': a whole number of at least 1"),
                           (["--template-kwargs", '{"tokenize": true}'], "tokenize cannot be set here")):
        try:
            code = call(*arguments[:2], tmp_path / "no.jsonl", *arguments[3:], *wrong)
        except SystemExit as error:
            code = error.code
        assert code == 2 and message in capsys.readouterr().err
    assert call(*arguments) == 2, "the destination is there already"


@pytest.mark.parametrize("arguments", [["evaluate", "--num-prompts", "-1"], ["evaluate", "--max-new-tokens", "0"],
                                       ["prompts", "out", "--model", "m", "--num", "1.5"]])
def test_counts_below_one_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        command.main(arguments)
    assert refused.value.code == 2 and "a whole number of at least 1 is needed" in capsys.readouterr().err
