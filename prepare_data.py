"""Text -> tokenizer -> packed rows on disk: `python prepare_data.py [PRESET] [--option value ...]`.

Writes data/PRESET, manifest.json last: until then there is no dataset. In `prepare`:
    plan_job        options -> a Job: sources of text, cut into units (some files, or a part of
                    one), and what part of the text is held out for validation (preparation/job.py)
    make_tokenizer  the tokenizer named in the options, or one trained on a sample
    run_units       each unit -> its documents -> token ids -> rows; in processes, or by a cluster
                    of machines (pool.py); finished units are kept, so a killed run goes on
    finish          what the units have left over, less than a row each -> more rows; the manifest
A finished dataset is left alone. `verify [PRESET]` compares every sha256, `show [PRESET] --row N`
prints a row as text, `show --text TEXT` the tokens of a text. Next: optim.py.
"""

import machinery.needs  # first: it says which packages are missing

import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace

import numpy as np

import data
from config import DataConfig, UsageError, find_preset
from machinery import cli, code, disk, shards
from machinery.formats import (
    DATA_FORMAT,
    ManifestFile,
    SourceFacts,
    Split,
    TokenizerFacts,
    Unit,
    UnitSplit,
)
from machinery.output import say, tree_of
from preparation import chat, pool, show, sources
from preparation.duplicates import without_duplicates
from preparation.job import (
    BUFFER,
    TOKENIZER_CHARS,
    Job,
    UnitId,
    plan_job,
    reuse,
    sweep,
    texts,
    units_of,
)
from preparation.reading import Notes
from preparation.worker import PROMPTS, split_text
from tokenizer import Tokenizer, has_marks, split_of

COMMANDS = {"verify": show.verify, "show": show.show}  # each gets the words typed after it
TOKENIZER_DOC_CHARS = 10_000  # the most of one document, unless there are few files
TOKENIZER_UNITS = 16  # per source, from which that text is drawn
ENOUGH = 20_000  # held-out tokens: with fewer, chance decides which checkpoint is the best


def main(argv: list[str]) -> int:
    if argv and argv[0] in COMMANDS:
        COMMANDS[argv[0]](argv[1:])
        return 0
    preset = cli.parse("prepare_data.py", "data", argv)
    config = preset.data
    usual = find_preset(preset.name).data
    # the shares that the preset trains with name its own sources: they fit no others
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
    given = None
    if config.tokenizer:
        from hf import tokenizer_json

        given = tokenizer_json.read(config.tokenizer, config.bos_token)
    elif config.bos_token:
        raise UsageError(f"--bos_token {config.bos_token} has no effect without --tokenizer")
    job = plan_job(config, given)
    manifest = reuse(job)
    if manifest is not None:
        say(
            f"{job.folder} is up to date: {manifest.rows('train'):,} training rows of "
            f"{manifest.row_len}, fingerprint {manifest.fingerprint[:16]}"
        )
        return manifest
    with disk.lock(job.folder, "--data_dir"):
        (job.folder / "manifest.json").unlink(missing_ok=True)  # no dataset while it is changed
        job.unit_dir.mkdir(parents=True, exist_ok=True)
        sweep(job)
        with pool.executor_for(config) as (executor, slots):
            job = without_duplicates(job, executor)
            tokenizer = make_tokenizer(job, given)
            units = pool.run_units(job, executor, slots)
        notes = notes_of(units)
        manifest = finish(job, tokenizer, units, notes)
    say(report(manifest, notes, time.perf_counter() - t0))
    return manifest


def make_tokenizer(job: Job, given: Tokenizer | None) -> Tokenizer:
    """The tokenizer of the rows: the given one, or one trained on a sample of the training text. It
    is kept with the units, and read there if an earlier run of the job has made it."""
    config = job.config
    path = job.unit_dir / "tokenizer.json"
    if path.exists():
        return Tokenizer(disk.read_text(path))
    tokenizer = given
    if tokenizer:
        where = f"from {config.tokenizer}; {tokenizer.bos} begins a document"
    else:
        t0 = time.perf_counter()
        say(f"training a tokenizer of {config.vocab_size:,} tokens ...", file=sys.stderr)
        sample = list(tokenizer_sample(job))
        combining = has_marks(sample)
        tokenizer = Tokenizer.train(
            sample,
            config.vocab_size,
            split=split_of(config.digits, combining),
            nfc=config.nfc,
            progress=sys.stderr.isatty(),
        )
        where = (
            f"in {time.perf_counter() - t0:.1f} s"
            f"{'; combining marks stay with their letters' * combining}"
            f"{'; no other pair occurs twice' * (tokenizer.vocab_size < config.vocab_size)}"
        )
    say(f"tokenizer: {tokenizer.vocab_size:,} tokens {where}", file=sys.stderr)
    disk.write_text(path, tokenizer.spec)
    return tokenizer


def tokenizer_sample(job: Job) -> Iterator[str]:
    """Training text for a tokenizer: from the first units of each source, in the job's shares. No
    document gives more than TOKENIZER_DOC_CHARS, so that many contribute, unless files are few."""
    most = TOKENIZER_CHARS if job.few_files else TOKENIZER_DOC_CHARS
    for s, share in enumerate(job.shares):
        units = units_of(job, s)[:TOKENIZER_UNITS]
        for unit in units:
            left = TOKENIZER_CHARS * share / sum(job.shares) / len(units)
            for text in texts(job, unit, Notes()):
                for split, part in split_text(job, text, job.blocks[s]):
                    if split == "train" and left > 0:
                        part = part[: min(most, int(left) + 1)]
                        left -= len(part)
                        yield part
                if left <= 0:
                    break


def notes_of(units: dict[UnitId, Unit]) -> Notes:
    """What was odd in the text of these units, or left out: counted by reason, with an example."""
    notes = Notes()
    for unit in units.values():
        notes.update(unit.notes)
        notes.examples = unit.examples | notes.examples  # the first of each kind stays
    return notes


def finish(
    job: Job, tokenizer: Tokenizer, units: dict[UnitId, Unit], notes: Notes
) -> shards.Manifest:
    """Finished units, as run_units returns them -> the manifest, which makes the folder a dataset.
    UsageError if a split has no row."""
    facts = []
    splits = {"train": {}, "val": {}}
    for s, source in enumerate(job.sources):
        own = [unit for (index, _), unit in units.items() if index == s]
        facts.append(source_facts(job, s, own))
        for split, by_source in splits.items():
            parts = [unit.splits[split] for unit in own]
            # another name if other units are chosen: these rows depend on all of them
            name = f"{split}/{source.name}/leftover_{job.key[:8]}_{len(own):05d}"
            parts.append(packed_rest(job, tokenizer, parts, name))
            by_source[source.name] = summed(parts)
    for split, by_source in splits.items():
        total = summed(by_source.values())
        if not total.rows:  # training would stop at once, with a less helpful error
            raise UsageError(
                f"the {split} split has {total.tokens} tokens, less than one row of "
                f"{job.config.row_len}{sources.left_out(notes)}; give it more text, a smaller "
                f"--row_len, or another --val_fraction than {job.config.val_fraction}"
            )
    begins = [line for unit in units.values() for line in unit.beginnings.splitlines()]
    return write_manifest(job, tokenizer, facts, splits, notes, begins)


def source_facts(job: Job, s: int, units: list[Unit]) -> SourceFacts:
    """Where the text of a source came from, and how much of it these units are."""
    source = job.sources[s]
    return SourceFacts(
        name=source.name,
        spec=source.spec,
        units=len(units),
        units_in_source=len(units_of(job, s)),
        documents=sum(unit.documents for unit in units),
        **job.facts[s],
    )


def packed_rest(job: Job, tokenizer: Tokenizer, parts: list[UnitSplit], name: str) -> Split:
    """Each unit of a source leaves over documents of less than a row; together these make some more
    rows, in files called `name`. What is still left over is dropped: less than a row a source."""
    dtype = shards.dtype_for(tokenizer.vocab_size)
    leftover = [np.array(ids, dtype) for part in parts for ids in part.leftover]
    packed = data.pack(leftover, job.config.row_len, tokenizer.bos_id, BUFFER)
    written = shards.write_shards(packed, job.folder, name, dtype)
    packing = asdict(packed.stats)  # complete, now that the rows have been written
    packing.update(documents=0, tokens=0, dropped=packing["leftover"])  # parts have counted theirs
    return Split(shards=written, packing=packing)


def summed(parts: Iterable[Split]) -> Split:
    """Parts of a split as one."""
    packing = Counter()
    sums = Counter()
    written = []
    for part in parts:
        packing.update(part.packing)
        sums.update(documents=part.documents, bytes=part.bytes, tokens=part.tokens)
        written += part.shards
    packing["leftover"] = 0  # packed_rest has packed it, or dropped it
    return Split(**sums, rows=packing["rows"], packing=packing, shards=written)


def write_manifest(
    job: Job, tokenizer: Tokenizer, facts, splits, notes: Notes, begins
) -> shards.Manifest:
    """Write tokenizer.json and, last of all, manifest.json. facts: the SourceFacts; splits: "train"
    and "val" -> name of a source -> its Split; begins: how held-out documents begin."""
    is_chat = any(source.conversations for source in job.sources)
    tree = tree_of(
        ManifestFile(
            format=DATA_FORMAT,
            row_len=job.config.row_len,
            dtype=shards.dtype_for(tokenizer.vocab_size),
            prepared_from=job.key,
            options=job.options,
            tokens_wanted=job.tokens,
            packing={"policy": "best_fit", "buffer": BUFFER},
            val_fraction=job.config.val_fraction,
            tokenizer=TokenizerFacts(
                sha256=tokenizer.sha256,
                nfc=tokenizer.nfc,
                vocab_size=tokenizer.vocab_size,
                bos_id=tokenizer.bos_id,
                marks=chat.marks(tokenizer) if is_chat else None,  # <|user|> and others
            ),
            sources=facts,
            splits=splits,
            notes=dict(sorted(notes.items())),
            fingerprint="",  # of the rest: see below
            made={
                "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "commit": code.commit() or "unknown",
                "beginnings": "\n".join(begins[:PROMPTS]),
            },
        )
    )
    tree["fingerprint"] = shards.fingerprint(tree)
    disk.write_text(job.folder / "tokenizer.json", tokenizer.spec)
    disk.write_json(job.folder / "manifest.json", tree)
    manifest = shards.Manifest.load(job.folder)
    manifest.check()
    return manifest


def report(manifest: shards.Manifest, notes: Notes, seconds: float) -> str:
    """The lines printed at the end of a preparation."""
    lines = []
    facts = manifest.facts
    totals = {split: summed(facts.splits[split].values()) for split in ("train", "val")}
    documents = sum(source.documents for source in facts.sources)
    everything = sum(total.tokens for total in totals.values())
    for split, t in totals.items():
        lines.append(
            f"{split:5} {t.documents:,} texts | {t.bytes / 1e6:,.2f} MB | "
            f"{t.tokens:,} tokens, {t.tokens / everything:.1%} | "
            f"{t.bytes / t.tokens:.3f} bytes/token | "
            f"{t.rows:,} rows | cut {t.packing['cuts'] / t.documents:.2%} of them | "
            f"dropped {t.packing['dropped'] / t.tokens:.4%} of tokens"
        )
    held = totals["val"].tokens
    if held < ENOUGH:
        enough = 1.2 * ENOUGH / everything  # a share; more, as no document is held out in part
        times = max(2, math.ceil(enough / facts.val_fraction))
        lines.append(
            f"warning: only {held:,} tokens are held out, {held / everything:.1%} of all, too few "
            f"to tell one model from another; give {times:,} times as much text"
        )
        if enough < 0.5:
            lines[-1] += f", or --val_fraction {enough:.2g} in another --data_dir"
    lines += [f"note  {note}" for note in notes.lines(documents)]
    for source in facts.sources:
        if source.not_read:
            lines.append(
                f"note  files of {source.name} that were not read: "
                f"{sources.unread(sources.parse(source.spec).place, source.not_read)}"
            )
    lines.append(
        f"{seconds:.1f} s | {manifest.dir}/manifest.json: fingerprint "
        f"{manifest.fingerprint[:16]}, vocabulary {manifest.vocab_size:,}, rows of "
        f"{manifest.row_len}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main)
