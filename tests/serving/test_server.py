"""The client: right answers, and every way in which a server may misbehave is an error that says what to do."""

import socket

import pytest

from dflash_lib.decoding import server as server_module
from dflash_lib.decoding.server import (
    CutConnection,
    DraftCounts,
    NoMetrics,
    Server,
    ServerError,
    ServerOptions,
    parse_metrics,
)
from tests.serving.stand_in import Reply, Scripted, StandIn

FAST = ServerOptions(timeout_s=5.0, max_retries=2, max_wait_s=0.02, settle_s=0.1)
ANSWER = {(1, 2): Scripted([5, 6, 7, 8, 9, 10], [2, 0, 1], text="five")}


def on(path: str, reply: Reply, times: int = 10**9):
    """Misbehaves at one path, the first so many times."""
    return lambda asked, number: reply if asked == path and number < times else None


def test_a_completion_asks_for_greedy_text_of_token_ids():
    with StandIn(ANSWER) as stand_in:
        server = Server(stand_in.url + "/v1/", FAST)
        answer = server.complete(server.model(), [1, 2], 6)
    assert answer.token_ids == [5, 6, 7, 8, 9, 10] and answer.num_tokens == 6 and answer.text == "five"
    assert answer.counts is None
    body, = stand_in.asked
    assert body["prompt"] == [1, 2] and body["max_tokens"] == 6 and body["temperature"] == 0
    assert body["model"] == "target" and body["return_token_ids"] is True and "messages" not in body


def test_an_answers_own_counts_and_text_without_ids():
    with StandIn(ANSWER, own_counts=True, text_only=True) as stand_in:
        answer = Server(stand_in.url, FAST).complete("target", [1, 2], 6)
    assert answer.token_ids is None and answer.num_tokens == 6
    assert answer.counts == DraftCounts(3, (2, 1, 0), 9)  # steps accepted 2, 0 and 1 of 3 drafts


def test_counters_are_summed_over_engines_and_created_times_are_no_counters():
    text = ('# TYPE vllm:spec_decode_num_drafts_total counter\n'
            'vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 3.0\n'
            'vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 4.0 1795000000\n'
            'vllm:spec_decode_num_drafts_created{engine="0",model_name="a"} 1.79e+09\n'
            'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a \\"} b"} 1.4e+01\n'
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="1"} 1.0\n'
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="0"} 2.0\n'
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="a",position="0"} 1.0\n'
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="2",model_name="a"} 5.0\n'
            'vllm:spec_decode_num_drafts_total{engine="2",model_name="a"} NaN\n'
            'half a line\nvllm:broken{x="1"} nothing\n')
    assert ("vllm:spec_decode_num_draft_tokens_total", {"engine": "0", "model_name": 'a \\"} b'}, 14.0
            ) in parse_metrics(text)
    with StandIn(metrics=[text]) as stand_in:
        reading = Server(stand_in.url, FAST).counters()
    assert reading.engine == "vllm" and reading.counts == DraftCounts(7, (3, 1), 14) and reading.started is None


def test_what_sglang_gives():
    text = ('sglang:spec_accept_length{model_name="m",tp_rank="0"} 3.2\nsglang:spec_accept_rate{model_name="m"} 0.6\n'
            'sglang:spec_verify_calls_total{model_name="m"} 50.0\n')
    with StandIn(metrics=[text, text.replace("50.0", "57.0")]) as stand_in:
        server = Server(stand_in.url, FAST)
        before, after = server.counters(), server.counters()
    assert before.engine == "sglang" and before.accept_length == 3.2
    assert after.since(before) == DraftCounts(7)
    info = Reply(body=b'{"internal_states": [{"avg_spec_accept_length": 2.5}]}')
    for path in ("/server_info", "/get_server_info"):
        def misbehave(asked, number, path=path):
            return Reply(404) if asked == "/metrics" else info if asked == path else None
        with StandIn(misbehave=misbehave) as stand_in:
            reading = Server(stand_in.url, FAST).counters()
        assert reading.engine == "sglang" and reading.accept_length == 2.5 and reading.counts is None


@pytest.mark.parametrize("metrics, said", [
    ("vllm:num_requests_running 0\n", "of vllm: was it started with the drafter"),
    ("sglang:token_usage 0.1\n", "of sglang: was it started with the drafter"),
    ("go_threads 4\n", "of vLLM and SGLang they are known")])
def test_metrics_without_drafts(metrics, said):
    with StandIn(metrics=[metrics]) as stand_in, pytest.raises(NoMetrics, match=said):
        Server(stand_in.url, FAST).counters()


def test_no_metrics_at_all_says_how_to_get_them():
    with StandIn(misbehave=on("/metrics", Reply(404, b"Not Found"))) as stand_in:
        with pytest.raises(NoMetrics, match="HTTP 404.*--disable-log-stats.*--enable-metrics"):
            Server(stand_in.url, FAST).counters()


def test_a_busy_server_is_asked_again_as_often_as_allowed(monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(server_module, "sleep", pauses.append)
    options = ServerOptions(timeout_s=5.0, max_retries=3, max_wait_s=9.0)
    busy = Reply(429, b"slow down", {"Retry-After": "7"})
    with StandIn(ANSWER, misbehave=on("/v1/completions", busy, 2)) as stand_in:
        assert Server(stand_in.url, options).complete("target", [1, 2], 6).num_tokens == 6
    assert pauses == [7.0, 7.0] and stand_in.num_requests["/v1/completions"] == 3
    pauses.clear()
    patient = Reply(503, b"loading", {"Retry-After": "3600"})
    with StandIn(ANSWER, misbehave=on("/v1/completions", patient)) as stand_in:
        with pytest.raises(ServerError, match="HTTP 503.*loading"):
            Server(stand_in.url, options).complete("target", [1, 2], 6)
    assert pauses == [9.0, 9.0, 9.0] and stand_in.num_requests["/v1/completions"] == 4
    pauses.clear()
    with StandIn(ANSWER, misbehave=on("/v1/completions", Reply(429, b"", {"Retry-After": "tomorrow"}), 3)) as stand_in:
        Server(stand_in.url, options).complete("target", [1, 2], 6)
    assert pauses == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("reply, kind, said", [
    (Reply(500, b'{"error": "out of memory"}'), ServerError, "HTTP 500.*out of memory.*log says more"),
    (Reply(401, b"no key"), ServerError, "HTTP 401.*DFLASH_SERVER_KEY"),
    (Reply(400, b"prompt too long"), ServerError, "HTTP 400.*prompt too long"),
    (Reply(body=b"<html>welcome</html>"), ServerError, "no JSON came back.*welcome.*address"),
    (Reply(body=b'{"choices": []}'), ServerError, "not the answer of a completions endpoint"),
    (Reply(body=b'{"choices": [{"text": "a"}]}'), ServerError, "completion_tokens are needed"),
    (Reply(body=b'[1]'), ServerError, "not the answer of a completions endpoint"),
    (Reply(body=b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1, "prompt_tokens": 3}}'), ServerError,
     "2 prompt tokens were sent, the server read 3"),
    (Reply(body=b'{"choices"', length=500), CutConnection, "cut in the middle"),
])
def test_bad_answers(reply, kind, said):
    with StandIn(ANSWER, misbehave=on("/v1/completions", reply)) as stand_in, pytest.raises(kind, match=said):
        Server(stand_in.url, FAST).complete("target", [1, 2], 6)
    assert stand_in.num_requests["/v1/completions"] == 1  # none of these gets better by asking again


def test_a_stuck_server_is_left():
    slow = Reply(body=b"{}", delay_s=1.0)
    with StandIn(ANSWER, misbehave=on("/v1/completions", slow)) as stand_in:
        with pytest.raises(ServerError, match="nothing came for 0.1 s"):
            Server(stand_in.url, ServerOptions(timeout_s=0.1)).complete("target", [1, 2], 6)


def test_nobody_there_and_no_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ServerError, match="cannot be reached.*Is the server up"):
        Server(f"localhost:{port}", FAST).model()
    for url in ("", "ftp://host", "http://"):
        with pytest.raises(ServerError, match="no server; give its base URL"):
            Server(url)


def test_one_model_is_needed():
    two = Reply(body=b'{"data": [{"id": "a"}, {"id": "b"}]}')
    with StandIn(misbehave=on("/v1/models", two)) as stand_in, pytest.raises(ServerError, match="names 2 models"):
        Server(stand_in.url, FAST).model()


def test_the_key_is_sent():
    seen = []


    with StandIn(ANSWER) as stand_in:
        handler = stand_in.server.RequestHandlerClass
        original = handler.do_GET
        handler.do_GET = lambda self: (seen.append(self.headers.get("Authorization")), original(self))
        Server(stand_in.url, ServerOptions(api_key="secret")).model()
    assert seen == ["Bearer secret"]


def test_a_redirect_is_not_followed_with_the_key():
    """urllib would send the Authorization header to whatever host is named."""
    seen = []
    moved = Reply(302, b"", {"Location": "http://127.0.0.1:1/elsewhere"})
    with StandIn(ANSWER, misbehave=lambda path, *_: seen.append(path) or moved) as stand_in:
        with pytest.raises(ServerError, match="HTTP 302 .*It sends elsewhere, to http://127.0.0.1:1/elsewhere"):
            Server(stand_in.url, ServerOptions(api_key="secret", max_retries=0)).model()
    assert len(seen) == 1
