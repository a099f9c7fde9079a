"""The tournament: checkpoints continue the same prompts, a judge compares them, ratings follow.

Reads checkpoints and held-out documents; prints a table and writes RUN_DIR/tournament.json, with
all the texts, which are worth reading. Two players whose place is known take part too: the human
text, which should come out at the top, and a loop of the prompt's last tokens, which should come
out at the bottom. Where they do not, that is printed as a reason to doubt the judge. Next:
judge.py, who decides, and the arithmetic of the ratings.
"""

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from config import Count, Local, UsageError
from instruments.exams import judge
from machinery import checkpoint
from machinery.disk import write_json
from machinery.output import say
from machinery.trained import EvalConfig, Trained
from model import GPT
from tokenizer import Tokenizer

HUMAN = "human text"
LOOP = "loop"
LOOP_LEN = 8  # tokens

Texts = list[list[int]]  # token ids of one text for each prompt


@dataclass(frozen=True)
class TournamentConfig:
    """Let checkpoints continue the same prompts, and a judge compare what they wrote."""

    run_dir: Local = ""
    """Folder of the run, for tournament.json; empty: runs/PRESET."""
    players: tuple[str, ...] = ()
    """Checkpoint folders; empty: all checkpoints of the run."""
    data_dir: str = ""
    """Data folder; empty: the one that the players were trained on."""
    device: str = "auto"
    """auto, cuda, mps or cpu."""
    n_prompts: Count = 60
    """Held-out documents to take."""
    prompt_tokens: Count = 32
    """Tokens of a document that the players are given."""
    max_new_tokens: Count = 64
    """Tokens that they add."""
    seed: int = 0
    """Seed of the choice of documents and of the draws."""
    judge: str = ""
    """A checkpoint, or a run's folder (its newest), which judges by likelihood; empty: the run's
    newest, which then does not play. One of another seed or run does not favour its own kind."""


def play(config: TournamentConfig, load_model: Callable) -> None:
    """`eval.py tournament`: print ratings of the players, and write them to
    RUN_DIR/tournament.json. load_model: EvalConfig -> Trained."""
    paths, judging = entrants(config)
    which = EvalConfig(data_dir=config.data_dir)
    records = {p: Trained(which, p, checkpoint.read_trainer(p)) for p in [*paths, judging]}
    manifest = records[paths[0]].data
    tokenizer = Tokenizer.load(manifest.tokenizer_file())
    prompts, human = documents(config, manifest)
    for record in records.values():
        check_fits(record, manifest, max(map(len, prompts)), config.max_new_tokens)

    def load(path: Path) -> GPT:
        return load_model(EvalConfig(checkpoint=str(path), device=config.device)).model

    written = {str(path): continue_all(load(path), prompts, config) for path in paths}
    written[HUMAN] = human
    n = config.max_new_tokens
    written[LOOP] = [(prompt[-LOOP_LEN:] * n)[:n] for prompt in prompts]
    decoded = {name: [*map(tokenizer.decode, texts)] for name, texts in written.items()}
    asked = [*map(tokenizer.decode, prompts)]
    model = load(judging)
    wins = judge.compare([judge.novel_mean(model, prompts, x) for x in written.values()])
    table = rate(list(written), wins)
    doubts = kinship(records[judging], [records[path] for path in paths]) + why_untrusted(table)
    show(table, str(judging), len(prompts), doubts)
    path = Path(config.run_dir) / "tournament.json"
    report = dict(
        config=asdict(config),
        judge=str(judging),
        doubts=doubts,
        players=table,
        prompts=asked,
        completions=decoded,
    )
    write_json(path, report)
    say(f"wrote {path}")


# ------------------------------------------------------------------------------- the players


def entrants(config: TournamentConfig) -> tuple[list[Path], Path]:
    """The players' checkpoints, as named or else the run's, oldest first; and the judge's, which
    does not play, as a judge prefers its own text."""
    root = Path(config.run_dir) / "checkpoints"
    folder = Path(config.judge or config.run_dir)
    judging = checkpoint.latest_valid(folder / "checkpoints") or folder
    named = [*map(Path, dict.fromkeys(config.players))]
    players = named or checkpoint.checkpoints(root)[::-1]
    players = [path for path in players if path.resolve() != judging.resolve()]
    if not players:
        raise UsageError(
            f"{root} has no checkpoint beside the judge's; train with --keep_every, or name some: "
            "--players"
        )
    return players, judging


def check_fits(player: Trained, manifest, longest: int, new_tokens: int) -> None:
    """UsageError for a player, or a judge, that cannot read what the others write."""
    path = player.path
    has = player.origin.model.seq_len
    if player.origin.tokenizer_sha256 != manifest.tokenizer_sha256:
        raise UsageError(f"{path} has another tokenizer than the text of {manifest.dir}")
    if player.origin.tuned:
        raise UsageError(f"{path} was tuned on conversations; a tournament is of models of text")
    if 1 + longest + new_tokens > has:
        raise UsageError(
            f"{path} has {has} positions, too few for prompts of {longest} tokens "
            f"(--prompt_tokens) and --max_new_tokens {new_tokens}"
        )


def documents(config: TournamentConfig, manifest) -> tuple[Texts, Texts]:
    """Token ids of the beginnings of held-out documents, at most one of a row, and of what
    follows."""
    begin = config.prompt_tokens
    whole = begin + config.max_new_tokens
    sources = range(len(manifest.sources))
    rows = [(source, i) for source in sources for i in range(manifest.rows("val", source))]
    found = []
    for k in np.random.default_rng(config.seed).permutation(len(rows)):
        row = manifest.row("val", *rows[k]).astype(np.int64)
        for ids in np.split(row, np.flatnonzero(row == manifest.bos_id))[1:]:  # BOS in front
            if len(ids) > whole and len(found) < config.n_prompts:
                found.append(ids[1 : 1 + whole].tolist())
                break
    if not found:
        raise UsageError(
            f"no held-out document has {whole} tokens within a row of {manifest.row_len}; ask for "
            "fewer with --prompt_tokens and --max_new_tokens"
        )
    return [ids[:begin] for ids in found], [ids[begin:] for ids in found]


def continue_all(model, prompts: Texts, config: TournamentConfig) -> Texts:
    """Continue each prompt at temperature 1, as samples loop at a lower one, and a judge by
    likelihood likes loops. The draws are the same for every player."""
    bos = model.config.bos_id
    device = model.cos.device
    generator = torch.Generator(device).manual_seed(config.seed)
    idx = torch.tensor([[bos, *prompt] for prompt in prompts], device=device)  # (N, T)
    out = model.generate(
        idx, config.max_new_tokens, temperature=1.0, top_k=0, stop_id=bos, generator=generator
    )
    drawn = out[:, idx.size(1) :].tolist()
    return [list(itertools.takewhile(lambda i: i != bos, ids)) for ids in drawn]


# --------------------------------------------------------------------------------- the table


def rate(names: list[str], wins: np.ndarray) -> list[dict]:
    """The players with their ratings, best first."""
    columns = zip(names, judge.bradley_terry(wins.sum(0)), *judge.interval(wins))
    rows = [dict(name=name, rating=r, low=low, high=high) for name, r, low, high in columns]
    return sorted(rows, key=lambda row: -row["rating"])


def kinship(judge: Trained, players: list[Trained]) -> list[str]:
    """A sentence if the judge, by its trainer.json, comes from the run of a player."""
    if all(judge.origin.identity != player.origin.identity for player in players):
        return []
    return [
        f"{judge.path} is of a player's own run, and likelihood favours text like its own: "
        "later steps rate higher; take one of another seed: --judge"
    ]


def why_untrusted(table: list[dict]) -> list[str]:
    """A sentence for each player of known place that the judge puts elsewhere."""
    rating = {row["name"]: row["rating"] for row in table}
    # equal ratings share the better place; two that differ by rounding are equal
    place = {name: 1 + sum(r > own + 1e-6 for r in rating.values()) for name, own in rating.items()}
    n = len(table)
    doubts = []
    if place[LOOP] <= (n + 1) / 2:
        doubts.append(f"it puts the loop in place {place[LOOP]} of {n}, not in the lower half")
    if place.get(HUMAN, 0) > -(-n // 3):
        doubts.append(f"it puts the human text in place {place[HUMAN]} of {n}, below the top third")
    return doubts


def show(table: list[dict], judged_by: str, n_prompts: int, doubts: list[str]) -> None:
    width = max(len(row["name"]) for row in table)
    say(f"\n{n_prompts} prompts, judged by {judged_by}")
    say(f"{'player':{width}}  rating  95% over prompts")
    for row in table:
        say("{name:{0}}  {rating:6.0f}  {low:6.0f} .. {high:.0f}".format(width, **row))
    for doubt in doubts:
        say(f"a reason to doubt this judge: {doubt}")
