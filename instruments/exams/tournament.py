"""The tournament: models write after the same prompts, a judge compares them, ratings follow.

Reads checkpoints, and held-out documents or a file of prompts; prints a table and writes
RUN_DIR/tournament.json, with all the texts, which are worth reading. Players whose place is known
take part too: a loop of the prompt's end, which should come out at the bottom, and of held-out
documents the human text, which should come out at the top. Where they do not, that is printed as a
reason to doubt the judge. Next: judge.py, a checkpoint that decides, and the arithmetic of the
ratings; served.py, a judge behind an address.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import data
from config import Count, Local, UsageError
from instruments.exams import judge
from instruments.exams.lines import read_lines, read_text
from instruments.exams.served import Server
from instruments.pages.multiplier import aligned
from instruments.talk.sample import SampleConfig, continuations
from machinery import checkpoint, disk, trained
from machinery.output import say
from machinery.trained import EvalConfig, Trained
from preparation.chat import marks, prompt_ids

HUMAN = "human text"
LOOP = "loop"
LOOP_LEN = 24  # characters
CRITERIA = "The better text follows from the prompt, is coherent, and says something interesting."


@dataclass(frozen=True)
class TournamentConfig:
    """Let models write after the same prompts, and a judge compare what they wrote."""

    run_dir: Local = ""
    """Folder of the run, for tournament.json; empty: runs/PRESET."""
    players: tuple[str, ...] = ()
    """Presets or runs (their newest checkpoints), or checkpoint folders; empty: all checkpoints of
    the run."""
    data_dir: str = ""
    """Data folder; empty: the one that the first player was trained on."""
    device: str = "auto"
    """auto, cuda, mps or cpu."""
    prompts: Local = ""
    """A file with a prompt on each line, `{"text": ...}`, such as instruments/exams/prompts.jsonl;
    empty: the beginnings of held-out documents, or for tuned models the questions of held-out
    conversations."""
    n_prompts: Count = 60
    """Held-out documents, or questions, to take; a file of prompts is taken whole."""
    prompt_tokens: Count = 32
    """Tokens of a document that the players are given; of a question, at most."""
    max_new_tokens: Count = 64
    """Tokens that they add."""
    seed: int = 0
    """Seed of the choice of documents and of the draws."""
    judge: str = ""
    """A preset, a run (its newest) or a checkpoint, which judges by likelihood; empty: the run's
    newest, which then does not play. One of another seed or run does not favour its own kind. Or
    the URL of a server that speaks OpenAI's protocol: http://localhost:8080/v1."""
    judge_model: str = ""
    """The model of that server; empty: the only one that it lists."""
    judge_tokens: Count = 16
    """Tokens of a reply of that server, at most; a model that thinks first needs thousands."""
    criteria: Local = ""
    """A file with what that server is told of a better text; empty: that it follows from the
    prompt, is coherent, and says something interesting."""


@dataclass
class Prompt:
    """A line of a file of prompts."""

    text: str


def play(config: TournamentConfig, load_model: Callable) -> None:
    """`eval.py tournament`: print ratings of the players, and write them to
    RUN_DIR/tournament.json. load_model: EvalConfig -> Trained."""
    paths, judging = entrants(config)
    known = {
        path: Trained(EvalConfig(data_dir=config.data_dir), path, checkpoint.read_trainer(path))
        for path in [*paths, *judging]
    }
    first = known[paths[0]]
    human = {}
    if config.prompts:
        # without spaces at their ends, as in eval.py sample
        asked = [line.text.rstrip(" ") for line in read_lines(config.prompts, Prompt)]
    else:
        asked, human[HUMAN] = held_out(config, first)
    for each in known.values():
        check_fits(each, first, asked, config.max_new_tokens)
    if not judging:  # so that a server that is not there is named before anybody writes
        criteria = read_text(config.criteria) if config.criteria else CRITERIA
        kept = Path(config.run_dir) / "verdicts.jsonl"
        server = Server(config.judge, config.judge_model, criteria, config.judge_tokens, kept)

    # At a lower temperature than 1 samples loop, and a judge by likelihood likes loops.
    draws = SampleConfig(
        temperature=1.0, top_k=0, seed=config.seed, max_new_tokens=config.max_new_tokens
    )

    def load(path):
        return load_model(EvalConfig(checkpoint=str(path), device=config.device))

    def written_by(path):
        player = load(path)
        return continuations(player.model, player.tokenizer, asked, player.provenance.tuned, draws)

    written = {str(path): written_by(path) for path in paths} | human
    length = 4 * config.max_new_tokens  # characters
    written[LOOP] = [(text[-LOOP_LEN:] * length)[:length] for text in asked]
    texts = [*written.values()]
    if judging:
        named = str(judging[0])
        decides = load(judging[0])
        wins = judge.compare([likelihood(decides, asked, own) for own in texts])
        doubts = ["likelihood favours text like the judge's own, as of later steps of its run"]
    else:
        named = f"{server.model} at {config.judge}"
        wins, doubts = server.compare(asked, texts)
    say(f"\n{len(asked)} prompts, judged by {named}")
    table = rate([*written], wins)
    doubts += why_untrusted(table)
    for doubt in doubts:
        say(f"a reason to doubt this judge: {doubt}")
    path = Path(config.run_dir) / "tournament.json"
    disk.write_json(
        path,
        dict(
            config=asdict(config),
            judge=named,
            doubts=doubts,
            players=table,
            prompts=asked,
            completions=written,
        ),
    )
    say(f"wrote {path}")


# ------------------------------------------------------------------------------- the players


def entrants(config: TournamentConfig) -> tuple[list[Path], list[Path]]:
    """The players' checkpoints, as named or else the run's, oldest first; and the judge's, unless
    it is behind an address. It does not play, as a judge prefers its own text."""

    def checkpoint_of(word):
        return trained.find_checkpoint(EvalConfig(**trained.find_model(word)))

    players = [*dict.fromkeys(map(checkpoint_of, config.players))]
    root = Path(config.run_dir) / "checkpoints"
    players = players or checkpoint.checkpoints(root)[::-1]
    judging = []
    if "://" not in config.judge:
        judging = [checkpoint_of(config.judge or config.run_dir)]
        players = [path for path in players if path.resolve() != judging[0].resolve()]
    if not players:
        raise UsageError(
            f"{root} has no checkpoint for a player; train with --keep_every, or name some: "
            "--players"
        )
    return players, judging


def check_fits(player: Trained, first: Trained, prompts: list[str], new_tokens: int) -> None:
    """UsageError for a player, or a judge, that cannot read what the others write."""
    tuned = player.provenance.tuned
    if tuned != first.provenance.tuned:
        raise UsageError(
            f"of {player.path} and {first.path} one was tuned on conversations, the other was not: "
            "let them play apart"
        )
    has = player.provenance.model.seq_len
    longest = max(len(prompt_ids(text, player.tokenizer, tuned)[0]) for text in prompts)
    if longest + new_tokens > has:
        raise UsageError(
            f"{player.path} has {has} positions, too few for prompts of {longest} tokens "
            f"(--prompt_tokens) and --max_new_tokens {new_tokens}"
        )


def held_out(config: TournamentConfig, player: Trained) -> tuple[list[str], list[str]]:
    """The beginnings of held-out documents, at most one of a row, and what follows; of
    conversations, the first question and its answer."""
    manifest = player.data
    tokenizer = player.tokenizer
    begin = config.prompt_tokens
    new = config.max_new_tokens
    tuned = player.provenance.tuned
    least = 1 if tuned else new  # tokens of what follows: an answer has its own end
    found = []
    for source, i in np.random.default_rng(config.seed).permutation(data.val_rows(manifest)):
        row = manifest.row("val", source, i)
        for document in np.split(row, np.flatnonzero(row == manifest.bos_id))[1:]:
            ids = document[1:]  # without BOS
            length = begin
            if tuned:
                # <|user|> question <|end|> <|assistant|> answer <|end|> ...
                ends = np.flatnonzero(ids == marks(tokenizer)[2])
                question, answer, *_ = [*np.split(ids, ends), ids[:0]]
                ids = [*question[1:], *answer[2:]]
                length = len(question) - 1
            if length <= begin and len(ids) >= length + least and len(found) < config.n_prompts:
                whole = tokenizer.decode(ids[: length + new])
                begin_text = tokenizer.decode(ids[:length]).rstrip(" ")
                found.append((begin_text, whole[len(begin_text) :]))
                break
    if not found:
        raise UsageError(
            f"no held-out document in {manifest.dir} has {begin + new} tokens within a row of "
            f"{manifest.row_len} (or of conversations, no question has at most {begin}); change "
            "--prompt_tokens or --max_new_tokens"
        )
    return tuple(map(list, zip(*found)))


# --------------------------------------------------------------------- a checkpoint as the judge


def likelihood(player: Trained, prompts: list[str], texts: list[str]) -> np.ndarray:
    """judge.novel_mean of texts, in the tokens of the judge, as far as it has positions."""
    seq_len = player.provenance.model.seq_len
    asked = [prompt_ids(x, player.tokenizer, player.provenance.tuned)[0] for x in prompts]
    before = [ids[1:] for ids in asked]  # without BOS, which the judge adds
    after = [
        player.tokenizer.encode(text)[: seq_len - len(ids)] for text, ids in zip(texts, before)
    ]
    return judge.novel_mean(player.model, before, after)


# --------------------------------------------------------------------------------- the table


def rate(names: list[str], wins: np.ndarray) -> list[dict]:
    """Print the players with their ratings, best first; returns them."""
    keys = ("name", "rating", "low", "high")
    columns = zip(names, judge.bradley_terry(wins.sum(0)), *judge.interval(wins))
    table = [dict(zip(keys, column)) for column in columns]
    table.sort(key=lambda row: -row["rating"])
    rows = [("player", "rating", "95% over prompts")]
    rows += [
        (row["name"], f"{row['rating']:.0f}", f"{row['low']:.0f} .. {row['high']:.0f}")
        for row in table
    ]
    say("\n".join(aligned(rows)))
    return table


def why_untrusted(table: list[dict]) -> list[str]:
    """A sentence for each player of known place that the judge puts elsewhere."""
    rating = {row["name"]: row["rating"] for row in table}
    n = len(table)
    doubts = []
    for name, best, worst in ((LOOP, (n + 1) // 2 + 1, n), (HUMAN, 1, -(-n // 3))):
        if name in rating:
            # equal ratings share the better place; two that differ by rounding are equal
            place = 1 + sum(r > rating[name] + 1e-6 for r in rating.values())
            if not best <= place <= worst:
                doubts.append(f"it puts the {name} in place {place} of {n}, not {best} to {worst}")
    return doubts
