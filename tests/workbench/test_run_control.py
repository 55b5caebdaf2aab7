"""`status`, `stop`, `logs` and `run --detach`, from outside: real jobs of the tiny target in processes of their own."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from dflash_lib.files import hash_tree, write_json
from dflash_lib.job_status import JobStatus
from dflash_lib.locks import LOCK_NAME, folder_lock, lock_beside
from dflash_lib.workbench import run_control
from dflash_lib.workbench.run_control import print_logs, stop_run
from dflash_lib.workbench.run_state import describe_run, find_run
from dflash_lib.workbench.runs import REPOSITORY, RUN_STATUS, RunError, write_params
from tests.hidden_states.rows import make_prepared, make_store
from tests.notebooks.conftest import make_job

WAIT_S = 600  # only a hang reaches it


def wait_for(condition, what=lambda: "nothing happened"):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


def hear_the_terminal():
    """SIGHUP and SIGINT end the process again, whatever it inherited."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def command(*words):
    """Runs a command in a process; its exit code and what it printed."""
    done = subprocess.run([sys.executable, "-m", "dflash_lib", *map(str, words)], cwd=REPOSITORY, capture_output=True,
                          text=True, timeout=WAIT_S)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path):
    """A run folder in which nothing has happened yet."""
    (tmp_path / "run").mkdir()
    write_params(tmp_path / "run", {"store_dir": ""})
    return tmp_path / "run"


@pytest.fixture(scope="module")
def job(tiny_llama, tmp_path_factory):
    """The job of the tiny target with its conversations again and again: one worker is at it for a while."""
    folder = tmp_path_factory.mktemp("control")
    options = make_job(tiny_llama, folder)
    lines = [json.loads(line) for line in (folder / "conversations.jsonl").read_text().splitlines()]
    (folder / "conversations.jsonl").write_text("".join(
        json.dumps({**line, "id": f"{line['id']}-{copy}"}) + "\n" for copy in range(25) for line in lines))
    params = yaml.safe_load(options.params_file.read_text())
    params |= {"max_samples": None, "samples_per_shard": 4, "num_workers": 1, "num_audit_samples": 1}
    options.params_file.write_text(yaml.safe_dump(params))
    return options.params_file


@pytest.mark.slow
def test_a_detached_run_outlives_its_terminal_is_looked_at_stopped_and_goes_on(job, tmp_path):
    runs = tmp_path / "runs"
    folder = runs / "tiny"
    arguments = ["run", str(job), "--only", "04_extract", "--runs-dir", str(runs)]
    words = " ".join([sys.executable, "-m", "dflash_lib", *arguments, "--detach"])
    shell = subprocess.Popen(["bash", "-c", f"{words}; echo ready; sleep 600"], cwd=REPOSITORY, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                             preexec_fn=hear_the_terminal)  # pytest itself may run under nohup
    printed = []
    for line in shell.stdout:
        if line == "ready\n":
            break
        printed.append(line)
    printed = "".join(printed)
    assert "which goes on when this terminal closes" in printed, printed
    pid = int(re.search(r"started as process (\d+)", printed)[1])
    os.killpg(shell.pid, signal.SIGHUP)  # what a closed terminal sends
    shell.wait(WAIT_S)
    assert psutil.pid_exists(pid)

    code, text = command("status", folder)
    assert code == 0 and f"alive: run by process {pid} on " in text and "04_extract         running" in text, text
    code, text = command("run", job, "--only", "04_extract", "--runs-dir", runs, "--detach")
    assert code == 2 and f"process {pid} on" in text and "is working on this run" in text

    wait_for(lambda: any((folder / "states").glob("shard-*.h5")) or not psutil.pid_exists(pid),
             lambda: (folder / "logs" / "run.log").read_text())
    code, text = command("stop", folder)
    assert code == 0 and f"run: asked process {pid} to end" in text, text
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
    assert re.search(r"extraction: stopped at [\d,]+/[\d,]+ tokens \(\d\d? %\)", text), text
    assert "run: stopped at 0/1 notebooks" in text and "--only 04_extract" in text, text
    left = [line for line in (p.info["cmdline"] for p in psutil.process_iter(["cmdline"])) if str(folder) in str(line)]
    assert left == []
    assert not (folder / LOCK_NAME).exists() and not (folder / "states" / LOCK_NAME).exists()
    code, text = command("status", folder)
    assert code == 1 and "stopped: run" in text and "goes on from what is finished" in text, text
    code, text = command("logs", folder, "--lines", 5)
    assert code == 0 and f"==> {folder / 'logs' / 'run.log'}" in text and "interrupted" in text, text
    assert command("stop", folder) == (0, f"{folder}: nothing is running\n")

    code, text = command(*arguments, "--detach")
    assert code == 0, text
    code, text = command("logs", folder, "--follow")  # until it has ended
    assert code == 0 and "04_extract: passed" in text and "nothing is running" in text, text
    code, text = command("status", folder)
    assert code == 0 and "finished: run" in text and "04_extract         passed" in text, text
    assert re.search(r"extraction: finished, ([\d,]+)/\1 tokens \(100 %\)", text), text
    alone = ["run", str(job), "--only", "04_extract", "--runs-dir", str(tmp_path / "alone")]
    assert command(*alone)[0] == 0
    assert hash_tree(folder / "states", "*.h5") == hash_tree(tmp_path / "alone" / "tiny" / "states", "*.h5")


@pytest.mark.slow
def test_a_job_whose_launcher_was_killed(job, tmp_path):
    """SIGKILL to the run: `status` says so and exits 1."""
    runs = tmp_path / "runs"
    code, text = command("run", job, "--only", "04_extract", "--runs-dir", runs, "--detach")
    assert code == 0, text
    pid, folder = int(re.search(r"process (\d+)", text)[1]), runs / "tiny"
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
    code, text = command("status", folder)
    assert code == 1 and "killed: run, last seen" in text and "was killed" in text, text
    assert "04_extract         killed" in text


@pytest.mark.slow
def test_what_a_worker_raised_is_what_command_and_status_show(job, tmp_path):
    """The weights are no weights: found by the worker only."""
    params = yaml.safe_load(job.read_text())
    broken = tmp_path / "broken"
    shutil.copytree(params["model"], broken)
    weights, = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(params | {"model": str(broken)}))
    folder = tmp_path / "runs" / "job"
    code, text = command("run", tmp_path / "job.yaml", "--only", "04_extract", "--runs-dir", tmp_path / "runs")
    said = re.search(r"04_extract: cell \d+ raised \w+: .*", text)
    assert code == 1 and said, text
    assert weights.name in said[0] or "rank 0" in said[0], text
    code, text = command("status", folder)
    assert code == 1 and "failed: run" in text and said[0] in text, text


@pytest.mark.slow
def test_two_machines_extract_together(job, tmp_path):
    """Both on this one: the second is started detached, before the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    folder = tmp_path / "runs" / "tiny"
    words = ["run", job, "--runs-dir", tmp_path / "runs", "--only", "04_extract", "--nnodes", 2,
             "--rendezvous", endpoint]
    code, text = command(*words, "--node-rank", 1, "--detach")
    assert code == 0, text
    second = int(re.search(r"process (\d+)", text)[1])
    code, text = command(*words, "--node-rank", 0)
    assert code == 0 and "04_extract: passed" in text, text
    wait_for(lambda: not psutil.pid_exists(second) or psutil.Process(second).status() == "zombie")
    said = (folder / "logs" / "run.node1.log").read_text()
    assert "node 1 of 2: waits for node 0's job" in said and "node 1 of 2: the job has ended" in said, said
    code, text = command("status", folder)
    assert code == 0 and "extraction: finished" in text, text
    assert len(json.loads((folder / "logs" / "extraction.status.json").read_text())["workers"]) == 2
    code, text = command("logs", folder)
    assert "extraction_worker.node1.log" in text


@pytest.mark.parametrize("state, shown", [("stopped", "stopped"), ("failed", "killed")])
def test_a_job_that_a_stopped_run_took_down_was_stopped_too(folder, state, shown):
    """`stop` ends the notebook's kernel, which may have no time to say so while a training saves itself."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        process = {"pid": gone.pid, "started": 0.0, "host": socket.gethostname()}
    work = {"unit": "steps", "total": 9, "done": 4, "workers": {}, "rate": 0.0, "error": "", "process": process,
            "bytes_written": 0, "disk_free": None, "stage": "", "stage_began": 5.0, "start": 0}
    write_json(folder / RUN_STATUS, {**work, "what": "run", "state": state, "began": 5.0, "updated": 90.0})
    write_json(folder / "drafter" / "logs" / "training.status.json",
               {**work, "what": "training", "state": "running", "began": 50.0, "updated": 80.0})
    text, code = describe_run(folder)
    assert code == 1 and f"training: {shown}, 4/9 steps (44 %)" in text, text


def test_a_mistake_is_an_error_before_anything_is_detached(tmp_path):
    (tmp_path / "job.yaml").write_text("max_sampels: 3\n")
    code, text = command("run", tmp_path / "job.yaml", "--runs-dir", tmp_path / "runs", "--detach")
    assert code == 2 and "did you mean 'max_samples'?" in text and not (tmp_path / "runs").exists()


HOLDER = """
import sys, time
from dflash_lib.job_status import JobStatus
from dflash_lib.locks import folder_lock
store, status = sys.argv[1:]
with folder_lock(store, "extraction"), JobStatus(status, "extraction", 10, "tokens") as job:
    try:
        job.worker(0, done=4, kept=4, seconds=1.0)
        print("ready", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        print("as Ctrl-C", flush=True)
        raise
"""


@pytest.fixture
def by_hand(folder, tmp_path):
    """A job that a notebook executed by hand runs: it holds the store's lock, and no run has the folder's."""
    def start(store):
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)" + HOLDER
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(store), str(folder / "logs" / "extraction.status.json")], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=REPOSITORY)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    started = []
    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_job_of_a_notebook_that_is_executed_by_hand(by_hand, folder, tmp_path, elsewhere):
    store = tmp_path / "big disk" if elsewhere else folder / "states"
    if elsewhere:
        write_params(folder, {"store_dir": str(store)})
    process = by_hand(store)
    text, code = describe_run(folder)
    assert code == 0 and f"alive: extraction by process {process.pid} on" in text, text
    assert "extraction: running, 4/10 tokens (40 %)" in text and "  worker 0" in text
    out = io.StringIO()
    assert stop_run(folder, out) == 0
    assert process.stdout.readline() == "as Ctrl-C\n"
    assert "extraction: stopped at 4/10 tokens (40 %)" in out.getvalue()
    assert "execute the notebook's cell again" in out.getvalue()


@pytest.mark.slow
def test_a_cell_of_a_jupyter_kernel_is_interrupted_its_kernel_stays_and_goes_on(folder, tiny_llama, tmp_path):
    """As JupyterLab does it: a kernel of its own, which holds the lock of the store while the cell extracts."""
    from jupyter_client.manager import start_new_kernel

    prepared = make_prepared(tiny_llama, num_samples=30)
    prepared.save(tmp_path / "prepared")
    cell = f"""
import os
from dflash_lib.hidden_states import extraction
from tests.hidden_states.rows import make_options
extraction.WORKER = "tests.hidden_states.faulty_worker"
os.environ["DFLASH_TEST_FAULT"] = '{{"kind": "none", "seconds": ' + seconds + '}}'
extraction.start_extraction({str(folder / "states")!r}, {str(tiny_llama.path)!r}, {str(tmp_path / "prepared")!r},
                            make_options(samples_per_shard=2), {str(folder / "logs")!r})
"""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}
    manager, client = start_new_kernel(kernel_name="python3", env=environment, cwd=str(REPOSITORY))
    try:
        # else the kernel aborts what comes within moments of the error, and the next request is sent at once here
        cell_id = client.execute(f"seconds = '1.0'\n{cell}", stop_on_error=False)
        wait_for(lambda: any((folder / "states").glob("shard-*.h5")))
        code, text = command("stop", folder)
        assert code == 0 and "extraction: stopped at" in text and "execute the notebook's cell again" in text, text
        reply = {"parent_header": {}}
        while reply["parent_header"].get("msg_id") != cell_id:
            reply = client.get_shell_msg(timeout=WAIT_S)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert not (folder / "states" / LOCK_NAME).exists()
        reply = client.execute(f"seconds = '0'\n{cell}", reply=True, timeout=WAIT_S)
        assert reply["content"]["status"] == "ok", reply["content"]
        code, text = command("status", folder)
        assert code == 0 and "finished: extraction" in text, text
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    make_store(tmp_path / "alone", tiny_llama, prepared, samples_per_shard=2)
    assert hash_tree(folder / "states", "*.h5") == hash_tree(tmp_path / "alone", "*.h5")


def test_a_store_that_another_run_writes_into_is_left_alone(by_hand, folder, tmp_path):
    store = tmp_path / "shared"
    process = by_hand(store)
    (folder / "logs" / "extraction.status.json").unlink()  # the status is in the other run's folder
    write_params(folder, {"store_dir": str(store)})
    text, code = describe_run(folder)
    assert code == 0 and "nothing is running" in text and "for another run" in text
    with pytest.raises(RunError, match=f"process {process.pid} on .* for another run"):
        stop_run(folder, io.StringIO())
    assert process.poll() is None


def test_a_holder_on_another_host_is_named_and_not_signalled(folder, monkeypatch):
    with folder_lock(folder, "run"):
        lock = folder / LOCK_NAME
        holder = json.loads(lock.read_text())
        lock.write_text(json.dumps({**holder, "host": "node7"}))
        monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("signalled"))
        with pytest.raises(RunError, match=f"runs on node7 .*Call it there: python -m dflash_lib stop {folder}"):
            stop_run(folder, io.StringIO())
        text, code = describe_run(folder)
        assert code == 0 and "on node7 (which cannot be asked from here" in text
        lock.write_text(json.dumps(holder))


def test_one_that_does_not_end_is_said(folder, monkeypatch):
    monkeypatch.setattr(run_control, "STOP_S", 0.3)
    parent, name = lock_beside(folder / "drafter")
    code = ("import signal, sys, time; from dflash_lib.locks import folder_lock\n"
            "with folder_lock(sys.argv[1], 'training', sys.argv[2]):\n"
            "    signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)")
    process = subprocess.Popen([sys.executable, "-c", code, str(parent), name], cwd=REPOSITORY, text=True,
                               stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == "ready\n"
        out = io.StringIO()
        assert stop_run(folder, out) == 1
        assert f"process {process.pid} has not ended" in out.getvalue()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("ending", "code", "said"), [
    (None, 0, "finished: extraction"), (ValueError("rank 1: no memory"), 1, "rank 1: no memory"),
    (KeyboardInterrupt(), 1, "stopped: extraction")])
def test_the_exit_code_and_the_last_error(folder, ending, code, said):
    (folder / "logs").mkdir()
    (folder / "logs" / "extraction_worker.log").write_text("words of the workers\n")
    try:
        with JobStatus(folder / "logs" / "extraction.status.json", "extraction", 10, "tokens"):
            if ending is not None:
                raise ending
    except (ValueError, KeyboardInterrupt):
        pass
    text, found = describe_run(folder)
    assert found == code and said in text
    assert (f"log: {folder / 'logs' / 'extraction_worker.log'}" in text) is (ending is not None)
    assert "free at" in text


def test_a_run_without_status_is_judged_by_its_results(folder):
    text, code = describe_run(folder)
    assert code == 0 and "nothing is running" in text and "01_capacity        not run" in text
    write_json(folder / "results" / "01_capacity.json", {"passed": True, "results": {}, "finished": "2026-01-02T03:04"})
    text, code = describe_run(folder)
    assert code == 0 and "01_capacity        passed   2026-01-02T03:04" in text
    write_json(folder / "results" / "01_capacity.json", {"passed": False, "results": {}})
    assert describe_run(folder)[1] == 1
    (folder / "results" / "01_capacity.json").write_text('{"passed": tr')
    (folder / RUN_STATUS).parent.mkdir()
    (folder / RUN_STATUS).write_text("")  # what power cuts leave
    assert describe_run(folder)[1] == 0


def test_which_run_is_meant(folder, tmp_path, monkeypatch):
    assert find_run(folder) == folder
    monkeypatch.chdir(tmp_path)
    assert find_run(Path("run")) == folder
    (tmp_path / "run.yaml").write_text(f"runs_dir: {tmp_path}\n")
    assert find_run(tmp_path / "run.yaml") == folder
    for wrong in ("nowhere", tmp_path):
        with pytest.raises(RunError, match="no run folder"):
            find_run(wrong)
    code, text = command("status", "nowhere")
    assert code == 2 and text.startswith("error: nowhere: no run folder") and text.count("\n") == 1


def test_logs_show_the_newest_last_and_follow_what_is_added(folder):
    with pytest.raises(RunError, match="no logs yet"):
        print_logs(folder, 5, False, io.StringIO())
    (folder / "logs").mkdir()
    (folder / "drafter" / "logs").mkdir(parents=True)
    for age, path in ((100, folder / "drafter/logs/training_job.log"), (10, folder / "logs" / "run.log")):
        path.write_text("".join(f"line {i}\n" for i in range(30)))
        os.utime(path, (time.time() - age, time.time() - age))
    out = io.StringIO()
    print_logs(folder, 2, False, out)
    names = re.findall(r"==> (\S+) ", out.getvalue())
    assert names == [str(folder / "drafter/logs/training_job.log"), str(folder / "logs/run.log")]
    assert out.getvalue().count("line 28\nline 29\n") == 2 and "line 27" not in out.getvalue()

    class Adding(io.StringIO):
        """Writes to a log when it sees the end of what was there."""

        def write(self, text):
            if text == "line 28\nline 29\n" and not self.getvalue().count("line 29"):
                with open(folder / "drafter/logs/training_job.log", "a") as file:
                    file.write("added\n")
            return super().write(text)

    out = Adding()
    print_logs(folder, 2, True, out)
    assert out.getvalue().endswith(f"added\n{folder}: nothing is running (any more)\n")
