"""instruments/tournament.py, judge.py, ratings.py: who plays, who decides, and the arithmetic."""

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, environment, run

import eval as eval_program
import train
from config import GPTConfig, UsageError
from instruments import judge, ratings, tournament
from machinery import cli
from machinery.shards import Manifest
from model import GPT
from tokenizer import Tokenizer

# ------------------------------------------------------------------------------------ ratings


def wins_of(quality: np.ndarray) -> np.ndarray:
    """quality (P, N): of each player's text on each prompt -> wins (N, P, P)."""
    return judge.compare(list(quality))


def test_two_players_have_the_rating_of_their_odds():
    got = ratings.bradley_terry(np.array([[0, 30.0], [10.0, 0]]))
    assert got[0] - got[1] == pytest.approx(400 * np.log10(30.5 / 10.5), abs=1e-5)
    assert got.mean() == pytest.approx(1000)
    got = ratings.bradley_terry(np.array([[0, 20.0], [0, 0]]))  # has won everything: still finite
    assert got[0] - got[1] == pytest.approx(400 * np.log10(20.5 / 0.5), abs=1e-5)


def test_the_ratings_make_the_wins_as_expected_as_they_were():
    """The condition of the maximum: each player's expected wins are its wins. Even where one player
    has won everything, where plain iterations are slow and evalica gives all the same score."""
    rng = np.random.default_rng(1)
    separated = 20 * np.triu(np.ones((6, 6)), 1)
    mixed = rng.integers(0, 30, (6, 6)) * (1 - np.eye(6))
    for wins in (separated, mixed):
        r = ratings.bradley_terry(wins)
        virtual = (wins + 0.5) * (1 - np.eye(6))
        chance = 1 / (1 + 10 ** ((r[None] - r[:, None]) / 400))  # of i against j
        expected = ((virtual + virtual.T) * chance * (1 - np.eye(6))).sum(1)
        assert expected == pytest.approx(virtual.sum(1), rel=1e-4)


def test_bradley_terry_and_elo_are_evalicas():
    evalica = pytest.importorskip("evalica")
    rng = np.random.default_rng(0)
    quality = (np.linspace(0, 1.5, 5)[:, None] + rng.normal(size=(5, 40))).round(1)
    wins = wins_of(quality)
    assert (wins[:, ~np.eye(5, dtype=bool)] == 0.5).any(), "no tie is tested"
    outcome = {1.0: evalica.Winner.X, 0.5: evalica.Winner.Draw, 0.0: evalica.Winner.Y}
    pairs = [(i, j) for i in range(5) for j in range(i)]
    # half a virtual win of each over each is one draw more
    matches = [(i, j, w[i, j]) for w in wins for i, j in pairs] + [(i, j, 0.5) for i, j in pairs]
    x, y, results = zip(*[(f"p{i}", f"p{j}", outcome[s]) for i, j, s in matches])

    oracle = evalica.bradley_terry(x, y, results, limit=10_000, tolerance=1e-10).scores
    oracle = 400 * np.log10(oracle.sort_index().to_numpy())
    ours = ratings.bradley_terry(wins.sum(0))
    assert ours - 1000 == pytest.approx(oracle - oracle.mean(), abs=0.1)

    oracle = evalica.elo(x, y, results, initial=1000, base=10, scale=400, k=32).scores
    assert ratings.elo(matches, 5) == pytest.approx(oracle.sort_index().to_numpy(), abs=1e-6)


def test_intervals_are_those_of_prompts_not_of_matches():
    """Where a prompt decides all its matches, there is less evidence than there are matches."""
    rng = np.random.default_rng(0)
    n, p = 60, 6
    good_day = np.where(rng.random(n) < 0.5, 1, -1)
    quality = np.zeros((p, n)) + np.arange(p)[:, None] * good_day  # the order of all is reversed
    together = wins_of(quality)
    apart = together.copy()  # the same results per pair, each pair's in an order of its own
    for i in range(p):
        for j in range(i):
            mixed = rng.permutation(n)
            apart[:, i, j], apart[:, j, i] = together[mixed, i, j], together[mixed, j, i]
    assert np.array_equal(apart.sum(0), together.sum(0))
    width = [np.subtract(*ratings.interval(w)[::-1]) for w in (together, apart)]
    assert width[0][0] > 1.5 * width[1][0] and width[0][-1] > 1.5 * width[1][-1]


def test_the_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    skill = np.array([0.0, 0.5, 1.0])
    # P(i beats j) for normal noise; the truth is the rating of very many prompts
    truth = ratings.bradley_terry(wins_of(skill[:, None] + rng.normal(size=(3, 50_000))).sum(0))
    inside = []
    for trial in range(100):
        wins = wins_of(skill[:, None] + rng.normal(size=(3, 60)))
        low, high = ratings.interval(wins, resamples=200, seed=trial)
        inside.append((low <= truth) & (truth <= high))
    assert 0.88 <= np.mean(inside) <= 0.99


def test_elo_is_the_majoritys_and_depends_on_the_order():
    quality = np.array([[2.0, 2, 0], [1, 1, 1]])  # the first wins two prompts of three
    orders = ratings.elo_orders(wins_of(quality), orders=3, matches=1)
    assert orders == pytest.approx(np.tile([1016.0, 984.0], (3, 1)))
    rng = np.random.default_rng(0)
    orders = ratings.elo_orders(wins_of(rng.normal(size=(5, 41))), orders=20)
    assert orders.sum(1) == pytest.approx(np.full(20, 5000.0))
    assert (orders.max(0) - orders.min(0)).max() > 10


# ------------------------------------------------------------------------- judge by likelihood


def test_a_token_is_new_if_its_bigram_is():
    assert judge.novel([1, 2], [1, 2, 3]) == [True, False, True]
    assert judge.novel([1, 2, 3], [1, 2, 3]) == [True, False, False]  # 3 1 was not there
    assert judge.novel([1, 1], [1, 1]) == [False, False]
    assert judge.novel([1], []) == []


def test_novel_mean_is_the_mean_log_p_of_the_new_tokens():
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            seq_len=64,
            vocab_size=50,
            n_layer=1,
            n_head=2,
            n_kv_head=2,
            head_dim=8,
            n_embd=16,
            mlp_hidden=32,
            extras=(),
        )
    )
    model.init_weights()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    prompts = [[5, 6, 7], [5, 6, 7], [8, 8, 8], [9]]
    completions = [[8, 5, 6, 9], [1], [8, 8], []]
    got = judge.novel_mean(model, prompts, completions)

    def log_p(text: list[int], token: int) -> float:
        return model(torch.tensor([text]))[0, -1].log_softmax(-1)[token].item()

    new = [log_p([0, 5, 6, 7], 8), log_p([0, 5, 6, 7, 8], 5), log_p([0, 5, 6, 7, 8, 5, 6], 9)]
    assert got[0] == pytest.approx(np.mean(new), abs=1e-4)
    assert got[1] == pytest.approx(log_p([0, 5, 6, 7], 1), abs=1e-4)
    assert list(got[2:]) == [-np.inf] * 2  # nothing new, or nothing at all: the last place
    wins = judge.compare([got[:1], got[2:3], got[3:]])[0]
    assert wins.tolist() == [[0.5, 1, 1], [0, 0.5, 0.5], [0, 0.5, 0.5]]


# --------------------------------------------------------------------------- judge on a server


@contextmanager
def judge_server(answer, refuse_chat: bool = False, refuse_from: int = 10**9):
    """answer(question, number) -> the model's text, or a whole reply. Gives the address and the
    list of requests, from the number refuse_from on of which it answers with an error."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        broken = False

        def do_POST(self):
            if self.broken:  # as uvicorn after an error of its program: this connection is no more
                self.close_connection = True
                return
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            chat = self.path == "/v1/chat/completions"
            requests.append((self.path, body))
            if chat and refuse_chat:
                self.broken = True
                return self.reply(500, {"error": "tokenizer.chat_template is not set"})
            if len(requests) >= refuse_from:
                return self.reply(404, {"error": "the model was unloaded"})
            question = body["messages"][0]["content"] if chat else body["prompt"]
            text = answer(question, len(requests))
            if not isinstance(text, str):
                return self.reply(200, text)
            choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            self.reply(200, {"id": "1", "object": "x", "choices": [choice | {"index": 0}]})

        def reply(self, status: int, tree: dict | bytes):
            kind = "text/html" if isinstance(tree, bytes) else "application/json"
            content = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    server.handle_error = lambda *_: None  # a client that has given up is no news
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        server.server_close()


def the_larger(question: str, number: int) -> str:
    """Knows the answer: the texts are numbers, and the larger one is better."""
    a, b = (int(re.search(rf"^{x}:\n *(-?\d+)", question, re.MULTILINE)[1]) for x in "AB")
    return f"Answer: {'A' if a > b else 'B'}."


PROMPTS, TEXTS = ["p", "q", "r"], [["1", "5", "2"], ["2", "4", "9"], ["3", "3", "7"]]


def asked(answer, **options):
    """wins (N, P, P), the judge, and the requests for TEXTS."""
    with judge_server(answer, **options) as (url, requests):
        server = judge.Server(url, "scripted", 20)
        return server.compare(PROMPTS, TEXTS), server, requests


openai = pytest.mark.skipif(find_spec("openai") is None, reason="openai is not installed")


@openai
def test_a_judge_that_knows_is_believed_in_both_orders(capsys):
    wins, server, requests = asked(the_larger)
    quality = np.array([[float(t) for t in texts] for texts in TEXTS])
    assert np.array_equal(wins, wins_of(quality))
    # one question to begin with, then each of 3 prompts x 3 pairs in both orders
    questions = [body["messages"][0]["content"] for _, body in requests[1:]]
    assert len(questions) == len(set(questions)) == 18
    assert server.answers == {"A": 9, "B": 9, "tie": 0, "unparsable": 0}
    assert all(body["model"] == "scripted" and body["temperature"] == 0 for _, body in requests)
    assert "scripted is asked through chat/completions" in capsys.readouterr().out


@openai
def test_a_judge_that_always_says_a_makes_ties():
    wins, server, _ = asked(lambda question, number: "A")
    assert (wins == 0.5).all() and server.answers["A"] == 18
    assert ratings.bradley_terry(wins.sum(0)) == pytest.approx([1000] * 3)


@openai
def test_unparsable_answers_are_half_wins_counted_and_said(capsys):
    def answer(question, number):
        return "Both are fine." if "p\n" in question else the_larger(question, number)

    wins, server, _ = asked(answer)
    assert (wins[0] == 0.5).all() and wins[1, 0, 1] == 1
    assert server.answers == {"A": 6, "B": 6, "tie": 0, "unparsable": 6}
    assert "its answers: 6 A, 6 B, 0 tie, 6 unparsable" in capsys.readouterr().out


@openai
def test_a_server_that_refuses_chat_is_asked_for_completions(capsys):
    wins, _, requests = asked(the_larger, refuse_chat=True)
    assert wins[0, 2, 0] == 1 and wins[0, 0, 2] == 0
    assert [path for path, _ in requests].count("/v1/chat/completions") == 1
    said = capsys.readouterr().out
    assert "asked through completions, as it refuses chat" in said and "chat_template" in said


@openai
def test_a_server_that_refuses_later_is_one_sentence():
    """Not a traceback: the user's server is at fault, not the program."""
    with judge_server(the_larger, refuse_from=5) as (url, _):
        server = judge.Server(url, "scripted", 20)
        with pytest.raises(UsageError, match="HTTP 404: .*the model was unloaded") as caught:
            server.compare(PROMPTS, TEXTS)
        assert cli.exit_code(caught.value) == 2


@openai
@pytest.mark.parametrize("reply", [{"choices": []}, {"id": "1"}, b"<html>a proxy</html>", {}])
def test_a_reply_without_an_answer_is_one_sentence(reply):
    with judge_server(lambda question, number: reply) as (url, _):
        with pytest.raises(UsageError, match="its reply has no choices: .*is it running"):
            judge.Server(url, "scripted", 20)


@openai
def test_a_fault_of_the_judge_is_a_traceback():
    """Of somebody who has changed `ask`: no server is to blame."""
    with judge_server(the_larger) as (url, _):
        server = judge.Server(url, "scripted", 20)
        server.client = None
        with pytest.raises(AttributeError):
            server.ask("A or B?")


def test_only_a_clear_letter_is_an_answer():
    letters = {
        "A": "A",
        " b": "",
        "B.": "B",
        "**A**": "A",
        "Answer: B": "B",
        "A or B?": "",
        "": "",
        "Apple": "",
        "<think>A? B?</think>B": "B",
        "<think>Okay, so A contin": "",
    }
    for text, letter in letters.items():
        assert judge.parse(text) == (letter or "unparsable"), text


@openai
def test_a_judge_that_hangs_or_is_down_is_one_sentence():
    release = threading.Event()
    with judge_server(lambda question, number: release.wait(60)) as (url, _):
        start = time.monotonic()
        with pytest.raises(UsageError, match=r"APITimeoutError.* 0.5 s enough for an .*\?$"):
            judge.Server(url, "scripted", 0.5)
        assert time.monotonic() - start < 10
        release.set()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(ValueError, match="gives no answer .*is it running"):
        judge.Server(url, "scripted", 5)


@openai
def test_a_judge_that_hangs_later_ends_the_tournament_in_bounded_time():
    release = threading.Event()
    with judge_server(lambda q, number: "A" if number < 4 else release.wait(60)) as (url, requests):
        server = judge.Server(url, "scripted", 0.5)
        start = time.monotonic()
        with pytest.raises(ValueError, match="gives no answer"):
            server.compare(PROMPTS * 10, [texts * 10 for texts in TEXTS])
        assert time.monotonic() - start < 20
        assert len(requests) < 100  # of 180 questions, most are never asked
        release.set()


# ------------------------------------------------------------------------- controls and doubts


def table_of(*names: str, bpb: float = 2.0) -> list[dict]:
    """Best first."""
    controls = (tournament.HUMAN, tournament.LOOP)
    return [
        dict(name=name, rating=1000.0 - i, bpb=None if name in controls else bpb)
        for i, name in enumerate(names)
    ]


def test_a_judge_is_doubted_for_the_loop_the_human_and_its_own_loss():
    def doubts(*names, judge_bpb=1.9):
        return tournament.why_untrusted(table_of(*names), judge_bpb)

    assert doubts("human text", "b", "a", "loop") == []
    assert doubts("b", "human text", "a", "loop") == []  # 2 of 4: ceil(4 / 3)
    (why,) = doubts("b", "a", "human text", "loop")
    assert "human text in place 3 of 4" in why
    (why,) = doubts("human text", "loop", "b", "a")
    assert "loop in place 2 of 4" in why
    assert "loop in place 3 of 5" in doubts("human text", "b", "loop", "a", "c")[0]  # the middle
    (why,) = doubts("human text", "b", "loop", judge_bpb=2.0)
    assert "2.000 bits per byte it is no better a model than b at 2.000" in why
    assert doubts("human text", "b", "loop", judge_bpb=None) == []
    tied = [row | {"rating": 1000.0} for row in table_of("b", "human text", "a", "loop")]
    assert "loop in place 1 of 4" in tournament.why_untrusted(tied, None)[0]


def test_progress_is_spearmans():
    steps = (300, None, 400, 200, 100, None)
    rows = [dict(step=s, rating=6.0 - i) for i, s in enumerate(steps)]  # best first
    assert tournament.progress(rows) == pytest.approx(0.8)
    assert tournament.progress(rows[:3]) is None
    assert tournament.progress([*rows, dict(step=300, rating=0.0)]) is None
    tied = [dict(step=s, rating=r) for s, r in ((1, 5.0), (2, 5.0), (3, 5.0), (4, 1.0))]
    assert tournament.progress(tied) == tournament.progress(tied[::-1])
    assert tournament.progress(tied) == pytest.approx(-0.7746, abs=1e-4)  # scipy.stats.spearmanr
    assert tournament.progress(tied[:3]) is None


# ---------------------------------------------------------------------------------- the command

OPTIONS = ["--device", "cpu", "--prompt_tokens", 8, "--max_new_tokens", 16, "--n_prompts", 12]


@pytest.fixture(scope="module")
def trained(small_data, tmp_path_factory) -> Path:
    """A run with checkpoints of steps 4, 8 and 12."""
    run_dir = tmp_path_factory.mktemp("tournament") / "run"
    folders = ["--data_dir", str(small_data), "--run_dir", str(run_dir)]
    train.main(["tiny", *SMALL, *folders, *"--save_every 4 --keep 9 --eval_every 0".split()])
    return run_dir


def hold(run_dir: Path, *more) -> dict:
    """`eval.py tournament`, in this process; what it wrote to tournament.json."""
    argv = ["tournament", "--run_dir", run_dir, *OPTIONS, *more]
    assert eval_program.main([str(a) for a in argv]) == 0
    return json.loads((run_dir / "tournament.json").read_text())


def players(report: dict) -> set[str]:
    return {row["name"] for row in report["players"]}


def test_the_judge_does_not_play_and_the_controls_always_do(trained, tmp_path, capsys):
    report = hold(trained)
    said = capsys.readouterr().out
    assert players(report) == {"step 4", "step 8", "human text", "loop"}
    newest = trained / "checkpoints" / "step_00000012"
    assert f"{newest} is the judge, so it does not play" in said
    assert re.search(r"^12 prompts, judged by .*step_00000012, [\d.]+ bits", said, re.M)
    columns = r" +\d+ +\d+ \.\. \d+ +\d+ +\d+ \.\. \d+ +[\d.-]+$"
    for name in ("human text", "loop", "step 4", "step 8"):
        assert re.search(rf"^{name}{columns}", said, re.M), said
    assert all(f"this judge cannot be trusted: {why}" in said for why in report["doubts"])

    completions = report["completions"]
    assert {len(texts) for texts in completions.values()} == {12} and len(report["prompts"]) == 12
    wins = report["wins"]  # wins and losses make 12 of each pair; against itself, half of them
    assert all(wins[a][b] + wins[b][a] == 12 for a in wins for b in wins) and len(wins) == 4
    for prompt, loop in zip(report["prompts"], completions["loop"]):
        assert prompt.endswith(loop[: len(loop) // 2]), "the loop repeats the end of the prompt"

    copy = tmp_path / "of_the_judge"  # the same checkpoint elsewhere does not play either
    shutil.copytree(newest, copy)
    earliest = trained / "checkpoints" / "step_00000004"
    report = hold(tmp_path, "--judge", newest, "--players", copy, earliest)
    assert players(report) == {"step 4", "human text", "loop"}


def test_the_same_seed_is_the_same_tournament_on_held_out_text(trained, small_data):
    reports = [hold(trained, "--seed", seed) for seed in (0, 0, 1)]
    assert reports[0] == reports[1] and reports[0]["prompts"] != reports[2]["prompts"]
    manifest = Manifest.load(small_data)
    tokenizer = Tokenizer.load(small_data / "tokenizer.json")
    rows = [manifest.row("val", 0, i) for i in range(manifest.rows("val"))]
    held_out = [tokenizer.decode(i for i in row if i != manifest.bos_id) for row in rows]
    for prompt, rest in zip(reports[0]["prompts"], reports[0]["completions"]["human text"]):
        assert any(prompt + rest in text for text in held_out)


@openai
def test_own_texts_and_a_server_as_judge(trained, capsys):
    """The judge looks for a word that only the human has written."""

    def likes_the_human(question, number):
        a, b = question.split("\nA:\n")[1].split("\nB:\n")
        return "A" if "Jupiter" in a else "B" if "Jupiter" in b else "neither"

    text = "The largest planet of all that go around our sun is called Jupiter."
    with judge_server(likes_the_human) as (url, _):
        judge = ["--judge_url", url, "--judge_model", "scripted"]
        report = hold(trained, "--prompts", text, "--max_new_tokens", 40, *judge)
    assert report["prompts"][0] + report["completions"]["human text"][0] == text
    assert report["players"][0]["name"] == "human text"
    assert players(report) == {"step 4", "step 8", "step 12", "human text", "loop"}
    assert report["judge_answers"] == {"A": 4, "B": 4, "tie": 0, "unparsable": 12}
    said = capsys.readouterr().out
    assert "this judge cannot be trusted: it puts the loop in place 2 of 5" in said


MISTAKES = {
    "no run": (["--run_dir", "{tmp}/none"], "no checkpoint in .*none/checkpoints; train first"),
    "no player": (["--players", "{root}/step_00000012"], "no player is left beside the judge"),
    "no checkpoint": (["--judge", "{tmp}"], r"is no checkpoint \(.*\), nor a run with one"),
    "a run plays": (["--players", "{run}"], r"is no checkpoint \(it has no MANIFEST.json\)$"),
    "bad seed": (["--seed", "-1"], "--seed -1 must be 0 or more"),
    "two judges": (["--judge", "{run}", "--judge_url", "http://x/v1"], "two judges; give one"),
    "no model": (["--judge_url", "http://127.0.0.1:1/v1"], "needs --judge_model"),
    "down": (
        ["--judge_url", "http://127.0.0.1:1/v1", "--judge_model", "x"],
        "is it running, .*/v1",
    ),
    "short text": (["--prompts", "a b"], "leaves no human continuation"),
    "long prompt": (["--prompt_tokens", "60"], "no held-out document has 76 tokens within a row"),
    "nothing": (["--max_new_tokens", "0"], "must be 1 or more"),
    "long text": (
        ["--prompts", "word " * 90, "--prompt_tokens", "60"],
        "need 77 positions, .* has 64",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_a_sentence_and_exit_code_2(name, trained, tmp_path, monkeypatch, capsys):
    if name in ("no model", "down"):
        pytest.importorskip("openai")
    args, words = MISTAKES[name]
    places = dict(tmp=tmp_path, run=trained, root=trained / "checkpoints")
    args = [a.format(**places) for a in args]
    argv = ["tournament", "--run_dir", trained, *OPTIONS, *args]
    monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, argv)])
    with pytest.raises(SystemExit) as end:
        cli.run(eval_program.main)
    assert end.value.code == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.slow
@openai
@pytest.mark.parametrize("chat", [False, True])
def test_a_real_server_answers_in_both_orders(chat, small_data, tmp_path):
    """`transformers serve` on an export of our own: a model of this size has no taste, so that the
    test is of the way there and back. Without a chat template the server refuses chat."""
    for library in ("transformers", "safetensors", "fastapi", "uvicorn"):
        pytest.importorskip(library)
    folders = ["--data_dir", str(small_data), "--run_dir", str(tmp_path / "run")]
    train.main(["tiny", *SMALL, *folders, "--extras"])
    folder = tmp_path / "judge"
    done = run("export.py", "--run_dir", tmp_path / "run", "--out", folder, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    if chat:
        file = folder / "tokenizer_config.json"
        template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    with transformers_serve(folder, tmp_path / "cache") as url:
        server = judge.Server(url, str(folder), 120)
        wins = server.compare(["def f", "class A"], [["(x):", ":"], ["()", "(B)"], ["x", "y"]])
    assert server.chat == chat
    assert sum(server.answers.values()) == 12  # 2 prompts x 3 pairs x 2 orders
    assert wins + wins.transpose(0, 2, 1) == pytest.approx(np.ones((2, 3, 3)))


@contextmanager
def transformers_serve(folder: Path, cache: Path):
    """The address of a server with the model in `folder`; it ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (cache / "hub").mkdir(parents=True)
    options = f"--device cpu --dtype float32 --host 127.0.0.1 --port {port}".split()
    command = [Path(sys.executable).parent / "transformers", "serve", folder, *options]
    server = subprocess.Popen(command, env=environment(HF_HOME=str(cache)))
    try:
        deadline = time.monotonic() + 300
        while True:
            assert server.poll() is None and time.monotonic() < deadline, "it did not start"
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(30)
