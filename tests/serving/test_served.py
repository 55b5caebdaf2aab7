"""Asking prompt by prompt: counts that belong to one answer, nothing lost, and other clients' traffic seen."""

import json
import random
from pathlib import Path

import pytest

from dflash_lib.decoding.served import ask, in_answer, inconsistency
from dflash_lib.decoding.server import DraftCounts, Server, ServerError, ServerOptions
from tests.serving.stand_in import Reply, Scripted, StandIn

RECORDED = Path(__file__).parents[1] / "data" / "vllm_metrics" / "recorded.jsonl"
FAST = ServerOptions(timeout_s=5.0, max_retries=2, max_wait_s=0.01, settle_s=0.15)
# 1 token of the prompt's forward, then steps of accepted + 1; "b": two of its last step's tokens lie behind its end
ANSWERS = {(1, 2): Scripted([5, 6, 7, 8, 9, 10], [2, 0, 0]), (3,): Scripted([5, 6, 7, 2], [0, 3], "stop"),
           (4, 4): Scripted([5], [], "length")}
PROMPTS = [("a", [1, 2]), ("b", [3]), ("c", [4, 4])]
COUNTS = [DraftCounts(3, (1, 1, 0), 9), DraftCounts(2, (1, 1, 1), 6), DraftCounts(0, (0, 0, 0), 0)]


def fails_at(number: int):
    """The so-many-th question (from 0) fails."""
    return lambda path, n: Reply(500, b"CUDA error") if (path, n) == ("/v1/completions", number) else None


def test_each_answer_has_its_own_counts(tmp_path):
    seen = []
    with StandIn(ANSWERS) as stand_in:
        stand_in.count([3, 1])  # what others asked before is not ours
        served = ask(Server(stand_in.url, FAST), PROMPTS, 6, tmp_path / "out.jsonl", seen.append)
    assert [answer.counts for answer in served.answers] == COUNTS and served.warnings == []
    assert [answer.token_ids for answer in served.answers] == [a.token_ids for a in ANSWERS.values()]
    assert seen == [1, 2, 3] and (served.engine, served.model) == ("vllm", "target")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["a", "b", "c"] and rows[1]["counts"]["accepted"] == [1, 1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl"]


def test_recorded_from_vllm_0_32(tmp_path):
    """Readings of /metrics and answers as vLLM gave them; the truth is what it said of each answer's single steps."""
    recorded = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    metrics = [row["text"] for row in recorded if row["path"] == "/metrics"]
    bodies = [json.loads(row["text"]) for row in recorded if row["path"] == "/v1/completions"]
    steps = [body.pop("metrics")["speculative_decoding"]["per_step_accepted"] for body in bodies]
    prompts = [(str(i), body["choices"][0]["prompt_token_ids"]) for i, body in enumerate(bodies)]
    # read once at the start, before and behind each answer, and once more at the end
    readings = [metrics[0], *(metrics[i // 2 + i % 2] for i in range(2 * len(bodies))), metrics[-1]]
    with StandIn(metrics=readings, bodies=[json.dumps(body) for body in bodies]) as stand_in:
        served = ask(Server(stand_in.url, FAST), prompts, 48, tmp_path / "out.jsonl")
    assert len(steps) >= 4 and served.warnings == []
    for answer, accepted in zip(served.answers, steps, strict=True):
        assert answer.counts.num_steps == len(accepted) and answer.counts.num_drafted == 7 * len(accepted)
        assert answer.counts.accepted == tuple(sum(n >= slot for n in accepted) for slot in range(1, 8))


def test_a_killed_call_goes_on_with_the_missing_answers(tmp_path):
    out = tmp_path / "out.jsonl"
    with StandIn(ANSWERS, misbehave=fails_at(2)) as stand_in:
        server = Server(stand_in.url, FAST)
        with pytest.raises(ServerError, match=r"CUDA error.*2 of 3 answers are kept in .*out.jsonl.partial; the same"):
            ask(server, PROMPTS, 6, out)
        with open(f"{out}.partial", "a") as file:
            file.write('{"id": "c", "tok')  # as a kill in the middle of a line would leave it
        asked = len(stand_in.asked)
        served = ask(server, PROMPTS, 6, out)
        assert [body["prompt"] for body in stand_in.asked[asked:]] == [[4, 4]]
        assert [answer.counts for answer in served.answers] == COUNTS
        assert served.warnings == ["going-on: 2 of 3 answers are of an earlier call"]
        again = ask(server, PROMPTS, 6, out)  # all there: a new measurement, the old one kept
        assert again.warnings == [] and Path(f"{out}.1").read_text() == out.read_text()


def test_going_on_with_other_prompts_is_refused_and_a_restart_is_said(tmp_path):
    out = tmp_path / "out.jsonl"
    with StandIn(ANSWERS, misbehave=fails_at(1)) as stand_in:
        server = Server(stand_in.url, FAST)
        with pytest.raises(ServerError):
            ask(server, PROMPTS, 6, out)
        with pytest.raises(ValueError, match="begun with other settings"):
            ask(server, PROMPTS[:2], 6, out)
        stand_in.restart()
        served = ask(server, PROMPTS, 6, out)
    assert [answer.counts for answer in served.answers] == COUNTS
    assert [warning.split(":")[0] for warning in served.warnings] == ["going-on", "restarted"]
    with pytest.raises(ValueError, match="the same id"), StandIn(ANSWERS) as stand_in:
        ask(Server(stand_in.url, FAST), [PROMPTS[0], PROMPTS[0]], 6, tmp_path / "other.jsonl")


def test_counters_that_lag_are_waited_for(tmp_path):
    class Lagging(StandIn):
        pending, num_reads = (), 0

        def count(self, accepted):
            self.pending, self.num_reads = list(accepted), 0

        def metrics_text(self):
            self.num_reads += 1
            if self.num_reads == 3:  # an answer's steps come with the third reading behind it
                super().count(self.pending)
            return super().metrics_text()

    with Lagging(ANSWERS) as stand_in:
        served = ask(Server(stand_in.url, ServerOptions(settle_s=60.0)), PROMPTS, 6, tmp_path / "out.jsonl")
    assert [answer.counts for answer in served.answers] == COUNTS and served.warnings == []


def test_another_clients_requests_are_seen_and_left_out(tmp_path):
    class Shared(StandIn):
        def completion(self, body):
            if body["prompt"] == [3]:
                self.count([1, 0, 2])  # another client's steps, while ours was answered
            return super().completion(body)

    with Shared(ANSWERS) as stand_in:
        served = ask(Server(stand_in.url, FAST), PROMPTS, 6, tmp_path / "out.jsonl")
    assert [answer.counts for answer in served.answers] == [COUNTS[0], None, COUNTS[2]]
    warning, = served.warnings
    assert warning.startswith("not-counted: 1 of 3 answers") and "first b:" in warning
    assert "--per-request-spec-decode-metrics" in warning and served.answers[1].token_ids == [5, 6, 7, 2]
    with Shared(ANSWERS, own_counts=True) as stand_in:  # which is the way out
        served = ask(Server(stand_in.url, FAST), PROMPTS, 6, tmp_path / "own.jsonl")
    assert [answer.counts for answer in served.answers] == COUNTS and served.warnings == []


def test_a_restart_under_way_costs_one_answers_counts(tmp_path):
    class Restarting(StandIn):
        def completion(self, body):
            if body["prompt"] == [3]:
                self.restart()
            return super().completion(body)

    with Restarting(ANSWERS) as stand_in:
        served = ask(Server(stand_in.url, FAST), PROMPTS, 6, tmp_path / "out.jsonl")
    assert [answer.counts for answer in served.answers] == [COUNTS[0], None, COUNTS[2]]
    assert "restarted" in served.answers[1].fault and "restarted" in served.warnings[0]


def test_a_counter_that_goes_backwards_is_a_restart():
    from dflash_lib.decoding.server import Counters

    before, after = (Counters("vllm", DraftCounts(steps, (steps, 0), 2 * steps)) for steps in (5, 4))
    assert before.since(after) == DraftCounts(1, (1, 0), 2)
    with pytest.raises(ServerError, match="went backwards: it was restarted"):
        after.since(before)


def test_a_cut_connection_is_tried_again_with_counters_read_anew(tmp_path):
    class Cutting(StandIn):
        def answer(self, path, raw):
            if path == "/v1/completions" and self.num_requests.get(path, 0) == 1:
                self.count([0, 3])  # drafted for an answer that never arrives
            return super().answer(path, raw)

    def cut(path, number):
        return Reply(body=b"{", length=99) if path == "/v1/completions" and number == 1 else None

    with Cutting(ANSWERS, misbehave=cut) as stand_in:
        served = ask(Server(stand_in.url, FAST), PROMPTS, 6, tmp_path / "out.jsonl")
    assert [answer.counts for answer in served.answers] == COUNTS and stand_in.num_requests["/v1/completions"] == 4


def test_without_metrics_texts_are_there(tmp_path):
    with StandIn(ANSWERS, misbehave=lambda path, n: Reply(404) if path == "/metrics" else None) as stand_in:
        served = ask(Server(stand_in.url, FAST), PROMPTS, 6, tmp_path / "out.jsonl")
    assert [answer.token_ids for answer in served.answers] == [a.token_ids for a in ANSWERS.values()]
    assert [answer.counts for answer in served.answers] == [None] * 3
    assert served.warnings[0].startswith("no-metrics:") and len(served.warnings) == 1


def test_sglang_gives_steps_or_an_average(tmp_path):
    calls = [f'sglang:spec_verify_calls_total{{model_name="m"}} {n}.0\n' for n in (9, 9, 12, 12, 14, 14, 14, 14)]
    with StandIn(ANSWERS, metrics=calls) as stand_in:
        served = ask(Server(stand_in.url, FAST), PROMPTS, 6, tmp_path / "a.jsonl")
    assert [answer.counts for answer in served.answers] == [DraftCounts(3), DraftCounts(2), DraftCounts(0)]
    assert served.engine == "sglang" and [w.split(":")[0] for w in served.warnings] == ["no-slots"]
    with StandIn(ANSWERS, metrics=['sglang:spec_accept_length{model_name="m"} 2.25\n'] * 2) as stand_in:
        served = ask(Server(stand_in.url, FAST), PROMPTS, 6, tmp_path / "b.jsonl")
    assert served.accept_length == 2.25 and [w.split(":")[0] for w in served.warnings] == ["average-only"]


def scripted_steps(rng: random.Random, num_slots: int) -> tuple[list[int], int, list[int]]:
    """Steps as a server counts them, tokens of the answer, and the accepted drafts that stand in it."""
    raw = [rng.choice([0, 0, 1, 2, num_slots]) for _ in range(rng.randint(1, 5))]
    kept = rng.randint(1, raw[-1] + 1)  # tokens of the last step before the answer's end
    return raw, 1 + sum(n + 1 for n in raw[:-1]) + kept, [*raw[:-1], min(raw[-1], kept)]


def test_drafts_behind_the_end_are_taken_off_or_bounded():
    rng, num_exact = random.Random(0), 0
    for _ in range(500):
        raw, num_tokens, kept = scripted_steps(rng, 4)
        by_slot = [tuple(sum(n >= slot for n in steps) for slot in range(1, 5)) for steps in (raw, kept)]
        counts = DraftCounts(len(raw), by_slot[0], 4 * len(raw))
        assert inconsistency(counts, num_tokens) == ""
        low, high = in_answer(counts, num_tokens)
        assert all(a <= truth <= b for a, truth, b in zip(low, by_slot[1], high, strict=True)), (raw, num_tokens)
        num_exact += low == high
    assert 300 < num_exact < 500  # both cases occur, and most are exact


def test_counts_of_several_clients_do_not_fit_one_answer():
    rng, num_seen = random.Random(1), 0
    for _ in range(300):
        raw, num_tokens, _ = scripted_steps(rng, 4)
        other, _, _ = scripted_steps(rng, 4)
        both = raw + other
        counts = DraftCounts(len(both), tuple(sum(n >= slot for n in both) for slot in range(1, 5)))
        num_seen += inconsistency(counts, num_tokens) != ""
    assert 240 < num_seen < 300  # the rest adds so few tokens that it could be a last step's
    assert "later slot" in inconsistency(DraftCounts(3, (1, 2)), 4)
    assert inconsistency(DraftCounts(1, (0, 0)), 4) and inconsistency(DraftCounts(2), 2) and inconsistency(
        DraftCounts(0), 2)
