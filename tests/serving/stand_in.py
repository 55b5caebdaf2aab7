"""A small HTTP server in a thread that stands in for vLLM: it answers by prompt, counts drafts as vLLM's /metrics does,
and misbehaves when told to."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NAME = "vllm:spec_decode_num_"
LABELS = 'engine="0",model_name="target"'


@dataclass
class Scripted:
    """An answer, with the drafts that each verify step accepted, those behind the answer's end included."""

    token_ids: list[int]
    accepted: Sequence[int]
    finish_reason: str = "length"
    text: str = ""


@dataclass
class Reply:
    """What the stand-in sends instead of the right answer. length: the Content-Length that it claims (more than it
    sends: the connection is cut)."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    delay_s: float = 0.0


class StandIn:
    """A context manager; `url` is its address.

    num_slots: drafts a step. misbehave: called with the path and how many requests of that path came before; what it
    returns is sent, None = behave. text_only: no token ids in answers; own_counts: a histogram in each answer, as
    --per-request-spec-decode-metrics gives; metrics: texts to replay at /metrics instead of own ones, bodies: of
    answers, both in the order of requests.
    """

    def __init__(self, answers: dict[tuple[int, ...], Scripted] | None = None, *, num_slots: int = 3,
                 misbehave: Callable[[str, int], Reply | None] = lambda path, number: None,
                 text_only: bool = False, own_counts: bool = False, metrics: Sequence[str] = (),
                 bodies: Sequence[str] = ()):
        self.answers, self.num_slots, self.misbehave = answers or {}, num_slots, misbehave
        self.text_only, self.own_counts = text_only, own_counts
        self.metrics, self.bodies = list(metrics), list(bodies)
        self.asked: list[dict] = []
        self.num_requests: dict[str, int] = {}
        self.num_steps, self.accepted, self.started = 0, [0] * num_slots, 1000.0

    def count(self, accepted: Sequence[int]) -> None:
        """Takes verify steps into the counters."""
        self.num_steps += len(accepted)
        for number in accepted:
            for slot in range(number):
                self.accepted[slot] += 1

    def restart(self) -> None:
        self.num_steps, self.accepted, self.started = 0, [0] * self.num_slots, self.started + 1

    def metrics_text(self) -> str:
        lines = ["# HELP process_start_time_seconds Start time.", f"process_start_time_seconds {self.started}",
                 f"# TYPE {NAME}drafts_total counter", f"{NAME}drafts_total{{{LABELS}}} {float(self.num_steps)}",
                 f"{NAME}drafts_created{{{LABELS}}} 1.79e+09",
                 f"{NAME}draft_tokens_total{{{LABELS}}} {float(self.num_steps * self.num_slots)}",
                 f"{NAME}accepted_tokens_total{{{LABELS}}} {float(sum(self.accepted))}"]
        for slot, number in enumerate(self.accepted):
            lines.append(f'{NAME}accepted_tokens_per_pos_total{{{LABELS},position="{slot}"}} {float(number)}')
            lines.append(f'{NAME}accepted_tokens_per_pos_created{{{LABELS},position="{slot}"}} 1.79e+09')
        return "\n".join(lines) + "\n"

    def completion(self, body: dict) -> str:
        self.asked.append(body)
        if self.bodies:
            return self.bodies.pop(0)
        answer = self.answers[tuple(body["prompt"])]
        choice = {"index": 0, "text": answer.text, "finish_reason": answer.finish_reason}
        if not self.text_only:
            choice["token_ids"] = answer.token_ids
        reply = {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"]),
                                                "completion_tokens": len(answer.token_ids)}}
        if self.own_counts:
            histogram = [list(answer.accepted).count(n) for n in range(self.num_slots + 1)]
            reply["metrics"] = {"speculative_decoding": {
                "acceptance_histogram": histogram, "num_draft_tokens": len(answer.accepted) * self.num_slots}}
        self.count(answer.accepted)
        return json.dumps(reply)

    def answer(self, path: str, raw: bytes) -> Reply:
        number = self.num_requests.get(path, 0)
        self.num_requests[path] = number + 1
        reply = self.misbehave(path, number)
        if reply is not None:
            return reply
        if path == "/v1/models":
            return Reply(body=json.dumps({"data": [{"id": "target"}]}).encode())
        if path == "/v1/completions":
            return Reply(body=self.completion(json.loads(raw)).encode())
        if path == "/metrics":
            return Reply(body=(self.metrics.pop(0) if self.metrics else self.metrics_text()).encode())
        return Reply(404, b"nothing here")

    def __enter__(self) -> "StandIn":
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                reply = stand_in.answer(self.path, raw)
                time.sleep(reply.delay_s)
                try:
                    self.send_response(reply.status)
                    for name, value in reply.headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(reply.body) if reply.length is None else reply.length))
                    self.end_headers()
                    self.wfile.write(reply.body)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the client has given up, as a test wants it to

            do_POST = do_GET

            def log_message(self, *arguments) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
