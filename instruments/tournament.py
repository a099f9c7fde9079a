"""The tournament: checkpoints continue the same prompts, a judge compares them, ratings follow.

Reads checkpoints and held-out documents, or prompts (the project's own 40 are in prompts.jsonl
beside this file); prints a table and writes RUN_DIR/tournament.json, with all the texts, which are
worth reading. Two players whose place is known always take part: the human text, which should come
out at the top, and a loop of the prompt's last tokens, which should come out at the bottom. Where
they do not, the table says that the judge cannot be trusted. To prompts alone there is no human
text. Of data with conversations, the players answer held-out questions instead. eval.py calls
`hold`. Next: judge.py, who decides; ratings.py, the arithmetic.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import data
from config import Count, UsageError
from flops import bits_per_byte
from instruments import judge, ratings
from machinery import checkpoint
from machinery.disk import writable, write_json
from machinery.shards import Manifest
from machinery.trained import EvalConfig, is_tuned, run_of
from preparation.chat import prompt_ids
from tokenizer import Tokenizer

HUMAN, LOOP = "human text", "loop"
LOOP_LEN = 8  # tokens
BPB_ROWS = 64  # validation rows for the bits per byte of players and judge


@dataclass(frozen=True)
class TournamentConfig:
    """Let checkpoints continue the same prompts, and a judge compare what they wrote."""

    run_dir: str = ""
    """Folder of the run, for tournament.json; empty: runs/PRESET."""
    players: tuple[str, ...] = ()
    """Checkpoint folders; empty: all checkpoints of the run, its milestones too."""
    data_dir: str = ""
    """Data folder; empty: the one that the players were trained on."""
    device: str = "auto"
    """auto, cuda, mps or cpu."""
    prompts: tuple[str, ...] = ()
    """Texts: the first prompt_tokens of each are continued, the rest is what the human wrote.
    Empty: held-out documents of the data."""
    prompt_file: str = ""
    """Prompts of a JSONL file instead, with the fields `prompt`, and if you like `human`, what a
    human wrote after it, and `domain` and `language`, each of which makes a table; the project's
    own: instruments/prompts.jsonl."""
    human: bool = True
    """--no_human: the texts of --prompts are prompts as they are, and no human takes part."""
    n_prompts: Count = 60
    """Held-out documents to take."""
    prompt_tokens: Count = 32
    """Tokens of a text that the players are given."""
    max_new_tokens: Count = 64
    """Tokens that they add."""
    seed: int = 0
    """Of the choice of documents and of the draws."""
    judge: str = ""
    """A checkpoint, or a run's folder (its newest), which judges by likelihood; empty: the run's
    newest, which then does not play."""
    judge_url: str = ""
    """Ask an OpenAI-compatible server instead: `http://127.0.0.1:8000/v1`. A key, if it needs one,
    is read from OPENAI_API_KEY."""
    judge_model: str = ""
    """The model's name on that server."""
    criteria: str = ""
    """What the server is asked to go by; empty: how well a continuation is written, and whether it
    follows from the text."""


@dataclass
class Player:
    """Who takes part, and what it wrote on each prompt."""

    name: str
    completions: list[list[int]]
    checkpoint: str = ""
    step: int | None = None
    bpb: float | None = None


def hold(config: TournamentConfig, load_model: Callable) -> None:
    """`eval.py tournament`: print ratings of the players, and write them to
    RUN_DIR/tournament.json. load_model: EvalConfig -> (model, trainer.json)."""
    if config.judge and config.judge_url:
        raise UsageError(f"--judge {config.judge} and --judge_url are two judges; give one of them")
    if config.prompts and config.prompt_file:
        raise UsageError(f"--prompts and --prompt_file {config.prompt_file}: give one of them")
    if config.criteria and not config.judge_url:
        raise UsageError("--criteria are for a judge that reads them; give one with --judge_url")
    server = None
    if config.judge_url:
        criteria = config.criteria or judge.CRITERIA
        server = judge.Server(config.judge_url, config.judge_model, criteria=criteria)
    paths, judge_path = entrants(config)
    manifest = Manifest.load(config.data_dir or checkpoint.read_trainer(paths[0])["data_dir"])
    tokenizer = Tokenizer.load(manifest.tokenizer_file())
    lines = read_prompts(config.prompt_file) if config.prompt_file else []
    prompts, human = own_prompts(lines, config, tokenizer, bool(manifest.marks)) or texts(
        config, manifest, tokenizer
    )

    def load(path: Path) -> tuple:
        """The model, its step, and its bits per byte on some of the held-out text."""
        which = EvalConfig(checkpoint=str(path), data_dir=config.data_dir, device=config.device)
        model, trainer = load_model(which)
        if trainer["identity"]["tokenizer_sha256"] != manifest.tokenizer_sha256:
            why = f"{path} has another tokenizer than the text of {manifest.dir}"
            raise UsageError(f"{why}, so that they cannot be compared")
        if is_tuned(trainer) != bool(manifest.marks):
            how = ("", "text") if is_tuned(trainer) else ("not ", "conversations")
            raise UsageError(
                f"{path} was {how[0]}tuned on conversations, but {manifest.dir} holds {how[1]}; "
                "choose its own data with --data_dir"
            )
        batches = data.val_batches(manifest, 8, BPB_ROWS, device=model.cos.device)
        token_bytes = torch.from_numpy(tokenizer.token_bytes).to(model.cos.device)
        return model, trainer["step"], bits_per_byte(model, batches, token_bytes)[1]

    players = []
    for path, name in zip(paths, names(paths)):
        model, step, bpb = load(path)
        written = continue_all(model, prompts, config, manifest.marks)
        players.append(Player(name, written, str(path), step, bpb))
    plain = [[i for i in p if i not in manifest.marks] for p in prompts]
    loops = [(p[-LOOP_LEN:] * config.max_new_tokens)[: config.max_new_tokens] for p in plain]
    players += [*([Player(HUMAN, human)] if human else []), Player(LOOP, loops)]

    judge_bpb, judged_by = None, config.judge_url
    if server:
        decoded = [[tokenizer.decode(c) for c in p.completions] for p in players]
        wins = server.compare([tokenizer.decode(p) for p in plain], decoded)
    else:
        model, _, judge_bpb = load(judge_path)
        judged_by = str(judge_path)
        wins = judge.compare([judge.novel_mean(model, prompts, p.completions) for p in players])
    table = rate(players, wins)
    doubts = why_untrusted(table, judge_bpb)
    show(table, judged_by, judge_bpb, len(prompts), doubts)
    groups = {}
    for column in ("domain", "language"):
        values = [line.get(column, "none") for line in lines]
        if len(set(values)) > 1:
            groups[column] = by_group(players, wins, values)
            print("\n".join(group_table(column, groups[column])))
    report = dict(config=asdict(config), judge=judged_by, judge_bpb=judge_bpb, doubts=doubts)
    report |= dict(
        judge_answers=server.answers if server else None,
        players=table,
        groups=groups,
        wins={
            p.name: dict(zip([q.name for q in players], row))
            for p, row in zip(players, wins.sum(0).tolist())
        },
        prompts=[tokenizer.decode(p) for p in plain],
        completions={p.name: [tokenizer.decode(c) for c in p.completions] for p in players},
    )
    path = Path(config.run_dir) / "tournament.json"
    with writable(config.run_dir, "choose another --run_dir"):
        write_json(path, report)
    print(f"wrote {path}")


# ------------------------------------------------------------------------------- the players


def entrants(config) -> tuple[list[Path], Path | None]:
    """The players' checkpoints, as named or else the run's, oldest first; and the judge's, which
    does not play."""
    root = Path(config.run_dir) / "checkpoints"
    named = [Path(p) for p in dict.fromkeys(config.players) if p]
    found = named or checkpoint.checkpoints(root)[::-1]
    if not found:
        raise UsageError(f"there is no checkpoint in {root}; train first, or name some: --players")
    judge_path = None
    if not config.judge_url:
        folder = Path(config.judge or config.run_dir)
        judge_path = checkpoint.latest_valid(folder / "checkpoints") or folder
    for path in [*found, *filter(None, [judge_path])]:
        if not (path / checkpoint.MANIFEST).exists():
            or_run = ", nor a run with one" if path == judge_path else ""
            raise UsageError(f"{path} is no checkpoint (it has no {checkpoint.MANIFEST}){or_run}")
    players = found
    if judge_path:  # a copy of it, which has the same hashes, and its milestone do not play either
        content, own = (judge_path / checkpoint.MANIFEST).read_text(), weights_of(judge_path)
        others = [p for p in found if weights_of(p) != own]
        players = [p for p in others if (p / checkpoint.MANIFEST).read_text() != content]
    if len(players) < len(found):
        print(f"{judge_path} is the judge, so it does not play: it would like its own text best")
    if not players:
        raise UsageError(
            f"no player is left beside the judge {judge_path}; train with --keep_every, "
            "or name other checkpoints with --players"
        )
    return players, judge_path


def weights_of(path: Path) -> tuple[Path, str]:
    """What a checkpoint has in common with the milestone of its step: the run and the name."""
    return run_of(path.resolve()), path.name


def names(paths: list[Path]) -> list[str]:
    """The shortest names that tell the checkpoints apart: step 300, tiny step 300, the path."""
    short = [f"step {int(p.name[5:])}" if p.name[5:].isdigit() else p.name for p in paths]
    longer = [f"{run_of(p.resolve()).name} {name}" for p, name in zip(paths, short)]
    return next((x for x in (short, longer) if len(set(x)) == len(x)), [str(p) for p in paths])


def texts(config, manifest, tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts, prompt_tokens each, and of the human continuations."""
    if manifest.marks:
        return questions(config, manifest)
    begin, whole = config.prompt_tokens, config.prompt_tokens + config.max_new_tokens
    documents = [tokenizer.encode(text) for text in config.prompts]
    for text, ids in zip(config.prompts, documents):
        if len(ids) <= begin:
            raise UsageError(
                f"the text {text[:40]!r} has {len(ids)} tokens, and --prompt_tokens {begin} leaves "
                "no human continuation to compare with; use a longer text or a smaller number"
            )
    if not documents:
        documents = list(itertools.islice(held_out(manifest, whole, config.seed), config.n_prompts))
        if len(documents) < config.n_prompts:
            print(f"only {len(documents)} held-out documents have {whole} tokens within a row")
    if not documents:
        raise UsageError(
            f"no held-out document has {whole} tokens within a row of {manifest.row_len}; ask for "
            "fewer with --prompt_tokens and --max_new_tokens"
        )
    return [ids[:begin] for ids in documents], [ids[begin:whole] for ids in documents]


def read_prompts(path: str) -> list[dict]:
    """The lines of a file of prompts; UsageError with the one that is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt_file {path} cannot be read ({error})") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            row = 0
        if row is None:
            continue
        texts = list(row.values()) if isinstance(row, dict) else [0]
        if not all(isinstance(text, str) for text in texts) or not row.get("prompt", "").strip():
            raise UsageError(
                f'{path}, line {number} is not {{"prompt": text}}, with "human", "domain" and '
                f'"language" if you like, texts too: {line[:80]!r}'
            )
        found.append(row)
    if not found:
        raise UsageError(f"--prompt_file {path} has no line")
    return found


def own_prompts(lines: list[dict], config, tokenizer, tuned: bool) -> tuple[list, list] | None:
    """Token ids of prompts that are taken whole (tuned: as questions), and of the human
    continuations: [] unless each has one. None if the prompts are the beginnings of texts."""
    if not lines and config.human:
        return None
    if not config.human and not config.prompts and not lines:
        raise UsageError("--no_human needs prompts: --prompts or --prompt_file")
    lines = lines or [{"prompt": text} for text in config.prompts]
    prompts = [prompt_ids(line["prompt"].rstrip(), tokenizer, tuned)[0][1:] for line in lines]
    if not config.human or not all(line.get("human", "").strip() for line in lines):
        print("no human text for each prompt, so no human takes part")
        return prompts, []
    human = [tokenizer.encode(line["human"])[: config.max_new_tokens] for line in lines]
    return prompts, human


def questions(config, manifest) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of held-out first questions, up to <|assistant|>, and of their answers."""
    if config.prompts:
        raise UsageError("a tuned model is asked the held-out questions; leave --prompts out")
    _, assistant, end = manifest.marks
    prompts, answers = [], []
    for documents in shuffled_rows(manifest, config.seed):
        for ids in documents:
            at = ids.index(assistant) + 1 if assistant in ids else len(ids)
            answer = ids[at : ids.index(end, at)] if end in ids[at:] else []
            if 0 < len(answer) <= config.max_new_tokens:
                prompts.append(ids[:at])
                answers.append(answer)
    if not prompts:
        raise UsageError(
            f"no held-out answer in {manifest.dir} has at most {config.max_new_tokens} tokens; "
            "allow more with --max_new_tokens"
        )
    return prompts[: config.n_prompts], answers[: config.n_prompts]


def shuffled_rows(manifest, seed: int):
    """For each validation row, shuffled: its documents, ids without BOS."""
    rows = [
        (s, row) for s in range(len(manifest.sources)) for row in range(manifest.rows("val", s))
    ]
    for k in np.random.default_rng(seed).permutation(len(rows)):
        ids = manifest.row("val", *rows[k]).astype(np.int64)
        parts = np.split(ids, np.flatnonzero(ids == manifest.bos_id))
        yield [p[1:].tolist() for p in parts if len(p) and p[0] == manifest.bos_id]


def held_out(manifest, length: int, seed: int):
    """Validation documents of `length` tokens or more, at most one of a row, rows shuffled."""
    for documents in shuffled_rows(manifest, seed):
        yield from [ids for ids in documents if len(ids) >= length][:1]


def continue_all(model, prompts: list[list[int]], config, marks=()) -> list[list[int]]:
    """Continue each prompt with the model's own probabilities: temperature 1, all tokens. At a
    lower temperature, samples loop, and a judge by likelihood likes loops. The draws are the same
    for every player. marks: of conversations, if the prompts are questions; the last ends an
    answer."""
    bos, device = model.config.bos_id, model.cos.device
    stop = marks[-1] if marks else bos
    longest = max(map(len, prompts))
    needed = 1 + longest + config.max_new_tokens
    if needed > model.config.seq_len:
        raise UsageError(
            f"prompts of {longest} tokens (--prompt_tokens) and --max_new_tokens "
            f"{config.max_new_tokens} need {needed} positions, a player has {model.config.seq_len}"
        )
    generator = torch.Generator(device).manual_seed(config.seed)
    found: list[list[int]] = [[]] * len(prompts)
    for length in sorted(set(map(len, prompts))):  # those of one length together
        places = [n for n, p in enumerate(prompts) if len(p) == length]
        idx = torch.tensor([[bos, *prompts[n]] for n in places], device=device)  # (N, T)
        out = model.generate(idx, config.max_new_tokens, 1.0, 0, generator, stop_id=stop)
        for n, ids in zip(places, out[:, idx.size(1) :].tolist()):
            found[n] = list(itertools.takewhile(lambda i: i not in (bos, *marks), ids))
    return found


# --------------------------------------------------------------------------------- the table


def rate(players: list[Player], wins: np.ndarray) -> list[dict]:
    """The players with their ratings, best first."""
    rating, (low, high) = ratings.bradley_terry(wins.sum(0)), ratings.interval(wins)
    elos = ratings.elo_orders(wins)  # (orders, P)
    columns = dict(rating=rating, low=low, high=high)
    columns |= dict(elo=elos.mean(0), elo_low=elos.min(0), elo_high=elos.max(0))
    rows = [
        dict(name=p.name, checkpoint=p.checkpoint, step=p.step, bpb=p.bpb)
        | {name: float(column[i]) for name, column in columns.items()}
        for i, p in enumerate(players)
    ]
    return sorted(rows, key=lambda row: -row["rating"])


def why_untrusted(table: list[dict], judge_bpb: float | None) -> list[str]:
    """A sentence for each reason not to believe this judge."""
    rating = {row["name"]: row["rating"] for row in table}
    # equal ratings share the better place; two that differ by rounding are equal
    place = {name: 1 + sum(r > own + 1e-6 for r in rating.values()) for name, own in rating.items()}
    doubts, n = [], len(table)
    if place[LOOP] <= (n + 1) / 2:
        doubts.append(f"it puts the loop in place {place[LOOP]} of {n}, not in the lower half")
    if place.get(HUMAN, 0) > -(-n // 3):
        doubts.append(f"it puts the human text in place {place[HUMAN]} of {n}, below the top third")
    if judge_bpb is not None:
        best = min((row for row in table if row["bpb"]), key=lambda row: row["bpb"])
        if judge_bpb >= best["bpb"]:
            doubts.append(
                f"at {judge_bpb:.3f} bits per byte it is no better a model than {best['name']} at "
                f"{best['bpb']:.3f}"
            )
    return doubts


def show(table: list[dict], judged_by, judge_bpb, n_prompts: int, doubts: list[str]) -> None:
    width = max(len(row["name"]) for row in table)
    known = f", {judge_bpb:.3f} bits per byte" if judge_bpb else ""
    print(f"\n{n_prompts} prompts, judged by {judged_by}{known}")
    print(f"{'player':{width}}  rating  95% over prompts    Elo  over orders    bits/byte")
    for row in table:
        bpb = f"{row['bpb']:.3f}" if row["bpb"] else "-"
        print(
            f"{row['name']:{width}}  {row['rating']:6.0f}  {row['low']:6.0f} .. {row['high']:<6.0f}"
            f"  {row['elo']:5.0f}  {row['elo_low']:4.0f} .. {row['elo_high']:<4.0f}  {bpb:>9}"
        )
    if (rho := progress(table)) is not None:
        print(f"rank correlation of rating and training step: {rho:.2f}")
    for doubt in doubts:
        print(f"this judge cannot be trusted: {doubt}")


def by_group(players: list[Player], wins: np.ndarray, values: list[str]) -> dict[str, dict]:
    """values: of each of the N prompts -> for each value its number of prompts, and of each player
    the share of its matches that it won there, a tie being half a win."""
    found = {}
    for value in dict.fromkeys(values):
        own = wins[[n for n, other in enumerate(values) if other == value]]  # (n, P, P)
        matches = len(own) * (len(players) - 1)
        won = own.sum((0, 2)) - np.diagonal(own, axis1=1, axis2=2).sum(0)  # but against itself
        shares = dict(zip([p.name for p in players], (won / matches).tolist()))
        found[value] = dict(prompts=len(own), won=shares)
    return found


def group_table(column: str, groups: dict[str, dict]) -> list[str]:
    """The lines of a table: a player a row, a value a column. Of a handful of prompts, a share that
    is within 0.3 of a half says little."""
    names = list(next(iter(groups.values()))["won"])
    width = max(map(len, [column, *names]))
    heads = [f"{value} ({facts['prompts']})" for value, facts in groups.items()]
    lines = ["", f"share of matches won by {column} (prompts)"]
    lines.append(f"{'':{width}}  " + "  ".join(heads))
    for name in names:
        cells = (f"{facts['won'][name]:>{len(h)}.2f}" for h, facts in zip(heads, groups.values()))
        lines.append(f"{name:{width}}  " + "  ".join(cells))
    return lines


def progress(table: list[dict]) -> float | None:
    """Spearman's correlation of rating and step; None unless three steps or more, all distinct, and
    two ratings or more."""
    rows = [row for row in table if row["step"] is not None]
    steps = [row["step"] for row in rows]
    values = np.array([row["rating"] for row in rows]).round(6)  # a draw is a draw
    if len(steps) < 3 or len(set(steps)) < len(steps) or len(set(values)) < 2:
        return None
    below, equal = (op(values[:, None], values).sum(1) for op in (np.greater, np.equal))
    ranks = below + equal / 2  # equal ratings have the mean of their ranks
    return float(np.corrcoef(np.argsort(np.argsort(steps)), ranks)[0, 1])
