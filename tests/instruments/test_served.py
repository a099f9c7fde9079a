"""instruments/exams/served.py: a judge behind an address, on loopback: one that judges, lies, hangs
or sends rubbish; and what a kill costs."""

import itertools
import json
import re
import shutil
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from chat_helpers import started
from conftest import read_lines, until, write_lines
from test_tournament import OPTIONS, hold

from config import UsageError
from instruments.exams import judge, served, tournament

pytest_plugins = ["chat_helpers"]
KEY = "sk-secret-of-the-judge"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(served, "WAITS_S", ())
    monkeypatch.setenv("OPENAI_API_KEY", "A")  # as servers at home need none


class Judge(ThreadingHTTPServer):
    """A server that answers decide(body, prompt, a, b). asked: the bodies of all requests."""

    daemon_threads = True

    def __init__(self, decide, models=("judge",)):
        self.decide = decide
        self.models = models
        self.asked = []
        self.keys = set()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.add(self.headers["Authorization"])
        self.server.asked.append(json.dumps(body))
        text = body["messages"][-1]["content"]
        parts = re.search(r"prompt:\n(.*)\n\nText A:\n(.*)\n\nText B:\n(.*)\n\nWhich", text, re.S)
        said = self.server.decide(body, *parts.groups())
        if isinstance(said, str | list):
            said = message(content=said)
        self.answer(said)

    def answer(self, said):
        """said: a tree for JSON; or a status, and bytes or pieces of them; None: nothing."""
        status, content = said if isinstance(said, tuple) else (200, json.dumps(said).encode())
        if said is None:
            return
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status == 307:
            self.send_header("Location", content.decode())
        self.end_headers()
        with suppress(OSError):
            for piece in [content] if isinstance(content, bytes) else content:
                self.wfile.write(piece)

    def log_message(self, *args):
        pass


def message(finish_reason="stop", **fields) -> dict:
    return {"choices": [{"message": fields, "finish_reason": finish_reason}]}


@contextmanager
def judging(decide, **options):
    server = Judge(decide, **options)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def test_a_key_that_the_server_repeats_is_not_shown(tmp_path, monkeypatch):
    """Not even in two halves: neither as an error nor as a reply."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    repeated = f"wrong key {KEY[:9]} {KEY[9:]}"
    for answer in ((401, repeated.encode()), repeated):
        with (
            judging(lambda *texts, answer=answer: answer) as server,
            pytest.raises(UsageError) as raised,
        ):
            compare(server.url, tmp_path)
        said = str(raised.value) + (tmp_path / "verdicts.jsonl").read_text()
        assert "wrong key" in said and KEY[:8] not in said and KEY[-8:] not in said


def test_a_request_follows_no_redirect(tmp_path):
    """Whoever answers may not choose who gets the texts and the key."""
    with (
        judging(lambda *texts: "A") as other,
        judging(lambda *texts: (307, other.url.encode())) as server,
        pytest.raises(UsageError, match="307"),
    ):
        compare(server.url, tmp_path)
    assert not other.asked and server.asked


def test_odd_addresses_are_sentences(tmp_path):
    for url in ("http://[::1/v1", "ftp://127.0.0.1:9", "http://127.0.0.1:9/v1"):
        with pytest.raises(UsageError, match=re.escape(url)):
            compare(url, tmp_path)


def by_length(body: dict, prompt: str, a: str, b: str) -> str:
    return "TIE" if len(a) == len(b) else "A" if len(a) > len(b) else "B"


PROMPTS = ["one", "two", "three"]
TEXTS = [["aaaa"] * 3, ["aa"] * 3, ["a", "aa", "aaaaaa"]]  # of three players
DISTINCT = 15  # of 18 requests (3 prompts, 3 pairs, 2 orders): two players wrote the same to "two"


def by_length_wins() -> np.ndarray:
    return judge.compare([np.array([*map(len, texts)]) for texts in TEXTS]) - 0.5 * np.eye(3)


def compare(url: str, folder: Path, model: str = "judge"):
    server = served.Server(url, model, "The longer text is better.", 16, folder / "verdicts.jsonl")
    return server.compare(PROMPTS, TEXTS)


def judged(decide, folder: Path, model: str = "judge", **options):
    """(wins, doubts, the requests) with a server that decides so."""
    with judging(decide, **options) as server:
        return *compare(server.url, folder, model), server.asked


def test_a_reply_is_a_verdict_or_none():
    for reply, points in (
        ("b", 0), ("TIE", 0.5), (" **A**.\n", 1), ("A\nI think so.\n__B__", 0),
        ("Empate.", 0.5), ("平局", 0.5),
        ("", None), ("A or B", None), ("C", None), ("<think>A", None), ("\u0391", None),
    ):  # fmt: skip
        assert served.points_of(reply) == points, reply


def test_a_judge_sees_each_pair_in_both_orders_and_its_wins_count(tmp_path, capsys):
    wins, doubts, asked = judged(by_length, tmp_path)
    assert (wins == by_length_wins()).all() and doubts == []
    assert len(asked) == len({*asked}) == DISTINCT
    said = "18 replies: 0 no verdict, 2 ties; both orders decided 8 pairs"
    assert said in capsys.readouterr().out
    body = json.loads(asked[0])
    assert body["model"] == "judge" and body["temperature"] == 0 and body["max_tokens"] == 16
    assert "The longer text is better." in body["messages"][0]["content"]


def test_a_coin_is_told_from_a_judge_only_by_enough_pairs(tmp_path):
    server = served.Server("http://x", "x", "", 1, tmp_path / "verdicts.jsonl")
    for n, alike, doubted in ((4, 4, False), (100, 59, True), (100, 60, False)):
        first = np.full((n, 2, 2), np.nan)
        first[:, 0, 1] = 1
        first[:, 1, 0] = np.arange(n) >= alike  # the second order: 0 is the same winner
        doubts = server.doubts(["A"] * n, first, 1 - first.transpose(0, 2, 1))
        assert (len(doubts) == 1) == doubted, (n, alike, doubts)


def test_nothing_is_asked_twice_and_a_damaged_line_is_asked_again(tmp_path):
    thinks = lambda *texts: f"<think>{'see http://x.org/?q=1 ' * 20}</think>\n{by_length(*texts)}"
    first, doubts, asked = judged(thinks, tmp_path)
    assert (first == by_length_wins()).all() and doubts == []
    file = tmp_path / "verdicts.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    again, _, more = judged(thinks, tmp_path)
    assert (first == again).all() and len(more) == 1
    *_, more = judged(by_length, tmp_path, "another")
    assert len(more) == len(asked)


def test_a_judge_that_lies_is_doubted(tmp_path):
    wins, doubts, _ = judged(lambda *texts: "A", tmp_path)
    assert (wins == 0.5 * (1 - np.eye(3))).all(), "the two orders cancel"
    assert len(doubts) == 1 and "0 of them alike" in doubts[0]


def test_what_is_no_verdict_is_counted_and_left_out(tmp_path):
    """In one of the two orders is enough."""
    lost = lambda *texts: "Hm." if texts[1:3] == ("two", "aaaa") else by_length(*texts)
    wins, doubts, _ = judged(lost, tmp_path)
    whole = by_length_wins()
    whole[1, 0] = whole[1, :, 0] = 0  # prompt two, all pairs of the first player
    assert (wins == whole).all()
    assert len(doubts) == 1 and "2 of 18 replies are no verdict: 'Hm.'" in doubts[0]
    with pytest.raises(UsageError, match="(?=.*18)(?=.*Both are fine)(?=.*--judge_tokens)"):
        judged(lambda *texts: "Both are fine.", tmp_path, "another")


def newest(body: dict, *texts):
    """OpenAI's newest models."""
    for name in ("max_tokens", "temperature"):
        if name in body:
            return 400, f"{{'error': {{'message': 'Unsupported: {name}'}}}}".encode()
    return by_length(body, *texts)


def endless():
    while True:
        yield b" " * 4096


LOST = {  # an answer that is no verdict, to prompt two
    "Azure's filter": (400, b'{"error": {"code": "content_filter"}}'),
    "vLLM": (400, b"'max_tokens' or 'max_completion_tokens' is too large: 16"),
    "one that hangs up": None,
    "one that streams for ever": (200, endless()),
    "thoughts without an end": "<think>Hm.\n\nA",
    "all thoughts": message(content="", reasoning_content="A"),
    "OpenAI": message("length", content="Hm.\n\nA"),
    "Gemini": message("MAX_TOKENS", content="A"),
    "a filter in the midst": message("content_filter", content="A"),
    "OpenRouter": message("error", content="A"),
}
SERVERS = {  # a way to answer all
    "OpenAI's newest": newest,
    "Mistral": lambda *texts: [
        {"type": "thinking", "thinking": [{"type": "text", "text": "B"}]},
        {"type": "text", "text": by_length(*texts)},
    ],
    "LiteLLM": lambda *texts: message(None, content=by_length(*texts), role="assistant"),
}


@pytest.mark.parametrize("name", [*LOST, *SERVERS])
def test_a_server_is_taken_as_it_is(name, tmp_path, monkeypatch):
    """What one request meets is left out with the other order. What has come is kept, the rest is
    asked again."""
    monkeypatch.setattr(served, "LARGEST", 1 << 16)
    lose = lambda *texts: LOST[name] if texts[1] == "two" else by_length(*texts)
    decide = SERVERS.get(name, lose)
    whole = by_length_wins()
    if name in LOST:
        whole[1] = 0
    wins, doubts, asked = judged(decide, tmp_path, models=())
    assert (wins == whole).all() and len(doubts) == (name in LOST)
    if name in SERVERS:
        assert len(asked) == DISTINCT + (decide is newest), "the settings are tried once"
    monkeypatch.setattr(served, "AT_ONCE", 1)  # one that fails is enough to ask for a known reply
    again, _, asked = judged(decide, tmp_path, models=())
    assert (again == wins).all() and (name in LOST or not asked)


def test_a_byte_at_a_time_is_no_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(served, "TIMEOUT_S", 0.5)
    over = threading.Event()
    drops = iter(lambda: over.wait(0.1) or b" ", True)
    with judging(lambda *texts: (200, drops)) as server:
        with pytest.raises(UsageError, match="Timeout"):
            compare(server.url, tmp_path)
        over.set()


def test_a_server_that_is_overloaded_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(served, "WAITS_S", (0, 0))
    busy = iter([(503, b""), (429, b"")])
    wins, _, asked = judged(lambda *texts: next(busy, by_length(*texts)), tmp_path)
    assert (wins == by_length_wins()).all() and len(asked) == DISTINCT + 2


@pytest.mark.parametrize("rubbish", [message(content=5), (500, b"\x1b[2J\xff")])
def test_rubbish_is_one_sentence_and_what_came_before_is_kept(rubbish, tmp_path, monkeypatch):
    monkeypatch.setattr(served, "AT_ONCE", 1)
    places = itertools.count()
    decide = lambda *texts: by_length(*texts) if next(places) < 5 else rubbish
    with judging(decide) as server, pytest.raises(UsageError, match=re.escape(server.url)):
        compare(server.url, tmp_path)
    *_, asked = judged(by_length, tmp_path)
    assert len(asked) == DISTINCT - 5


def test_the_only_model_is_found_and_of_several_one_is_chosen(tmp_path):
    with judging(by_length, models=("first",)) as server:
        compare(server.url, tmp_path, model="")
        assert json.loads(server.asked[0])["model"] == "first"
    for models, words in (
        ((), "0 models.*--judge_model"),
        (("first", "second"), "2 models.*--judge_model"),
        (("a\nwrote /etc/passwd",), "200: "),
    ):
        with judging(by_length, models=models) as server:
            with pytest.raises(UsageError, match=words):
                compare(server.url, tmp_path, model="")


def test_ctrl_c_does_not_wait_for_the_judge(tmp_path):
    """Nor do the threads that do: Python does not wait for a daemon."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a training here may have taken it
    over = threading.Event()
    begun = time.monotonic()
    places = itertools.count()

    def decide(*texts):
        if next(places) == 0:
            over.wait(1)  # until the main thread has nothing to do but wait
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        over.wait(60)
        return "A"

    with judging(decide) as server, pytest.raises(KeyboardInterrupt):
        compare(server.url, tmp_path)
    assert time.monotonic() < begun + 30
    assert all(thread.daemon for thread in threading.enumerate()[1:])
    over.set()


# ----------------------------------------------------------------------------- whole tournaments


def test_a_kill_costs_what_was_on_its_way(own_run, monkeypatch, capsys):
    """5 players, as no checkpoint judges; so 10 pairs, 6 prompts, two orders."""
    on = threading.Event()
    places = itertools.count()

    def decide(*texts):
        if next(places) >= 30:
            on.wait(60)
        return by_length(*texts)

    with judging(decide) as server:
        words = ["--judge", server.url, "--n_prompts", 6]
        process = started("tournament", own_run, *OPTIONS, *words, OPENAI_API_KEY=KEY)
        file = own_run / "verdicts.jsonl"
        until(lambda: file.exists() and file.read_bytes().count(b"\n") == 30)
        process.kill()
        process.communicate()
        on.set()
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        best, *_ = hold(own_run, *words)["players"]
    assert KEY not in "".join(capsys.readouterr())
    times = Counter(server.asked)
    assert times.total() - len(times) <= served.AT_ONCE, "more were asked twice"
    assert len(read_lines(file)) == len({line["key"] for line in read_lines(file)}) == len(times)
    assert best["name"] == tournament.LOOP, "the longest, to a judge of length"
    assert server.keys == {f"Bearer {KEY}"}
    assert not any(KEY.encode() in path.read_bytes() for path in own_run.rglob("*.json*"))


def test_prompts_and_criteria_from_files(own_run, tmp_path, capsys):
    """And a password in the address is in no file."""
    file = tmp_path / "prompts.jsonl"
    texts = ("def add(a, b): ", "import os", "class A:")
    write_lines(file, [dict(text=text) for text in texts])
    criteria = tmp_path / "criteria.txt"
    criteria.write_text("O melhor texto \u00e9 o mais longo.")
    with judging(by_length) as server:
        address = server.url.replace("://", "://me:pass1234@")
        words = ["--judge", address, "--prompts", file, "--criteria", criteria]
        report = hold(own_run, *words)
        assert all("mais longo" in body for body in server.asked)
    assert report["prompts"] == ["def add(a, b):", "import os", "class A:"]
    assert tournament.HUMAN not in {row["name"] for row in report["players"]}
    said = [*capsys.readouterr(), *(path.read_text() for path in own_run.glob("*.json*"))]
    assert not any("pass1234" in text for text in said)


def answer_to(prompt: str) -> str:
    """Please: Say cat dog -> I say cat dog."""
    return f"I say {prompt.rpartition('Say ')[2]}."


def test_tuned_models_answer_held_out_questions(answering, tmp_path):
    """The truth is known, and it is what the human text says."""
    run_dir = shutil.copytree(answering, tmp_path / "run")

    def decide(body: dict, prompt: str, a: str, b: str) -> str:
        right = answer_to(prompt)
        return "TIE" if (a == right) == (b == right) else "A" if a == right else "B"

    with judging(decide) as server:
        report = hold(run_dir, "--prompt_tokens", 24, "--judge", server.url)
    assert "<|" not in "".join(report["prompts"])
    human = report["completions"][tournament.HUMAN]
    assert [*map(answer_to, report["prompts"])] == human
    rating = {row["name"]: row["rating"] for row in report["players"]}
    newest = max(rating.keys() - {tournament.HUMAN, tournament.LOOP})
    assert rating[tournament.HUMAN] > rating[newest] - 1e-6 > rating[tournament.LOOP]
    assert report["doubts"] == []
