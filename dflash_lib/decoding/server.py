"""A client of a running server with OpenAI's completions endpoint: vLLM or SGLang.

Prompts go as token ids to /v1/completions, so nothing renders a chat template in between; answers come back as token
ids where the server gives them (vLLM's `return_token_ids`), else as text. What the drafter did is read from the
server's own counters in /metrics:

- vLLM (0.32): counters `vllm:spec_decode_num_drafts_total` (verify steps), `..._num_draft_tokens_total`,
  `..._num_accepted_tokens_total` and `..._num_accepted_tokens_per_pos_total{position="0"}`, one sample an engine; and
  in each answer, where the server was started with --per-request-spec-decode-metrics, a histogram of its own steps.
- SGLang (documentation only; not tried on one): the counter `sglang:spec_verify_calls_total` and the gauge
  `sglang:spec_accept_length` with --enable-metrics, `avg_spec_accept_length` in /server_info. None is by slot.
"""

import http.client
import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from time import sleep
from typing import Any

RETRIED = (429, 502, 503, 504)  # the server is busy, or still loading
EXCERPT = 300  # characters of a server's answer that a message shows


class ServerError(ValueError):
    """A server that does not answer as it should. The message says what came, and what to do."""


class CutConnection(ServerError):
    """A connection that ended in the middle of an answer: the request may be sent once more."""


class NoMetrics(ServerError):
    """Nothing from which acceptance could be read."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """timeout_s: seconds without a byte of an answer. max_retries: how often a refused (busy) or cut request is sent
    again. max_wait_s: the longest pause before that, whatever Retry-After asks for. settle_s: how long counters may lag
    behind an answer. api_key: sent as bearer token."""

    timeout_s: float = 600.0
    max_retries: int = 5
    max_wait_s: float = 60.0
    settle_s: float = 2.0
    api_key: str | None = None


@dataclass(frozen=True)
class DraftCounts:
    """What drafting did: verify steps, and how many of them accepted slot 1, 2, ... at least.

    num_steps: verify steps; accepted: by slot, () where the server does not say (SGLang). num_drafted: draft tokens
    verified, None where unknown.
    """

    num_steps: int
    accepted: tuple[int, ...] = ()
    num_drafted: int | None = None


@dataclass(frozen=True)
class Counters:
    """A reading of /metrics. engine: "vllm" or "sglang"; counts: since the server's start, None where the engine has no
    counters; accept_length: the engine's own average, where it has nothing better; started: Unix seconds of the
    server's start, where it says."""

    engine: str
    counts: DraftCounts | None
    accept_length: float | None = None
    started: float | None = None

    def since(self, before: "Counters") -> DraftCounts:
        """What was counted since `before`. Raises ServerError when a counter went backwards or the
        server was started in between: these are counters of another process."""
        now, then = self.counts, before.counts
        if self.started != before.started:
            raise ServerError("the server was restarted, and its counters began anew")
        if now is None or then is None or len(now.accepted) != len(then.accepted):
            raise ServerError("the server's counters changed their form: is it still the same server?")
        drafted = None if now.num_drafted is None or then.num_drafted is None else now.num_drafted - then.num_drafted
        counts = DraftCounts(now.num_steps - then.num_steps,
                             tuple(a - b for a, b in zip(now.accepted, then.accepted, strict=True)), drafted)
        if min(counts.num_steps, *counts.accepted, 0 if drafted is None else drafted) < 0:
            raise ServerError("the server's counters went backwards: it was restarted")
        return counts


@dataclass(frozen=True)
class Completion:
    """One answer. token_ids: None where the server gives text only; num_tokens: as the server counts them, the
    end-of-turn token included; counts: of this answer alone, where the server reports them."""

    text: str
    token_ids: list[int] | None
    num_tokens: int
    finish_reason: str
    counts: DraftCounts | None = None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer that is none: followed, it would carry the key to another host."""

    def redirect_request(self, *_args: Any) -> None:
        return None


class Server:
    """A server at a base URL, with or without /v1. Raises ServerError for a URL that is none."""

    def __init__(self, url: str, options: ServerOptions | None = None):
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{url!r} is no server; give its base URL, such as http://localhost:8000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self.options = options or ServerOptions()
        self._model: str | None = None
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")  # a proxy of the environment knows nothing of these
        self._opener = urllib.request.build_opener(
            _NoRedirect, *([urllib.request.ProxyHandler({})] if local else []))

    def model(self) -> str:
        """The name of the model that is served. Raises ServerError when there is none, or several."""
        listed = self._json("/v1/models")
        data = listed.get("data") if isinstance(listed, dict) else None
        names = [entry["id"] for entry in data or [] if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
        if len(names) != 1:
            raise ServerError(f"{self.url}/v1/models names {len(names)} models {names[:5]}; one alone is needed")
        self._model = names[0]
        return names[0]

    def complete(self, model: str, prompt_ids: list[int], max_new_tokens: int) -> Completion:
        """The greedy continuation of a prompt.

        Raises ServerError, also when the server did not read exactly these tokens; CutConnection when the answer broke
        off.
        """
        body = self._json("/v1/completions", {
            "model": model, "prompt": prompt_ids, "max_tokens": max_new_tokens, "temperature": 0.0, "top_p": 1.0,
            "n": 1, "stream": False, "return_token_ids": True})
        try:
            choice, usage = body["choices"][0], body.get("usage") or {}
            token_ids, text = choice.get("token_ids"), choice["text"]
            num_tokens = usage.get("completion_tokens", None if token_ids is None else len(token_ids))
            if not isinstance(text, str) or not isinstance(num_tokens, int):
                raise TypeError("text and usage.completion_tokens are needed")
            completion = Completion(text, None if token_ids is None else [int(token) for token in token_ids],
                                    num_tokens, str(choice.get("finish_reason")), _own_counts(body))
            num_read = usage.get("prompt_tokens", len(prompt_ids))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{self.url}/v1/completions: not the answer of a completions endpoint ({error!r}): "
                              f"{json.dumps(body)[:EXCERPT]}") from error
        if num_read != len(prompt_ids):
            raise ServerError(f"{self.url}: {len(prompt_ids)} prompt tokens were sent, the server read {num_read}: "
                              "does it add a bos token, or cut prompts?")
        return completion

    def counters(self) -> Counters:
        """A reading of the server's counters. Raises NoMetrics when it has none for speculative decoding."""
        try:
            text = self._request("/metrics").decode("utf-8", "replace")
        except _Status as error:
            if error.code not in (401, 403, 404, 405):
                raise
            return self._server_info(error)
        samples = parse_metrics(text)
        if any(labels.get("model_name") == self._model for _, labels, _ in samples):  # other models' are not ours
            samples = [sample for sample in samples if sample[1].get("model_name", self._model) == self._model]
        counters = _vllm(samples) or _sglang(samples)
        if counters is None:
            engine = next((name.split(":")[0] for name, _, _ in samples if ":" in name), None)
            raise NoMetrics(f"{self.url}/metrics has no counters of speculative decoding" + (
                f" (of {engine}: was it started with the drafter, as --speculative-config or "
                "--speculative-algorithm?)" if engine in ("vllm", "sglang")
                else "; of vLLM and SGLang they are known"))
        return counters

    def _server_info(self, missing: "_Status") -> Counters:
        """SGLang's average since its start, where /metrics is not there."""
        for path in ("/server_info", "/get_server_info"):
            try:
                states = self._json(path).get("internal_states")
                return Counters("sglang", None, float(states[0]["avg_spec_accept_length"]))
            except (ServerError, AttributeError, IndexError, KeyError, TypeError):
                continue  # the next way; the error below says that none worked
        raise NoMetrics(f"{missing} There is no /metrics to read acceptance from: do not start vLLM with "
                        "--disable-log-stats, start SGLang with --enable-metrics, and give the address of the engine "
                        "itself, not of a router.") from missing

    def _json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        raw = self._request(path, body)
        try:
            return json.loads(raw)
        except ValueError as error:
            raise ServerError(f"{self.url}{path}: no JSON came back ({error}): {raw[:EXCERPT]!r}. Is this address the "
                              "server's own?") from error

    def _request(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The bytes of an answer; a busy server is asked again, up to max_retries times."""
        headers = {"Content-Type": "application/json"}
        if self.options.api_key:
            headers["Authorization"] = f"Bearer {self.options.api_key}"
        data = None if body is None else json.dumps(body).encode("utf-8")
        for attempt in range(self.options.max_retries + 1):
            request = urllib.request.Request(self.url + path, data, headers)
            try:
                with self._opener.open(request, timeout=self.options.timeout_s) as response:
                    return response.read()
            except urllib.error.HTTPError as error:
                refused = _Status(self.url + path, error)
                if error.code not in RETRIED or attempt == self.options.max_retries:
                    raise refused from error
                sleep(self._pause(error.headers.get("Retry-After"), attempt))
            except (TimeoutError, urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
                raise self._broken(path, error) from error
        raise AssertionError("unreachable")

    def _pause(self, retry_after: str | None, attempt: int) -> float:
        """Seconds before the next attempt: what Retry-After says, else growing ones."""
        try:
            wanted = float(retry_after) if retry_after else 2.0 ** attempt
        except ValueError:  # a date, which nobody's inference server sends
            wanted = math.nan
        if not math.isfinite(wanted):
            wanted = 2.0 ** attempt
        return min(max(wanted, 0.0), self.options.max_wait_s)

    def _broken(self, path: str, error: Exception) -> ServerError:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return ServerError(f"{self.url}{path}: nothing came for {self.options.timeout_s:g} s. A slow server needs "
                               "a longer timeout; a stuck one a look at its log.")
        if isinstance(reason, ConnectionRefusedError | OSError) and not isinstance(
                reason, ConnectionResetError | BrokenPipeError | http.client.HTTPException):
            return ServerError(f"{self.url}: cannot be reached ({reason}). Is the server up, and the address right?")
        return CutConnection(f"{self.url}{path}: the connection was cut in the middle ({reason!r}). Look at the "
                             "server's log: did it crash?")


class _Status(ServerError):
    """An HTTP status that is no success."""

    def __init__(self, url: str, error: urllib.error.HTTPError):
        self.code = error.code
        try:
            said = error.read().decode("utf-8", "replace")[:EXCERPT]
        except (http.client.HTTPException, OSError):
            said = "(its text broke off)"
        moved = f" It sends elsewhere, to {error.headers.get('Location')}; give that address." if (
            300 <= self.code < 400) else ""
        advice = {401: " Set DFLASH_SERVER_KEY to the server's key.", 429: " It stayed busy; try again later.",
                  500: " The server's log says more."}.get(self.code, moved)
        super().__init__(f"{url}: HTTP {self.code} {error.reason}: {said!r}.{advice}")


SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_metrics(text: str) -> list[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of each sample in Prometheus' text form; lines that are none, and samples that are no
    finite number (NaN is a summary without data), are passed over."""
    samples = []
    for line in text.splitlines():
        match = None if line.startswith("#") else SAMPLE.match(line)
        try:
            value = float(match[3]) if match else math.nan
        except ValueError:
            continue
        if match and math.isfinite(value):
            samples.append((match[1], dict(LABEL.findall(match[2] or "")), value))
    return samples


def _total(samples: list[tuple[str, dict[str, str], float]], name: str) -> int | None:
    """The sum of a counter over engines and ranks, None where it does not occur."""
    values = [value for found, _, value in samples if found in (name, f"{name}_total")]
    return round(sum(values)) if values else None


def _started(samples: list[tuple[str, dict[str, str], float]]) -> float | None:
    return next((value for name, _, value in samples if name == "process_start_time_seconds"), None)


def _vllm(samples: list[tuple[str, dict[str, str], float]]) -> Counters | None:
    num_steps = _total(samples, "vllm:spec_decode_num_drafts")
    per_slot = "vllm:spec_decode_num_accepted_tokens_per_pos"
    slots: dict[int, float] = {}
    for name, labels, value in samples:
        if name in (per_slot, f"{per_slot}_total") and labels.get("position", "").isdecimal():
            slot = int(labels["position"])
            slots[slot] = slots.get(slot, 0.0) + value
    if num_steps is None or not slots:
        return None
    counts = DraftCounts(num_steps, tuple(round(slots.get(slot, 0)) for slot in range(max(slots) + 1)),
                         _total(samples, "vllm:spec_decode_num_draft_tokens"))
    return Counters("vllm", counts, started=_started(samples))


def _sglang(samples: list[tuple[str, dict[str, str], float]]) -> Counters | None:
    calls = [value for name, _, value in samples if name == "sglang:spec_verify_calls_total"]
    gauges = [value for name, _, value in samples if name == "sglang:spec_accept_length"]
    if not calls and not gauges:
        return None
    return Counters("sglang", DraftCounts(round(sum(calls))) if calls else None, max(gauges, default=None),
                    _started(samples))


def _own_counts(body: dict[str, Any]) -> DraftCounts | None:
    """What vLLM says of this one answer, where it was asked to (--per-request-spec-decode-metrics)."""
    own = (body.get("metrics") or {}).get("speculative_decoding")
    if not own:
        return None
    histogram = [int(steps) for steps in own["acceptance_histogram"]]
    return DraftCounts(sum(histogram), tuple(sum(histogram[slot:]) for slot in range(1, len(histogram))),
                       int(own["num_draft_tokens"]))
