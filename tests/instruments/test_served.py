"""instruments/exams/served.py: a judge behind an address, on loopback: one that judges, lies, hangs
or sends rubbish; and what a kill costs."""

import itertools
import json
import re
import shutil
import signal
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from chat_helpers import started
from conftest import read_json, read_lines, until, write_lines
from test_tournament import hold

from config import UsageError
from instruments.exams import served, tournament

pytest_plugins = ["chat_helpers"]
KEY = "sk-secret-of-the-judge"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(served, "WAITS_S", ())
    monkeypatch.setenv("OPENAI_API_KEY", "A")  # as servers at home need none


class Judge(ThreadingHTTPServer):
    """A server that replies decide(prompt, a, b), as `imitate` puts it: (body, prompt, reply) ->
    the answer. asked: the bodies of all requests."""

    daemon_threads = True

    def __init__(self, decide, models=("judge",), imitate=lambda body, prompt, reply: reply):
        self.decide = decide
        self.models = models
        self.imitate = imitate
        self.asked = []
        self.keys = set()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        models = self.server.models
        self.answer({"data": [{"id": name} for name in models]} if models is not None else None)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.add(self.headers["Authorization"])
        self.server.asked.append(json.dumps(body))
        text = body["messages"][-1]["content"]
        parts = re.search(r"prompt:\n(.*)\n\nText A:\n(.*)\n\nText B:\n(.*)\n\nWhich", text, re.S)
        said = self.server.decide(*parts.groups())
        said = self.server.imitate(body, parts[1], said)
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
        self.send_header("Location", "http://127.0.0.1:9/v1")
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


@pytest.mark.parametrize("key, at", [(KEY, 0), (KEY, 9), (KEY, 13)])
def test_a_key_that_the_server_repeats_is_not_shown(tmp_path, monkeypatch, key, at):
    """Nor in two halves."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    repeated = f"{key[:at]} {key[at:]}"
    with (
        judging(lambda *texts: f"A key: {repeated}") as server,
        pytest.raises(UsageError) as raised,
    ):
        compare(server.url, tmp_path)
    said = str(raised.value) + (tmp_path / "verdicts.jsonl").read_text()
    told = json.dumps({"error": {"message": f"wrong key {repeated}"}}).encode()
    with judging(lambda *texts: (401, told)) as server, pytest.raises(UsageError) as raised:
        compare(server.url, tmp_path, model="another")
    said += str(raised.value)
    assert "key" in said and key[:8] not in said and key[-8:] not in said


def test_odd_addresses_are_sentences(tmp_path):
    for url in ("http://[::1/v1", "ftp://127.0.0.1:9", "http://127.0.0.1:9/v1"):
        with pytest.raises(UsageError, match=re.escape(url)):
            compare(url, tmp_path)


def hanging(over: threading.Event):
    def decide(*texts):
        over.wait(60)
        return "A"

    return decide


def by_length(prompt: str, a: str, b: str) -> str:
    return "TIE" if len(a) == len(b) else "A" if len(a) > len(b) else "B"


PROMPTS = ["one", "two", "three"]
TEXTS = [["aaaa"] * 3, ["aa"] * 3, ["a", "aa", "aaaaaa"]]  # of three players
DISTINCT = 15  # of 18 requests (3 prompts, 3 pairs, 2 orders): two players wrote the same to "two"


def by_length_wins() -> np.ndarray:
    lengths = np.array([[len(text) for text in texts] for texts in TEXTS]).T  # (N, P)
    better = lengths[:, :, None] > lengths[:, None]
    equal = (lengths[:, :, None] == lengths[:, None]) & ~np.eye(3, dtype=bool)
    return better + 0.5 * equal


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
    with judging(by_length) as listed:
        server = served.Server(listed.url, "x", "", 1, tmp_path / "verdicts.jsonl")
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
    again, _, more = judged(thinks, tmp_path)
    assert (first == again).all() and more == []
    file = tmp_path / "verdicts.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    again, _, more = judged(by_length, tmp_path)
    assert (first == again).all() and len(more) == 1
    *_, more = judged(by_length, tmp_path, "another")
    assert len(more) == len(asked)


def test_a_judge_that_lies_is_doubted(tmp_path):
    wins, doubts, _ = judged(lambda *texts: "A", tmp_path)
    assert (wins == 0.5 * (1 - np.eye(3))).all(), "the two orders cancel"
    assert len(doubts) == 1 and "0 of them alike" in doubts[0]


def test_what_is_no_verdict_is_counted_and_left_out(tmp_path):
    """In one of the two orders is enough."""
    lost = lambda prompt, a, b: "Hm." if (prompt, a) == ("two", "aaaa") else by_length(prompt, a, b)
    wins, doubts, _ = judged(lost, tmp_path)
    whole = by_length_wins()
    whole[1, 0] = whole[1, :, 0] = 0  # prompt two, all pairs of the first player
    assert (wins == whole).all()
    assert len(doubts) == 1 and "2 of 18 replies are no verdict: 'Hm.'" in doubts[0]
    with pytest.raises(UsageError, match="(?=.*18)(?=.*Both are fine)(?=.*--judge_tokens)"):
        judged(lambda *texts: "Both are fine.", tmp_path, "another")


def newest(body, prompt, reply):
    """OpenAI's newest models."""
    for name in ("max_tokens", "temperature"):
        if name in body:
            return 400, f"{{'error': {{'message': 'Unsupported: {name}'}}}}".encode()
    return reply


def for_two(said, others=None):
    """An answer to the requests of one prompt; those to others are the reply, or made of it."""
    return lambda body, prompt, reply: said if prompt == "two" else others or reply


def endless():
    while True:
        yield b" " * 4096


SERVERS = {  # what it answers; does it judge prompt two?
    "OpenAI's newest": (newest, True),
    "Azure's filter": (for_two((400, b'{"error": {"code": "content_filter"}}')), False),
    "a filter with status 200": (for_two({"choices": []}), False),
    "Gemini": (for_two(message("MAX_TOKENS", content="A")), False),
    "OpenRouter": (for_two(message("error", content="")), False),
    "a filter in the midst": (for_two(message("content_filter", content="A")), False),
    "a filter that leaves nothing": (for_two(message("content_filter", content=None)), False),
    "vLLM": (for_two((400, b"'max_tokens' or 'max_completion_tokens' is too large: 16")), False),
    "a gateway": (for_two((413, b"<html>")), False),
    "TGI": (
        for_two((422, b'{"error": "inputs tokens + max_new_tokens", "temperature": 0}')),
        False,
    ),
    "one that fails": (for_two((500, b"")), False),
    "one that hangs up": (for_two(None), False),
    "one that streams for ever": (for_two((200, endless())), False),
    "a redirect": (for_two((307, b"")), False),
    "thoughts that were cut": (for_two(message("length", content="Hm.\n\nA")), False),
    "thoughts without an end": (for_two("<think>Hm.\n\nA"), False),
    "Mistral": (
        lambda body, prompt, reply: [
            {"type": "thinking", "thinking": [{"type": "text", "text": "B"}]},
            {"type": "text", "text": reply},
        ],
        True,
    ),
    "Ollama": (lambda body, prompt, reply: message(content=reply, reasoning="Hm.\nB"), True),
    "LiteLLM": (lambda body, prompt, reply: message(None, content=reply, role="assistant"), True),
    "all thoughts": (for_two(message(content="", reasoning_content="A")), False),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_is_taken_as_it_is(name, tmp_path, monkeypatch):
    """What one request meets is left out with the other order. What has come is kept, the rest is
    asked again."""
    monkeypatch.setattr(served, "LARGEST", 1 << 16)
    imitate, judges = SERVERS[name]
    whole = by_length_wins()
    if not judges:
        whole[1] = 0
    wins, doubts, asked = judged(by_length, tmp_path, imitate=imitate, models=None)
    assert (wins == whole).all() and len(doubts) == (not judges)
    if judges:
        assert len(asked) == DISTINCT + (imitate is newest), "the settings are tried once"
    monkeypatch.setattr(served, "AT_ONCE", 1)  # one that fails is enough to ask for a known reply
    again, _, asked = judged(by_length, tmp_path, imitate=imitate, models=None)
    assert (again == wins).all() and not (judges and asked)


def test_a_byte_at_a_time_is_no_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(served, "TIMEOUT_S", 0.5)
    over = threading.Event()
    drops = iter(lambda: over.wait(0.1) or b" ", True)
    with judging(by_length, imitate=lambda *asked: (200, drops)) as server:
        with pytest.raises(UsageError, match="Timeout"):
            compare(server.url, tmp_path)
        over.set()


def test_a_server_that_is_overloaded_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(served, "WAITS_S", (0, 0))
    busy = iter([(503, b""), (429, b"")])
    wins, _, asked = judged(
        by_length, tmp_path, imitate=lambda body, prompt, reply: next(busy, reply)
    )
    assert (wins == by_length_wins()).all() and len(asked) == DISTINCT + 2


RUBBISH = {  # a status, a body
    "no JSON": (200, b"<html>"),
    "no choice": (200, b'{"choices": []}'),
    "a content that is no text": (200, b'{"choices": [{"message": {"content": 5}}]}'),
    "broken": (500, b"\x1b[2J\xff"),
}


@pytest.mark.parametrize("case", RUBBISH)
def test_rubbish_is_one_sentence_and_what_came_before_is_kept(case, tmp_path, monkeypatch):
    monkeypatch.setattr(served, "AT_ONCE", 1)
    said = iter([by_length] * 5)
    decide = lambda *texts: next(said, lambda *texts: RUBBISH[case])(*texts)
    with judging(decide) as server, pytest.raises(UsageError, match=re.escape(server.url)):
        compare(server.url, tmp_path)
    kept = (tmp_path / "verdicts.jsonl").read_text().splitlines()
    assert len(kept) == 5
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
        (None, "gives no reply"),
    ):
        with judging(by_length, models=models) as server:
            with pytest.raises(UsageError, match=words):
                compare(server.url, tmp_path, model="")


# ----------------------------------------------------------------------------- whole tournaments

OPTIONS = "--device cpu --prompt_tokens 8 --max_new_tokens 16 --n_prompts 6".split()


def elsewhere(run_dir: Path, server):
    """A tournament in a process of its own."""
    judge = ["--judge", server.url]
    return started("tournament", run_dir, *OPTIONS, *judge, OPENAI_API_KEY=KEY)


def test_ctrl_c_does_not_wait_for_the_judge(own_run):
    over = threading.Event()
    with judging(hanging(over)) as server:
        process = elsewhere(own_run, server)
        until(lambda: server.asked)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        over.set()
    assert process.returncode == 130 and "Traceback" not in said


def test_a_kill_costs_what_was_on_its_way(own_run):
    """5 players, as no checkpoint judges; so 10 pairs, 6 prompts, two orders."""
    on = threading.Event()
    places = itertools.count()

    def decide(*texts):
        if next(places) >= 30:
            on.wait(60)
        return by_length(*texts)

    with judging(decide) as server:
        process = elsewhere(own_run, server)
        file = own_run / "verdicts.jsonl"
        until(lambda: file.exists() and file.read_bytes().count(b"\n") == 30)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        on.set()
        again = elsewhere(own_run, server)
        said = "".join(again.communicate(timeout=120))
        assert again.returncode == 0 and KEY not in said, said
        times = Counter(server.asked)
        assert times.total() - len(times) <= served.AT_ONCE, "more were asked twice"
        assert server.keys == {f"Bearer {KEY}"}
    lines = read_lines(file)
    assert len(lines) == len({line["key"] for line in lines}) == len(times)
    best, *others = read_json(own_run / "tournament.json")["players"]
    assert best["name"] == tournament.LOOP, "the longest, to a judge of length"
    assert len(others) == 4
    texts = [path.read_bytes() for path in own_run.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in text for text in texts)


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

    def decide(prompt: str, a: str, b: str) -> str:
        right = answer_to(prompt)
        return "TIE" if (a == right) == (b == right) else "A" if a == right else "B"

    with judging(decide) as server:
        report = hold(run_dir, "--prompt_tokens", 24, "--judge", server.url)
    assert all("Say " in prompt and "<|" not in prompt for prompt in report["prompts"])
    human = report["completions"][tournament.HUMAN]
    assert [*map(answer_to, report["prompts"])] == human
    rating = {row["name"]: row["rating"] for row in report["players"]}
    newest = max(rating.keys() - {tournament.HUMAN, tournament.LOOP})
    assert rating[tournament.HUMAN] > rating[newest] - 1e-6 > rating[tournament.LOOP]
    assert report["doubts"] == []
