"""A process that imported PyTorch and loaded a tiny target once, and forks a child for each job that a test asks for.

A child costs a few milliseconds in place of the seconds of a start, so a test can afford to kill many. The server is
this module run with `-m`; `ForkServer` is the test's end of it. They exchange lines of JSON over stdin and stdout, one
reply a request. A child runs one function of `jobs` and leaves its return value, or its error, in a file.
"""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[3]
HANGS_S = 240.0  # nothing here takes a twentieth of it alone; it only keeps a hang from lasting for ever


class Child:
    """A forked job. `pid` is not reused before `wait` returned its end."""

    def __init__(self, server: "ForkServer", pid: int, files: Path):
        self.server, self.pid, self.files = server, pid, files

    def wait(self) -> int | None:
        """None when the child has stopped itself (SIGSTOP), otherwise its end: 0, an exit code, or minus a signal."""
        return self.server.ask({"wait": self.pid})["code"]

    def begun(self) -> None:
        """Waits until the child has entered its job."""
        end = time.monotonic() + HANGS_S
        while not (self.files / "begun").exists():
            assert time.monotonic() < end, f"the child did not begin:\n{self.output()}"
            time.sleep(0.0005)

    def kill(self) -> int:
        """SIGKILL from outside; returns the end as `wait` does: not -9 when the child had ended by itself."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def output(self) -> str:
        return (self.files / "output.log").read_text(errors="replace")

    def answer(self) -> dict:
        """{"result": ...} or {"error": text, "type": name, "traceback": text}; {} when the child was killed."""
        path = self.files / "answer.json"
        text = path.read_text() if path.exists() else ""
        return json.loads(text) if text else {}

    def result(self):
        """What the job returned. Fails with the child's traceback when it raised or died."""
        code = self.wait()
        answer = self.answer()
        assert code == 0 and "result" in answer, f"ended with {code}: {answer.get('traceback')}\n{self.output()}"
        return answer["result"]

    def error(self) -> tuple[str, str]:
        """Type and text of what the job raised. Fails when it did not, or when it crashed."""
        code = self.wait()
        answer = self.answer()
        assert code == 0 and "error" in answer, f"ended with {code}, no error: {answer}\n{self.output()}"
        return answer["type"], answer["error"]


class ForkServer:
    """Context manager: the server process, with the target of `model` loaded."""

    def __init__(self, model: Path, folder: Path):
        self.model, self.folder, self.count = model, folder, 0

    def __enter__(self) -> "ForkServer":
        self.log = open(self.folder / "server.log", "wb")  # noqa: SIM115  closed in __exit__
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
               "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        self.process = subprocess.Popen([sys.executable, "-m", __name__, str(self.model), str(os.getpid())], cwd=ROOT,
                                        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log)
        self._reply()
        return self

    def __exit__(self, *_) -> None:
        self.process.stdin.close()  # its children end with it
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def ask(self, request: dict) -> dict:
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict:
        ready, _, _ = select.select([self.process.stdout], [], [], HANGS_S)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.process.kill()
            raise AssertionError(f"the fork server {'died' if ready else 'or its child hangs'}:\n"
                                 f"{(self.folder / 'server.log').read_text(errors='replace')[-3000:]}")
        return json.loads(line)

    def start(self, function: str, **args) -> Child:
        """Forks a child that calls `jobs.<function>(target, **args)`; paths in args become text."""
        self.count += 1
        files = self.folder / f"child-{self.count}"
        files.mkdir()
        request = {"start": function, "args": args, "files": str(files)}
        return Child(self, self.ask(json.loads(json.dumps(request, default=str)))["pid"], files)

    def run(self, function: str, **args):
        """Runs a job to its end and returns its result."""
        return self.start(function, **args).result()


def _run_child(target, function: str, args: dict, files: Path) -> None:
    """What the forked child does; never returns."""
    from dflash_lib.launch import die_with_parent

    code = 1
    try:
        die_with_parent()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(files / "output.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        jobs = importlib.import_module("tests.hidden_states.survival.jobs")
        answer = os.open(files / "answer.json", os.O_WRONLY | os.O_CREAT)  # before a job takes its rights away
        (files / "begun").touch()
        try:
            value = {"result": getattr(jobs, function)(target, **args)}
        except Exception as error:
            value = {"error": str(error), "type": type(error).__name__, "traceback": traceback.format_exc()}
        with open(answer, "wb") as f:
            f.write(json.dumps(value).encode())
        sys.stdout.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    """The server's loop: starts and waits, one request a line, until stdin ends."""
    model, parent = sys.argv[1:]
    from dflash_lib.launch import die_with_parent

    die_with_parent(int(parent))
    import torch

    from dflash_lib.target.capture import capture_batch
    from dflash_lib.target.loading import load_target
    from tests.hidden_states.survival import jobs  # noqa: F401  imported before the first fork

    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    target = load_target(model, audit="quick")
    assert target.identity
    capture_batch(target, [[5, 6, 7]], [1, 3, 4])
    replies = os.dup(1)
    os.dup2(2, 1)  # what else prints must not look like a reply

    def reply(value: dict) -> None:
        os.write(replies, json.dumps(value).encode() + b"\n")

    reply({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            status = os.waitpid(request["wait"], os.WUNTRACED)[1]
            reply({"code": None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)})
            continue
        pid = os.fork()
        if pid == 0:
            os.close(replies)
            _run_child(target, request["start"], request["args"], Path(request["files"]))
        reply({"pid": pid})


if __name__ == "__main__":
    main()
