"""The real check's server: up while it is needed, gone with all its processes behind it, whatever happens."""

import os
import stat
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.serving import check_vllm

FAKE = """#!{python}
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

folder, arguments = Path({folder!r}), sys.argv[1:]
(folder / "arguments").write_text("\\n".join(arguments))
if {broken}:
    sys.exit("no such drafter")
engine = subprocess.Popen(["sleep", "1000"])
(folder / "engine").write_text(str(engine.pid))

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


def fake_python(folder: Path, broken: bool = False) -> str:
    """A `python` that behaves as a vLLM server: answers /health, and has an engine process of its own."""
    path = folder / "python"
    path.write_text(FAKE.format(python=sys.executable, folder=str(folder), broken=broken))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("fault", [None, KeyboardInterrupt])
def test_up_inside_and_gone_behind(tmp_path, fault):
    seen = {}
    try:
        target, drafter = Path("/the/target"), Path("/the/drafter")
        with check_vllm.vllm_server(fake_python(tmp_path), target, drafter, 7, "float32", tmp_path / "log") as url:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health") as response:
                seen["status"] = response.status
            seen["engine"] = int((tmp_path / "engine").read_text())
            assert is_running(seen["engine"])
            if fault:
                raise fault
    except KeyboardInterrupt:
        assert fault
    deadline = time.monotonic() + 30
    while is_running(seen["engine"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert seen["status"] == 200 and not is_running(seen["engine"])
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"] and "/the/target" in arguments
    assert '{"method": "dflash", "model": "/the/drafter", "num_speculative_tokens": 7}' in arguments
    assert os.environ.get("VLLM_CPU_KVCACHE_SPACE") is None  # ours stays as it was


def test_a_server_that_does_not_come_up_shows_its_log(tmp_path):
    with pytest.raises(RuntimeError, match="exit code 1.*\n.*no such drafter"):
        with check_vllm.vllm_server(fake_python(tmp_path, broken=True), Path("/t"), Path("/d"), 7, "float32",
                                    tmp_path / "log"):
            raise AssertionError("it is not up")
