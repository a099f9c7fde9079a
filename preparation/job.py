"""Options -> a `Job`: which text there is, in units, and under which key its data is kept.

`plan_job` does it, from top to bottom. It lists the units of each source, reads the beginning (is
there text?), and a small corpus whole, to hold out the share that was asked for. Three hashes:
    options   of the options
    key       of those and of the list of units. A finished dataset has both in its manifest, so
              that `reuse` can say whether the options are others, or the text
    unit_dir  of key, of what is held out, and of when the files were written: a file may be edited
              and keep its size. Finished units are kept in DATA_DIR/.units/HASH
--tokens is in none of them: asked for more, the same folder gets more units.
`sweep` removes what other jobs have left in the folder. Next: pool.py does the units of a job.
"""

import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import data
from config import DataConfig, UsageError
from machinery import cli, disk, formats, shards
from machinery.errors import DataError
from machinery.output import say
from preparation import chat, sources
from preparation.reading import DOCUMENT, Notes, beginning
from preparation.sources import Source
from tokenizer import Tokenizer, blocks, normalize, split_of

BUFFER = 16_384  # documents held by the packer
TOKENIZER_CHARS = 200_000_000  # the most text that a tokenizer is trained on
FEW_FILES = 256  # with fewer, parts of documents (blocks) are held out instead of whole ones
SMALL = 24_000_000  # bytes; of a smaller corpus, exactly the share asked for is held out


UnitId = tuple[int, int]  # index of a source, number of the unit in it


@dataclass(frozen=True)
class Job:
    """All that decides what is prepared: plain values, which can be sent to another process."""

    config: DataConfig
    """The options."""
    folder: Path
    """DATA_DIR."""
    sources: list[Source]
    """Where text comes from."""
    shares: list[float]
    """Of each source, among the tokens wanted."""
    facts: list[dict]
    """Of each source, for the manifest: files and bytes; of a dataset on the Hub of Hugging Face,
    its revision and its number of files (shards)."""
    blocks: list[int]
    """Of each source: characters of a document that go to training, or to validation, as one."""
    units: dict[UnitId, dict]
    """What to read for each unit, a part of a source that is read at once (sources.list_units)."""
    tokens: int
    """For training, that are wanted; 0: all."""
    bytes: int | None
    """Of all text; None: a source on the Hub does not say."""
    few_files: bool
    """Documents are then parts of files rather than what someone wrote as one."""
    nfc: bool
    """Whether text is normalized to Unicode NFC: one spelling for each character."""
    options: str
    """A hash of the options."""
    key: str
    """A hash of the options and the units: of all that decides what is in the shards."""
    val_below: int = 0
    """A block whose 64-bit hash is below this is held out for validation."""
    unit_dir: Path = Path()
    """DATA_DIR/.units/HASH: the finished units of these options and this text."""


def plan_job(config: DataConfig, given: Tokenizer | None = None) -> Job:
    """given: the tokenizer that config.tokenizer names; None: one is to be trained. UsageError for
    options or text that cannot be used, DataError for text that cannot be read."""
    found = [sources.parse(spec, sources.encoding_of(config.encoding)) for spec in config.source]
    shares = shares_of(config, found)
    tokens = tokens_wanted(config, found)
    data.pack([], config.row_len, 0)  # refuses a bad row_len

    folder = Path(config.data_dir)
    units, facts = zip(*(list_units(source, folder) for source in found))
    found = [replace(source, revision=f.get("revision")) for source, f in zip(found, facts)]
    is_local = not any(source.remote for source in found)
    size = sum(f["bytes"] for f in facts) if is_local else None
    few_files = is_local and sum(f["files"] for f in facts) < FEW_FILES
    options = options_key(config, found, tokenizer_key(config, given, shares))
    job = Job(
        config=config,
        folder=folder,
        sources=found,
        shares=shares,
        facts=facts,
        blocks=[block_size(source, size if few_files else None) for source in found],
        units={(s, u): unit for s, those in enumerate(units) for u, unit in enumerate(those)},
        tokens=tokens,
        bytes=size,
        few_files=few_files,
        nfc=given.nfc if given else config.nfc,
        options=options,
        key=digest([options, units]),
    )
    below = val_below(job)
    units = f".units/{digest([job.key, below, written_ns(job)])}"
    return replace(job, val_below=below, unit_dir=disk.inside(folder.absolute(), units))


def digest(tree: object) -> str:
    """16 hexadecimal digits of the sha256 of a JSON tree."""
    return disk.sha256_of_tree(tree)[:16]


def shares_of(config: DataConfig, found: list[Source]) -> list[float]:
    """Each source's share of the tokens wanted; UsageError if they or the names do not fit."""
    names = [source.name for source in found]
    if not names:
        raise UsageError("--source names no text; try --source stdlib, or files:PATH")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(
            f"two sources are named {twice[0]!r}; name them: --source a=files:... b=files:..."
        )
    shares = cli.weights(config.mixture) or dict.fromkeys(names, 1.0)
    if set(shares) != set(names) or min(shares.values()) <= 0:
        raise UsageError(
            f"the mixture {' '.join(config.mixture)} must give each source "
            f"({', '.join(names)}) a share above 0, as in --mixture web=80 books=20"
        )
    return [shares[name] for name in names]


def tokens_wanted(config: DataConfig, found: list[Source]) -> int:
    """--tokens, 0: all; UsageError if a source on the Hub would be read whole, or twice."""
    remote = [source.place for source in found if source.remote]
    if remote and not config.tokens:
        raise UsageError(
            f"hf:{remote[0]} may hold far more text than you need; give its training "
            "tokens: --tokens 2B, or --tokens all"
        )
    if remote and config.dedup != "none":
        raise UsageError(
            f"--dedup {config.dedup} would download hf:{remote[0]} twice; take data without "
            "duplicates, and --dedup none"
        )
    return 0 if config.tokens == "all" else cli.count(config.tokens)


def list_units(source: Source, folder: Path) -> tuple[list[dict], dict]:
    """The units and facts of a source, which is then probed. A list from the network is kept in the
    data folder: so a job goes on with the revision that it began with."""
    path = disk.inside(folder, f".units/remote-{digest(repr(source))}.json")
    if source.remote:
        with suppress(DataError):  # none yet, or damaged
            listing = disk.read_json(path)
            return listing["units"], listing["facts"]
    units, facts = sources.list_units(source)
    sources.probe(source, units)
    if source.remote:
        disk.write_json(path, {"units": units, "facts": facts})
    return units, facts


def tokenizer_key(config: DataConfig, given: Tokenizer | None, shares: list[float]) -> object:
    """What decides the tokenizer: what it is trained on, or the sha256 of a given one. UsageError
    for options that a given one cannot follow."""
    splits = [split_of(config.digits, combining) for combining in (False, True)]
    asked = config.digits != DataConfig.digits
    if given is None:
        key = [config.vocab_size, config.nfc, TOKENIZER_CHARS, shares]
        return [*key, splits[0]] if asked else key  # data made before --digits keep theirs
    if asked and given.split not in splits:
        raise UsageError(
            f"--digits is for a tokenizer that is trained, and {config.tokenizer} cuts text in its "
            "own way; add --digits 2"
        )
    if config.nfc and not given.nfc:
        raise UsageError(
            f"--nfc has no effect: {config.tokenizer} was trained without it; add --no_nfc"
        )
    # Shares that differ also decide how many units of each source are prepared.
    return [given.sha256, shares] if len(set(shares)) > 1 else given.sha256


def options_key(config: DataConfig, found: list[Source], tokenizer: object) -> str:
    """A hash of the options that decide the data. Those that came later count only if they are not
    at their defaults: so older data keep their key."""
    options = {
        "source": [source.spec for source in found],
        "tokenizer": tokenizer,
        "revisions": [source.revision for source in found],
        "format": formats.DATA_FORMAT,
        "row_len": config.row_len,
        "val_fraction": config.val_fraction,
        "buffer": BUFFER,
    }
    later = {"dedup": config.dedup, "encoding": found[0].encoding}
    options |= dict(later.items() - {("dedup", "none"), ("encoding", "utf-8")})
    return digest(options)


def block_size(source: Source, size: int | None) -> int:
    """How many characters of a document are held out together. DOCUMENT (reading.py: a million, and
    the longest that a plain text is not cut) stands for all of it: for conversations, records, and
    plain text in many files. Of plain text in a few files, `size` bytes in all, it is 4,096, or a
    thousandth of a long text, or a 32nd of a short one."""
    if size is None or source.remote or source.conversations or sources.has_records(source):
        return DOCUMENT
    return min(max(min(4096, size // 32), size // 1024, 1), DOCUMENT)


def val_below(job: Job) -> int:
    """A block is held out if its 64-bit hash is below this: `val_fraction` of all blocks are.

    With few blocks that may be none, or far too many. So if the corpus is small, or little of it is
    held out, it is read here: the smallest hashes are held out, until their blocks have
    `val_fraction` of the bytes and at least a row (8 bytes per token), but not over half."""
    share = job.config.val_fraction
    if job.bytes is None or job.bytes > SMALL and job.bytes * share > SMALL / 100:
        return int(share * 2**64)
    notes = Notes()
    sizes = {}  # hash -> bytes: a block that occurs twice counts once
    for unit in job.units:
        size = job.blocks[unit[0]]
        for block in (b for text in texts(job, unit, notes) for b in blocks(text, size)):
            sizes[data.hash64(block)] = len(block.encode("utf-8"))
    if len(sizes) == 1:
        raise UsageError(
            f"there is only one text, {beginning(block)}{sources.left_out(notes)}; add "
            "others, as one has to be held out for validation"
        )
    size = sum(sizes.values())
    below = 0
    held = 0
    wanted = max(share * size, min(8 * job.config.row_len, size // 2))
    for value in sorted(sizes)[:-1]:  # one at least is for training
        if held >= wanted:
            break
        held += sizes[value]
        below = value + 1
    return below


def texts(job: Job, unit: UnitId, notes: Notes) -> Iterator[str]:
    """The documents of a unit as normalized text, of a conversation all that is said: to be hashed,
    and for the tokenizer to be trained on."""
    source = job.sources[unit[0]]
    for document in sources.documents(source, job.units[unit], notes):
        yield normalize(chat.as_text(document) if source.conversations else document, job.nfc)


def written_ns(job: Job) -> list[int]:
    """When the files that people edit were written, in nanoseconds since 1970."""
    return [
        path.stat().st_mtime_ns
        for source in job.sources
        if source.local
        for path in sources.find_files(source)[0].values()
    ]


def units_of(job: Job, source: int) -> list[UnitId]:
    """The units of one source, in order."""
    return [unit for unit in job.units if unit[0] == source]


def task_of(job: Job, unit: UnitId) -> tuple:
    """The arguments of `work`, as another process gets them: a job may have thousands of units, so
    it gets this one alone; and its working folder may be another one."""
    return replace(job, folder=job.folder.absolute(), units={unit: job.units[unit]}), unit


def reuse(job: Job) -> shards.Manifest | None:
    """The manifest, if the folder holds this job's data; None if something is missing, damaged or
    older than its text; UsageError if the folder holds something else. Python's own text changes
    with each update: data made of it is kept as long as it is intact."""
    path = job.folder / "manifest.json"
    if not path.exists():
        return None
    manifest = shards.Manifest.load(job.folder)
    same_options = manifest.facts.options == job.options
    same_text = manifest.facts.prepared_from == job.key
    if not same_options or not (same_text or all(source.installed for source in job.sources)):
        reason = "its text has changed since" if same_options else "made with other options"
        raise UsageError(
            f"{job.folder} holds other data ({reason}); give another --name or --data_dir, or "
            f"remove it first: rm -r -- {shlex.quote(str(job.folder))}"
        )
    try:
        manifest.check()
        # a time in the future proves nothing
        if any(path.stat().st_mtime_ns < when <= time.time_ns() for when in written_ns(job)):
            raise DataError("some of its text is newer")
    except DataError as error:
        reason = str(error).partition("; ")[0]  # without its remedy
        say(f"redoing the missing parts of {job.folder}: {reason}", file=sys.stderr)
        return None
    if not same_text:
        say("the installed Python files have changed since; the data is kept as it was made")
    before = manifest.facts.tokens_wanted
    if before == job.tokens:
        return manifest
    say(
        f"{job.folder} is prepared with other --tokens; runs that began before go on with "
        f"--tokens {before or 'all'} again"
    )
    return None


def sweep(job: Job) -> None:
    """Remove what earlier preparations in this folder left: temporary files, and units of other
    options or other text, since this job's shards have the same names. Rows of fewer units
    (leftover_*) stay: a run may be training on them. Below DATA_DIR there may be folders of others:
    only its own are looked into."""
    all_units = job.unit_dir.parent
    folders = [  # no link leads elsewhere
        disk.inside(job.folder, f"{split}/{source.name}")
        for split in ("train", "val")
        for source in job.sources
    ]
    for folder in (job.folder, all_units, job.unit_dir, *folders):
        disk.sweep(folder.glob(disk.TEMPORARY))
    for other in all_units.glob("[0-9a-f]" * 16):
        if other.is_dir() and not other.is_symlink() and other != job.unit_dir:
            say(f"starting {job.folder} again: other options or other text", file=sys.stderr)
            shutil.rmtree(other)
