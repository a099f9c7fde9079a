"""Text -> tokenizer -> packed rows on disk: `python prepare_data.py [PRESET] [--option value ...]`.

Reads the preset's sources; writes data/PRESET, manifest.json last: until then there is no dataset.
The work is a map over units, each a pure function from text to shards, so any number of processes,
or of machines (`--cluster tcp://HOST:8786`, a Dask scheduler), gives the same bytes. A killed run
resumes: the same command does only what is missing. A finished dataset is left alone.
`python prepare_data.py verify [PRESET]` reads every shard and compares its sha256; `show [PRESET]
--row N` prints a row as text, and where it comes from; `--text TEXT` the tokens of a text.
preparation/worker.py does a unit, preparation/sources.py reads text. Next: optim.py.
"""

import machinery.needs  # first: it says which packages are missing

import sys
import time
from collections import Counter
from dataclasses import replace

import numpy as np

import data
from config import DataConfig, UsageError, find_preset
from hf import tokenizer_json
from machinery import cli, code, disk, formats, shards
from machinery.formats import (
    DATA_FORMAT,
    ManifestFile,
    Shard,
    SourceFacts,
    Split,
    TokenizerFacts,
    UnitSplit,
)
from machinery.output import say
from preparation import chat, copies, show, sources, worker
from preparation.reading import Notes
from tokenizer import Tokenizer

COMMANDS = {"verify": show.verify, "show": show.show}  # each gets the words typed after it
ENOUGH = 20_000  # held-out tokens: with fewer, chance decides which checkpoint is the best


def main(argv: list[str]) -> int:
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    preset = cli.parse("prepare_data.py", "data", argv)
    config = preset.data
    usual = find_preset(preset.name).data
    if not config.mixture and config.source == usual.source:
        config = replace(config, mixture=preset.train.mixture)
    manifest = prepare(config)
    if "chats:stdlib" in usual.source and not manifest.marks:
        say(
            f"warning: {preset.name} is for conversations, and none are in this text: name their "
            "field, as in files:chats.jsonl#messages (docs/chat.md)"
        )
    if config.publish:
        from stores import stage

        stage.publish(manifest, config.publish)
    return 0


def prepare(config: DataConfig) -> shards.Manifest:
    """Prepare the data that a DataConfig describes; returns its manifest."""
    t0 = time.perf_counter()
    if config.bos_token and not config.tokenizer:
        raise UsageError(f"--bos_token {config.bos_token} has no effect without --tokenizer")
    given = tokenizer_json.read(config.tokenizer, config.bos_token) if config.tokenizer else None
    job = worker.Job(config, given)
    manifest = worker.reuse(job)
    if manifest is not None:
        say(
            f"{job.folder} is up to date: {manifest.rows('train'):,} training rows of "
            f"{manifest.row_len}, fingerprint {manifest.fingerprint[:16]}"
        )
        return manifest
    job.check(remote=True)
    if config.cluster:
        from preparation import dask_cluster

        opened = dask_cluster.open_pool(config.cluster)
    else:
        opened = worker.open_pool(config.workers or cli.cores())
    with disk.lock(job.folder, "--data_dir"):
        (job.folder / "manifest.json").unlink(missing_ok=True)  # no dataset while it is changed
        job.records.mkdir(parents=True, exist_ok=True)
        worker.sweep(job)
        with opened as (pool, slots):
            job.copies.update(copies.find(job, pool))
            tokenizer = make_tokenizer(job)
            records = worker.run_units(job, pool, slots)
        manifest, notes = merge(job, tokenizer, records)
    say(report(manifest, notes, time.perf_counter() - t0))
    return manifest


def make_tokenizer(job: worker.Job) -> Tokenizer:
    """The tokenizer named in the config, or one trained on a sample of the training text; kept with
    the records. If it is there already, it is reused."""
    config = job.config
    if job.tokenizer.exists():
        return Tokenizer(disk.read_text(job.tokenizer))
    tokenizer = job.given
    if tokenizer:
        where = f"from {config.tokenizer}; {tokenizer.bos} begins a document"
    else:
        t0 = time.perf_counter()
        say(f"training a tokenizer of {config.vocab_size:,} tokens ...", file=sys.stderr)
        sample = worker.tokenizer_sample(job)
        how = dict(split=job.split, nfc=config.nfc, progress=sys.stderr.isatty())
        tokenizer = Tokenizer.train(sample, config.vocab_size, **how)
        where = f"in {time.perf_counter() - t0:.1f} s"
    say(f"tokenizer: {tokenizer.vocab_size:,} tokens {where}", file=sys.stderr)
    disk.write_text(job.tokenizer, tokenizer.spec)
    return tokenizer


def merge(job: worker.Job, tokenizer: Tokenizer, records: dict) -> tuple[shards.Manifest, Notes]:
    """Write tokenizer.json and, last of all, the manifest; returns it, and what was odd."""
    dtype = shards.dtype_for(tokenizer.vocab_size)
    splits = {"train": {}, "val": {}}
    facts = []
    notes = Notes()
    begins = []
    for s, source in enumerate(job.sources):
        chosen = [records[unit] for unit in worker.first_units(job, s, records)]
        facts.append(
            SourceFacts(
                name=source.name,
                spec=source.spec,
                units=len(chosen),
                units_in_source=len(job.units[s]),
                documents=sum(unit.documents for unit in chosen),
                **job.facts[s],
            )
        )
        for unit in chosen:
            notes.update(unit.notes)
            notes.examples = unit.examples | notes.examples
            begins += unit.beginnings.splitlines()
        for split in ("train", "val"):
            parts = [unit.splits[split] for unit in chosen]
            # each unit leaves over less than a row; together these make some more rows
            leftover = [np.array(ids, dtype) for part in parts for ids in part.leftover]
            packed = data.pack(leftover, job.config.row_len, tokenizer.bos_id, worker.BUFFER)
            name = f"{split}/{source.name}/leftover_{job.key[:8]}_{len(chosen):05d}"
            entries = shards.write_shards(packed, job.folder, name, dtype)
            splits[split][source.name] = summary(parts, packed.stats, entries)
    check_enough(job, splits, notes)
    file = ManifestFile(
        format=DATA_FORMAT,
        row_len=job.config.row_len,
        dtype=dtype,
        prepared_from=job.key,
        options=job.options,
        tokens_wanted=job.tokens,
        packing={"policy": "best_fit", "buffer": worker.BUFFER},
        val_fraction=job.config.val_fraction,
        tokenizer=TokenizerFacts(
            sha256=tokenizer.sha256,
            nfc=tokenizer.nfc,
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos_id,
            marks=chat.marks(tokenizer) if job.conversations else None,
        ),
        sources=facts,
        splits=splits,
        notes=dict(sorted(notes.items())),
        fingerprint="",
        made={
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": code.commit() or "unknown",
            "beginnings": "\n".join(begins[: worker.PROMPTS]),
        },
    )
    tree = formats.tree_of(file)
    tree["fingerprint"] = shards.fingerprint(tree)
    disk.write_text(job.folder / "tokenizer.json", tokenizer.spec)
    disk.write_json(job.folder / "manifest.json", tree)
    manifest = shards.Manifest.load(job.folder)
    manifest.check()
    return manifest, notes


def summary(parts: list[UnitSplit], leftover: data.PackStats, more: list[Shard]) -> Split:
    """One split of one source: its units and the rows packed from their leftovers, summed."""
    packing = Counter()
    sums = Counter()
    for part in parts:
        packing.update(part.packing)
        sums.update(documents=part.documents, bytes=part.bytes, tokens=part.tokens)
    for field in ("rows", "cuts", "splits", "bos"):
        packing[field] += getattr(leftover, field)
    packing["dropped"] += leftover.leftover  # the last partial row of the whole source
    packing["leftover"] = 0
    return Split(
        **sums,
        rows=packing["rows"],
        packing=dict(packing),
        shards=[shard for part in parts for shard in part.shards] + more,
    )


def total(by_source: dict[str, Split]) -> Counter:
    """Documents, bytes, tokens, rows, cuts and dropped tokens of a split, over all its sources."""
    t = Counter()
    for part in by_source.values():
        t.update(documents=part.documents, bytes=part.bytes, tokens=part.tokens)
        t.update({key: part.packing.get(key, 0) for key in ("rows", "cuts", "dropped")})
    return t


def check_enough(job: worker.Job, splits: dict, notes: Notes) -> None:
    """UsageError if a split has no row: training would stop at once, with a less helpful error."""
    for split, by_source in splits.items():
        t = total(by_source)
        if not t["rows"]:
            raise UsageError(
                f"the {split} split has {t['tokens']} tokens, less than one row of "
                f"{job.config.row_len}{sources.left_out(notes)}; give it more text, a smaller "
                f"--row_len, or another --val_fraction than {job.config.val_fraction}"
            )


def report(manifest: shards.Manifest, notes: Notes, seconds: float) -> str:
    """The lines printed at the end of a preparation."""
    lines = []
    facts = manifest.facts
    splits = facts.splits
    documents = sum(source.documents for source in facts.sources)
    parts = sum(total(by_source)["documents"] for by_source in splits.values())
    what = "documents" if parts <= documents else "pieces of documents"
    for split in ("train", "val"):
        t = total(splits[split])
        if t["tokens"]:
            lines.append(
                f"{split:5} {t['documents']:,} {what} | {t['bytes'] / 1e6:,.2f} MB | "
                f"{t['tokens']:,} tokens | {t['bytes'] / t['tokens']:.3f} bytes/token | "
                f"{t['rows']:,} rows | cut {100 * t['cuts'] / max(1, t['documents']):.2f}% "
                f"of them | dropped {100 * t['dropped'] / t['tokens']:.4f}% of tokens"
            )
    held = total(splits["val"])["tokens"]
    if held < ENOUGH:
        fraction = min(0.5, facts.val_fraction * ENOUGH / held)
        lines.append(
            f"warning: only {held:,} tokens are held out, too few to tell one model from another; "
            f"give more text, or --val_fraction {fraction:.2g} in another --data_dir"
        )
    lines += [f"note  {note}" for note in notes.lines(documents)]
    for source in facts.sources:
        if source.not_read:
            kinds = ", ".join(f"{n:,} {kind}" for kind, n in source.not_read.items())
            lines.append(f"note  files of {source.name} that were not read: {kinds}")
    lines.append(
        f"{seconds:.1f} s | {manifest.dir}/manifest.json: fingerprint "
        f"{manifest.fingerprint[:16]}, vocabulary {manifest.vocab_size:,}, rows of "
        f"{manifest.row_len}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main)
