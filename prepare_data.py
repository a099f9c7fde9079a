"""Text -> tokenizer -> packed rows on disk: `python prepare_data.py [PRESET] [--option value ...]`.

Reads the sources of the preset; writes data/PRESET (manifest.json last: until then there is no
dataset). The work is a map over units, each a pure function from text to shards, so the result is
the same bytes for any number of processes or machines, and after any number of kills: a run does
what is not done yet. A finished data set is left alone. Machines (`--part 1/4`, ...; then without
--part) must share the folder: apart, each would train its own tokenizer and pin its own revision
of a dataset, and nothing would fit together.
`python prepare_data.py verify [PRESET]` reads every shard again and compares its sha256.
Next: sources.py (where text comes from), data.py (rows, shards, manifest), train.py.
"""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np

import data
from machinery import durable, errors, shards, sources
from machinery.worker import (
    BUFFER,
    TOKENIZER_CHARS,
    peak_gb,
    prepare_unit,
    start_worker,
    train_tokenizer,
    write_rows,
)
from tokenizer import Tokenizer, check_vocab_size

# config.py comes with torch: it is imported in `main`, not in each process of the pool.

POOL_DIED = (
    "a process of the pool died (out of memory?); run the same command again: finished "
    "units are kept; fewer --workers need less memory"
)

# ---------------------------------------------------------------------------------- the plan


def digest(tree: object) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


class Plan:
    """What is to be done, where its records are, and how much of it is done already."""

    def __init__(self, config, mixture: dict[str, float]) -> None:
        self.config, self.folder = config, Path(config.data_dir)
        self.sources = [sources.parse(spec) for spec in config.source]
        names = [s.name for s in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(
                f"two sources are named {max(names, key=names.count)!r}; name them: "
                "--source a=files:... b=files:..."
            )
        self.part, self.parts = parse_part(config.part)
        self.shares = shares_of(self.sources, mixture)
        self.tokens = tokens_wanted(config.tokens, self.sources)
        if not 0 < config.val_fraction < 1:
            raise ValueError(
                f"val_fraction {config.val_fraction} is not between 0 and 1 (a run "
                "validates on that share of the text); try --val_fraction 0.02"
            )
        if config.workers < 0:
            raise ValueError(f"workers {config.workers} is below 0; 0 takes all cores")
        if not config.tokenizer:
            check_vocab_size(config.vocab_size)
        data.pack([], config.row_len, 0, config.packing)  # refuses an unknown policy, now
        listed = [self._list(source) for source in self.sources]
        self.units = [units for units, _ in listed]
        self.facts = [facts for _, facts in listed]
        options = {
            "format": shards.FORMAT,
            "source": list(config.source),
            "revisions": [f.get("revision") for f in self.facts],
            "row_len": config.row_len,
            "packing": config.packing,
            "buffer": BUFFER,
            "val_fraction": config.val_fraction,
            "tokenizer": Tokenizer.load(config.tokenizer).sha256
            if config.tokenizer
            else [config.vocab_size, config.nfc, TOKENIZER_CHARS, self.shares],
        }
        self.options = digest(options)
        self.key = digest([self.options, self.units])  # of all that decides what the shards hold
        self.records = self.folder / ".units" / self.key
        self.tokenizer = self.records / "tokenizer.json"

    def _list(self, source: sources.Source) -> tuple[list[dict], dict]:
        """The units; of a remote source they are looked up once, so that it stays as it was."""
        if source.kind != "hf":
            return sources.list_units(source)
        path = self.folder / ".units" / f"remote-{digest(repr(source))}.json"
        if not path.exists():
            units, facts = sources.list_units(source)
            path.parent.mkdir(parents=True, exist_ok=True)
            shards.write_json(path, {"units": units, "facts": facts})
        listing = json.loads(path.read_text(encoding="utf-8"))
        return listing["units"], listing["facts"]

    def pinned(self, i: int) -> sources.Source:
        return replace(self.sources[i], revision=self.facts[i].get("revision"))

    def record_path(self, source: int, unit: int) -> Path:
        return self.records / f"{self.sources[source].name}_{unit:05d}.json"

    def record(self, source: int, unit: int) -> dict | None:
        """The record of a unit that is done: its shards are there, its inputs not newer."""
        path = self.record_path(source, unit)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            for split in ("train", "val"):
                for shard in record["splits"][split]["shards"]:
                    if (self.folder / shard["file"]).stat().st_size != shard["bytes"]:
                        return None
        except (OSError, ValueError):
            return None
        return None if self.newer_than(path, source, unit) else record

    def newer_than(self, path: Path, source: int, unit: int) -> bool:
        """Was a file of the unit written after `path`? (A changed size changes the plan itself.)"""
        if self.sources[source].kind != "files":
            return False
        files = sources.cached_files(self.sources[source])
        return any(
            files[name].stat().st_mtime > path.stat().st_mtime
            for name, _, _ in self.units[source][unit]["pieces"]
        )

    def target(self, source: int) -> float:
        """Training tokens wanted of a source (of this part of it); inf: all."""
        if not self.tokens:
            return float("inf")
        return self.tokens * self.shares[source] / sum(self.shares) / self.parts

    def mine(self, source: int) -> range:
        return range(self.part, len(self.units[source]), self.parts)


def parse_part(text: str) -> tuple[int, int]:
    """'2/4' -> (1, 4): the second of four parts, counted from 0; '' -> (0, 1)."""
    if not text:
        return 0, 1
    i, slash, n = text.partition("/")
    if not (slash and i.isdigit() and n.isdigit() and 1 <= int(i) <= int(n)):
        raise ValueError(f"part {text!r} is not I/N with 1 <= I <= N, such as 1/4")
    return int(i) - 1, int(n)


def shares_of(listed: list[sources.Source], mixture: dict[str, float]) -> list[float]:
    """What part of `tokens` each source gives: as it says itself, or by the preset's mixture."""
    if all(s.share is None for s in listed):
        return [mixture.get(s.name, 1.0) for s in listed]
    if not all(s.share for s in listed):
        raise ValueError(
            "say the share of every source, above 0, or of none, as in "
            "--source web:80=hf:... books:20=files:..."
        )
    return [s.share for s in listed]


def tokens_wanted(text: str, listed: list[sources.Source]) -> int:
    """'2B' -> 2_000_000_000; 0 for everything, which of a Hub source nobody gets unasked."""
    from machinery.cli import count

    tokens = 0 if text == "all" else count(text)
    hub = [s.place for s in listed if s.kind == "hf"]
    if hub and not tokens and text != "all":
        raise ValueError(
            f"hf:{hub[0]} may hold far more than you need; say how many tokens you "
            "want, as in --tokens 2B, or --tokens all for everything"
        )
    return tokens


def check_disk(plan: Plan, done_tokens: int) -> None:
    """Before any work: is there room for the tokens wanted, or for all, if the files hold less?"""
    width, tokens = 2 if plan.config.vocab_size <= 65_536 else 4, 0.0
    for i, facts in enumerate(plan.facts):
        most = plan.target(i) * 1.05
        if "files" in facts:  # at least 2.5 bytes of text per token; compressed, about 4 times that
            size = sum(
                (4 if f.endswith((".gz", ".zst")) else 1) * size
                for f, size in facts["files"].items()
            )
            most = min(most, size / 2.5 / plan.parts)
        tokens += most
    if tokens == float("inf"):
        print(
            "the size of a Hub source is unknown until it is read: whether all of it fits on the "
            "disk was not checked",
            file=sys.stderr,
        )
        return
    need = max(0.0, tokens - done_tokens) * width
    plan.folder.mkdir(parents=True, exist_ok=True)
    if need > (free := shutil.disk_usage(plan.folder).free):
        raise errors.StorageError(
            f"about {need / 1e9:.1f} GB more are needed in {plan.folder}, "
            f"{free / 1e9:.1f} GB are free; choose another --data_dir or fewer "
            "--tokens"
        )


# ----------------------------------------------------------------------------------- the map


def run_units(plan: Plan, workers: int) -> dict[tuple[int, int], dict]:
    """Do the units that are not done; returns the records of the done ones, (source, unit) -> ."""
    done = {
        (s, u): r
        for s in range(len(plan.sources))
        for u in range(len(plan.units[s]))
        if (r := plan.record(s, u)) is not None
    }
    running: dict[Future, tuple[int, int]] = {}

    def next_unit() -> tuple[int, int] | None:
        """The first unit that is neither done nor running, while tokens are still wanted."""
        for s in range(len(plan.sources)):
            known = [r["splits"]["train"].get("tokens", 0) for (i, _), r in done.items() if i == s]
            guess = sum(known) / len(known) if known else plan.tokens / 4
            have, busy = 0.0, set(running.values())
            for u in plan.mine(s):
                if have >= plan.target(s):
                    break
                if (s, u) in done:
                    have += done[s, u]["splits"]["train"].get("tokens", 0)
                elif (s, u) in busy:
                    have += guess
                else:
                    return s, u
        return None

    if next_unit() is None:
        return done
    check_disk(plan, sum(r["splits"]["train"].get("tokens", 0) for r in done.values()))
    context = get_context("spawn")
    progress = context.Array("d", 3)
    with (
        ProcessPoolExecutor(workers, context, start_worker, (progress,)) as pool,
        Bar(plan, progress, done) as bar,
    ):
        try:
            while True:
                while len(running) < workers and (unit := next_unit()):
                    running[pool.submit(prepare_unit, unit_job(plan, *unit))] = unit
                if not running:
                    return done
                finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in finished:
                    unit = running.pop(future)
                    done[unit] = future.result()
                bar.update()
        except BrokenProcessPool:
            raise errors.DataError(POOL_DIED) from None
        except BaseException:
            for process in list(pool._processes.values()):
                process.terminate()
            raise


def unit_job(plan: Plan, source: int, unit: int) -> dict:
    return {
        "source": plan.pinned(source),
        "index": unit,
        "unit": plan.units[source][unit],
        "folder": str(plan.folder),
        "record": str(plan.record_path(source, unit)),
        "tokenizer": str(plan.tokenizer),
        "row_len": plan.config.row_len,
        "policy": plan.config.packing,
        "val_fraction": plan.config.val_fraction,
    }


class Bar:
    """Progress: documents/s, tokens/s, MB/s, and the time left where the total is known."""

    def __init__(self, plan: Plan, progress, done: dict) -> None:
        from tqdm import tqdm

        self.progress, self.t0 = progress, time.perf_counter()
        self.by_tokens = bool(plan.tokens)
        sizes = [
            u.get("bytes")
            for s, units in enumerate(plan.units)
            for k, u in enumerate(units)
            if (s, k) not in done and k in plan.mine(s)
        ]
        total = plan.tokens / plan.parts if plan.tokens else None if None in sizes else sum(sizes)
        self.bar = tqdm(
            total=total,
            unit="tok" if plan.tokens else "B",
            unit_scale=True,
            desc="prepare",
            mininterval=0.5,
            dynamic_ncols=True,
        )

    def update(self) -> None:
        documents, tokens, size = self.progress[:]
        dt = time.perf_counter() - self.t0
        self.bar.set_postfix_str(
            f"{documents / dt:,.0f} doc/s {tokens / dt / 1e6:.2f} Mtok/s "
            f"{size / dt / 1e6:.1f} MB/s",
            refresh=False,
        )
        self.bar.update((tokens if self.by_tokens else size) - self.bar.n)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()


# --------------------------------------------------------------------------------- the merge


def chosen_units(plan: Plan, source: int, done: dict) -> list[dict]:
    """The records of the shortest run of units, from the first on, with the tokens wanted."""
    records, have = [], 0
    for u in range(len(plan.units[source])):
        if have >= plan.target(source):
            break
        records.append(done[source, u])
        have += done[source, u]["splits"]["train"].get("tokens", 0)
    return records


def merge(plan: Plan, done: dict) -> shards.Manifest:
    """Write the manifest, last of all, from the units' records."""
    tokenizer = Tokenizer.load(plan.tokenizer)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 65_536 else "<u4")
    splits: dict = {"train": {}, "val": {}}
    listed, notes = [], Counter()
    for s, source in enumerate(plan.sources):
        records = chosen_units(plan, s, done)
        listed.append(
            {
                "name": source.name,
                "spec": plan.config.source[s],
                "units": len(records),
                "units_in_source": len(plan.units[s]),
                **plan.facts[s],
            }
        )
        for record in records:
            notes.update(record["notes"])
        for split in ("train", "val"):
            parts = [r["splits"][split] for r in records]
            # less than a row is left of each unit: together they make some more rows
            rest = [np.array(ids, dtype) for part in parts for ids in part["rest"]]
            packed = data.pack(rest, plan.config.row_len, tokenizer.bos_id, plan.config.packing)
            entries = write_rows(
                packed,
                plan.folder,
                f"{split}/{source.name}/rest_{plan.key[:8]}_{len(records):05d}",
                plan.config.row_len,
                dtype,
            )
            splits[split][source.name] = summary(parts, packed.stats, entries)
    tree = {
        "format": shards.FORMAT,
        "row_len": plan.config.row_len,
        "dtype": dtype.str,
        "prepared_from": plan.key,
        "options": plan.options,
        "tokens_wanted": plan.tokens,
        "packing": {"policy": plan.config.packing, "buffer": BUFFER},
        "val_fraction": plan.config.val_fraction,
        "tokenizer": {
            "file": "tokenizer.json",
            "sha256": tokenizer.sha256,
            "nfc": tokenizer.nfc,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
        },
        "sources": listed,
        "splits": splits,
        "notes": dict(sorted(notes.items())),
    }
    check_enough(plan, splits)
    tree["fingerprint"] = shards.fingerprint(tree)
    tree["made"] = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit()}
    tokenizer.save(plan.folder / "tokenizer.json")
    with durable.replacing(plan.folder / "token_bytes.npy") as file:
        np.save(file, tokenizer.token_bytes)
    shards.write_json(plan.folder / "manifest.json", tree)
    manifest = shards.Manifest.load(plan.folder)
    manifest.check()
    sweep(plan, manifest)
    return manifest


def summary(parts: list[dict], rest: data.PackStats, shards: list[dict]) -> dict:
    """One split of one source: what its units and the rows of their rests add up to."""
    packing = Counter()
    for part in parts:
        packing.update(part["packing"])
    for field in ("rows", "cuts", "splits"):
        packing[field] += getattr(rest, field)
    packing["bos"] += rest.bos
    packing["dropped"] += rest.dropped + rest.rest  # the last partial row of the whole source
    packing["rest"] = 0
    return {
        **{k: sum(part.get(k, 0) for part in parts) for k in ("documents", "bytes", "tokens")},
        "rows": packing["rows"],
        "packing": dict(packing),
        "shards": [shard for part in parts for shard in part["shards"]] + shards,
    }


def check_enough(plan: Plan, splits: dict) -> None:
    """Both splits need a row at least, or training would stop at once, and say less."""
    fraction, row_len = plan.config.val_fraction, plan.config.row_len
    totals = {split: Counter() for split in splits}
    for split, by_source in splits.items():
        for facts in by_source.values():
            totals[split].update(rows=facts["rows"], tokens=facts["tokens"])
    if not totals["train"]["rows"]:
        raise ValueError(
            f"the text makes {totals['train']['tokens']} training tokens, less than "
            f"one row of {row_len}; give it more text or a smaller --row_len"
        )
    if not totals["val"]["rows"]:
        raise ValueError(
            f"the validation split has {totals['val']['tokens']} tokens, less than "
            f"one row of {row_len}; try --val_fraction {min(0.5, fraction * 4):g}, or "
            "give it more text"
        )


def sweep(plan: Plan, manifest: shards.Manifest) -> None:
    """Remove what killed runs left behind, and rests of smaller selections."""
    kept = {plan.folder / s["file"] for split in ("train", "val") for s in manifest.shards(split)}
    rests = set(plan.folder.glob("[tv]*/*/rest_*")) - kept
    for path in [*rests, *plan.folder.rglob(".tmp-*")]:
        path.unlink(missing_ok=True)


def commit() -> str:
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            text=True,
            capture_output=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# -------------------------------------------------------------------------------- the program


def report(manifest: shards.Manifest, seconds: float, workers: int) -> str:
    lines = []
    for split in ("train", "val"):
        t, packing = Counter(), Counter()
        for facts in manifest.tree["splits"][split].values():
            t.update({k: facts[k] for k in ("documents", "bytes", "tokens", "rows")})
            packing.update(facts["packing"])
        if t["tokens"]:
            lines.append(
                f"{split:5} {t['documents']:,} documents | {t['bytes'] / 1e6:,.1f} MB | "
                f"{t['tokens']:,} tokens | {t['bytes'] / t['tokens']:.3f} bytes/token | "
                f"{t['rows']:,} rows | cut {100 * packing['cuts'] / max(1, t['documents']):.2f}% "
                f"of documents | dropped {100 * packing['dropped'] / t['tokens']:.4f}% of tokens | "
                "padding 0%"
            )
        if split == "train" and t["tokens"] < (wanted := manifest.tree["tokens_wanted"]):
            lines.append(f"note  {wanted:,} training tokens were asked for, the text has no more")
    lines += [f"note  {n:,} {what}" for what, n in manifest.tree["notes"].items()]
    lines.append(
        f"{seconds:.1f} s | peak memory {peak_gb(resource.RUSAGE_SELF):.2f} GB, and "
        f"{peak_gb(resource.RUSAGE_CHILDREN):.2f} GB in the largest of {workers} workers"
    )
    lines.append(
        f"{manifest.dir}/manifest.json: fingerprint {manifest.fingerprint[:16]}, "
        f"vocabulary {manifest.vocab_size:,}, rows of {manifest.row_len}"
    )
    return "\n".join(lines)


def finished(plan: Plan) -> shards.Manifest | None:
    """The manifest, if the folder holds what is asked for; ValueError if it holds something else.

    A damaged dataset loses its manifest here: until the missing units are redone, there is none.
    """
    path = plan.folder / "manifest.json"
    if not path.exists():
        return None
    manifest = shards.Manifest.load(plan.folder)
    tree = manifest.tree
    if tree["prepared_from"] != plan.key:
        same = tree["options"] == plan.options
        if (
            same
            and tree["tokens_wanted"] == plan.tokens
            and {s.kind for s in plan.sources} == {"stdlib"}
        ):
            keep_as_made(plan, manifest)
            return manifest
        what = "its text has changed since" if same else "made with other options"
        raise ValueError(
            f"{plan.folder} holds other data ({what}); choose another --data_dir, or "
            f"remove it first: rm -r {plan.folder}"
        )
    reason = ""
    try:
        manifest.check()
    except shards.DataError as error:
        reason = str(error)
    if any(
        plan.newer_than(path, s, u)
        for s in range(len(plan.sources))
        for u in range(tree["sources"][s]["units"])
    ):
        reason = "some of its text is newer"
    if reason:
        print(f"doing {plan.folder} again where needed: {reason}", file=sys.stderr)
        path.unlink()
        return None
    return manifest if tree["tokens_wanted"] == plan.tokens else None


def keep_as_made(plan: Plan, manifest: shards.Manifest) -> None:
    """The text is another one by now: the data is used if it is whole, but cannot be repaired."""
    try:
        manifest.check()
    except shards.DataError as error:
        reason = str(error).partition("; ")[0]  # without its remedy, which would not help
        raise shards.DataError(
            f"{reason}; the installed Python files have changed since, so it "
            "cannot be made as it was; remove the data and run the same command "
            f"again: rm -r {plan.folder}"
        ) from None
    print("the installed Python files have changed since; the data is kept as it was made")


def prepare(config, mixture: dict[str, float] | None = None) -> shards.Manifest | None:
    """Prepare what a DataConfig says; None if only a part was asked for.

    mixture: the sources' shares of `config.tokens` by name, where the sources don't say them.
    """
    from machinery.ranks import cores  # comes with torch, like config.py

    t0 = time.perf_counter()
    plan = Plan(config, mixture or {})
    if (manifest := finished(plan)) is not None:
        print(
            f"{plan.folder} is up to date: {manifest.rows('train'):,} training rows of "
            f"{manifest.row_len}, fingerprint {manifest.fingerprint[:16]}"
        )
        return manifest
    workers = config.workers or cores()
    plan.records.mkdir(parents=True, exist_ok=True)
    make_tokenizer(plan)
    done = run_units(plan, workers)
    if config.part:
        print(
            f"part {config.part} of {plan.folder} is done; when all parts are, run the same "
            "command without --part"
        )
        return None
    manifest = merge(plan, done)
    print(report(manifest, time.perf_counter() - t0, workers))
    return manifest


def make_tokenizer(plan: Plan) -> None:
    """Copy the one that was asked for, or train one (in a process of its own, which takes the
    memory along when it ends)."""
    config = plan.config
    if plan.tokenizer.exists():
        try:
            Tokenizer.load(plan.tokenizer)
            return
        except ValueError as error:  # damaged; the ids of the finished units may not be a new one's
            print(f"beginning {plan.folder} again: {error}", file=sys.stderr)
            for path in plan.records.iterdir():
                path.unlink()
    if config.tokenizer:
        Tokenizer.load(config.tokenizer).save(plan.tokenizer)
        return
    t0 = time.perf_counter()
    print(f"training a tokenizer of {config.vocab_size:,} tokens ...", file=sys.stderr)
    total = sum(plan.shares)
    job = {
        "sources": [
            (plan.pinned(s), plan.units[s], plan.shares[s] / total)
            for s in range(len(plan.sources))
        ],
        "chars": TOKENIZER_CHARS,
        "vocab_size": config.vocab_size,
        "nfc": config.nfc,
        "val_fraction": config.val_fraction,
        "path": str(plan.tokenizer),
    }
    with ProcessPoolExecutor(1, get_context("spawn"), start_worker, (None,)) as pool:
        try:
            peak = pool.submit(train_tokenizer, job).result()
        except BrokenProcessPool:
            raise errors.DataError(POOL_DIED) from None
    size = Tokenizer.load(plan.tokenizer).vocab_size
    print(
        f"tokenizer: {size:,} tokens in {time.perf_counter() - t0:.1f} s, peak memory "
        f"{peak:.2f} GB",
        file=sys.stderr,
    )


def main(argv: list[str]) -> int:
    from machinery import cli

    if argv[:1] == ["verify"]:
        preset = cli.parse("prepare_data.py verify", "data", argv[1:])
        manifest = shards.Manifest.load(preset.data.data_dir, preset.name)
        manifest.check()
        manifest.verify()
        entries = manifest.shards("train") + manifest.shards("val")
        print(
            f"{manifest.dir}: {len(entries)} shards, {sum(s['bytes'] for s in entries) / 1e6:,.1f} "
            "MB, every sha256 as in the manifest"
        )
        return 0
    preset = cli.parse("prepare_data.py", "data", argv)
    try:
        prepare(preset.data, cli.weights(preset.train.mixture))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    from machinery.cli import run

    run(main)
