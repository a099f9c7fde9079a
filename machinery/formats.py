"""What the programs write as JSON for programs to read: a dataclass for each file and kind of line.

A file may be of another version, damaged, or a stranger's. So `checked` compares every field with
its type and names the one that does not fit. A field that is missing takes its default; one that
the class does not have is left out, but refused in a GPTConfig. docs/disk.md lists the fields.
Next: disk.py, which opens the files.
"""

import math
import re
import reprlib
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from config import LARGEST, Count, GPTConfig
from machinery import disk
from machinery.errors import DataError
from machinery.output import say

# A number with its least and its most, or a text with its pattern, as `checked` reads them.
Whole = Annotated[int, 0, LARGEST]
Number = Annotated[float, -LARGEST, LARGEST]  # no NaN, nothing infinite
Positive = Annotated[float, 1e-9, LARGEST]
Time = Annotated[float, 0, 2.5e11]  # seconds since 1970; a year of four digits
# One line: no control characters, nothing that turns the direction. Of lone surrogates only those
# that stand for a byte in the name of a folder that is not UTF-8.
Line = Annotated[
    str, r"[^\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udc7f\udd00-\udfff]{0,4096}"
]
Sha256 = Annotated[str, "[0-9a-f]{64}"]
on_disk = dataclass(kw_only=True)
# Versions of folders; each goes up when older ones can no longer be read.
DATA_FORMAT = 2
CHECKPOINT_FORMAT = 3
EXPORT_FORMAT = 5

# ------------------------------------------------------------------------------------ the checker


def checked(kind: Any, value: Any, where: object) -> Any:
    """`value`, which json.loads has returned, as `kind`: its dataclasses are built. DataError names
    the field that does not fit: "manifest.json, splits, train, web, rows is -1".

    kind: a dataclass; list[X], tuple[X, ...] or dict[str, X]; a Literal; X | Y; a number with its
    least and its most, as in Annotated[int, 0, 9]; a text with its pattern, as in
    Annotated[str, "[a-z]+"]; int, float, str, bool, None or Any. where: the name of the file, and
    the place in it.
    """
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is dict:
        name, one = args
        items = of_type(dict, value, where).items()
        return {checked(name, k, where): checked(one, x, f"{where}, {k[:80]}") for k, x in items}
    if origin in (list, tuple):
        items = enumerate(of_type(list, value, where))
        return origin(checked(args[0], x, f"{where}[{i}]") for i, x in items)
    if origin in (Union, UnionType):
        return first_that_fits(args, value, where)
    if origin is Annotated:
        value = of_type(args[0], value, where)
        fits = re.fullmatch(args[1], value) if args[0] is str else args[1] <= value <= args[2]
    elif origin is Literal:
        fits = value in args
    elif is_dataclass(kind):
        return built(kind, of_type(dict, value, where), where)
    else:
        return of_type(kind, value, where)
    if not fits:
        raise DataError(f"{where} is {reprlib.repr(value)}, not {wanted(args)}")
    return value


def wanted(args: tuple) -> str:
    """What an Annotated or a Literal with these args asks for, in words."""
    if args[0] is str:
        return f"like {args[1]}"
    if args[0] in (int, float):
        return f"from {args[1]} to {args[2]}"
    return " or ".join(map(str, args))


def of_type(kind: Any, value: Any, where: object) -> Any:
    """`value` if it is of this type; a float may be written as 1."""
    if type(value) is kind or kind is Any or kind is float and type(value) is int:
        return value
    raise DataError(f"{where} is {reprlib.repr(value)}, not {kind.__name__}")


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """The kinds of a dataclass's fields. Kept, since metrics.jsonl has a hundred thousand lines."""
    return get_type_hints(kind, include_extras=True)


def first_that_fits(kinds: tuple, value: Any, where: object) -> Any:
    """`value` as the first of these kinds that it fits."""
    problems = []
    for kind in kinds:
        try:
            return checked(kind, value, where)
        except DataError as error:
            problems.append(error)
    # A reason other than "is missing" is of the kind that was meant.
    raise max(problems, key=lambda problem: not str(problem).endswith("is missing"))


def built(kind: type, tree: dict, where: object) -> Any:
    """The dataclass of a JSON object; or DataError."""
    hints = hints_of(kind)
    known = {}
    for name, x in tree.items():
        if name in hints:
            known[name] = checked(hints[name], x, f"{where}, {name}")
        elif kind is GPTConfig:  # a model with more to it computes something else
            raise DataError(f"{where}, {name[:80]} is not known here, perhaps of newer code")
    for one in fields(kind):
        if one.name not in known and one.default is one.default_factory is MISSING:
            raise DataError(f"{where}, {one.name} is missing")
    try:
        return kind(**known)
    except ValueError as error:  # its fields do not fit together
        raise DataError(f"{where} cannot be used: {str(error)[:200]}") from None


# ------------------------------------------------------------------------------------ the files


def read(path: str | Path, kind: type) -> Any:
    """A JSON file as `kind`; DataError if it cannot be read or does not fit."""
    return checked(kind, disk.read_json(path), path)


def parse(content: bytes, kind: Any, where: object) -> Any:
    """A JSON object as `kind`; DataError, with the field, if it does not fit. where: what the
    content is, or from which file."""
    return checked(kind, disk.parse_json(content, where), where)


def read_lines(path: Path, kind: Any) -> list[Any]:
    """The lines of a .jsonl file, each as `kind`; [] if there is no file."""
    return [found for _, found in lines_in(path, kind)]


def lines_in(path: Path, kind: Any) -> list[tuple[bytes, Any]]:
    """(the line, the line as `kind`) for each of a .jsonl file; [] if there is none, or with a
    warning if it cannot be read. Lines that do not fit are left out, with a warning that counts
    them: a kill may have cut one short, a disk may have damaged one."""
    try:
        lines = disk.read_bytes(path, 1 << 30).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        say(f"warning: {path} cannot be read ({error.strerror})")
        return []
    found = []
    for line in lines:
        with suppress(DataError):
            found.append((line, parse(line, kind, path)))
    skipped = len(lines) - len(found)
    if skipped:
        say(f"warning: {path}: {skipped} of {len(lines)} lines are damaged and left out")
    return found


# ------------------------------------------------------------------------- DATA_DIR/manifest.json


@on_disk
class Shard:
    """Rows of a source, in two files of .npy."""

    rows: Whole
    min: Whole
    """The smallest token in it."""
    max: Whole
    """The largest."""
    file: Line
    """The file of the rows, within DATA_DIR."""
    bytes: Whole
    sha256: Sha256
    crc32_file: Line
    """The file of a checksum for each row."""
    crc32_bytes: Whole
    crc32_sha256: Sha256

    def files(self) -> list[tuple[str, int, str]]:
        """(name, bytes, sha256) of its two files: rows and checksums."""
        crc32 = (self.crc32_file, self.crc32_bytes, self.crc32_sha256)
        return [(self.file, self.bytes, self.sha256), crc32]


@on_disk
class Split:
    """The training or the validation part of a source."""

    shards: list[Shard]
    documents: Whole = 0
    bytes: Whole = 0
    """Of text in UTF-8."""
    tokens: Whole = 0
    """Of the documents, without BOS."""
    rows: Whole = 0
    packing: dict[str, Whole] = field(default_factory=dict)
    """Where the documents went (data.PackStats)."""


@on_disk
class TokenizerFacts:
    """The tokenizer that made the rows."""

    sha256: Sha256
    """Of tokenizer.json."""
    vocab_size: Whole
    bos_id: Whole
    nfc: bool = False
    """Whether text is normalized to NFC first."""
    marks: tuple[Whole, ...] | None = None
    """Ids of <|user|>, <|assistant|> and <|end|>, if the rows are conversations."""
    file: str = "tokenizer.json"

    def __post_init__(self):
        if self.marks is not None and len(self.marks) != 3:
            raise ValueError(f"marks are three ids, not {self.marks}")


@on_disk
class SourceFacts:
    """Where text came from."""

    name: Line
    spec: str = ""
    """As given to --source, without a password."""
    units: Whole = 0
    """How many were prepared."""
    units_in_source: Whole = 0
    documents: Whole = 0
    files: Whole | None = None
    """How many."""
    bytes: Whole | None = None
    revision: str | None = None
    """The commit of a dataset on the Hub."""
    shards: Whole | None = None
    """Of a dataset on the Hub."""
    not_read: dict[str, Whole] | None = None
    """Files of other kinds, by kind."""


@on_disk
class ManifestFile:
    """manifest.json: it is written last, and makes a folder a data folder."""

    format: Literal[DATA_FORMAT]
    row_len: Annotated[int, 2, LARGEST]
    dtype: Literal["<u2", "<u4"]
    """Of the rows."""
    tokenizer: TokenizerFacts
    sources: list[SourceFacts]
    splits: dict[str, dict[str, Split]]
    """train and val, by source."""
    fingerprint: str
    """sha256 of all but itself and `made`: it changes whenever the data do."""
    prepared_from: str = ""
    """A hash of the options and the text."""
    options: str = ""
    """A hash of the options."""
    tokens_wanted: Whole = 0
    """--tokens; 0: all."""
    packing: dict[str, Any] = field(default_factory=dict)
    """How documents were packed."""
    val_fraction: Number = 0
    notes: dict[str, Whole] = field(default_factory=dict)
    """What was odd in the text, and how often."""
    made: dict[str, str] = field(default_factory=dict)
    """When, by which commit, and how three held-out documents begin, a line each."""

    def __post_init__(self):
        for split in ("train", "val"):
            for source in self.sources:
                if source.name not in self.splits.get(split, {}):
                    raise ValueError(f"splits.{split} has no {source.name!r}")


# ------------------------------------------------------------ DATA_DIR/.units/*/SOURCE_00000.json


@on_disk
class UnitSplit(Split):
    """The training or the validation part of a unit."""

    leftover: list[list[Whole]] = field(default_factory=list)
    """Ids that fill no row."""


@on_disk
class Unit:
    """What a finished unit is; the manifest is put together from all of them."""

    splits: dict[str, UnitSplit]
    tokens: Whole
    """For training."""
    documents: Whole
    """That were read."""
    notes: dict[str, Whole]
    examples: dict[str, str]
    """An example for a note."""
    beginnings: str = ""
    """How its first held-out documents begin, a line each."""


# ------------------------------------------------------------------- RUN_DIR/checkpoints/step_*/


@on_disk
class FileList:
    """MANIFEST.json of a checkpoint: without it, this is no checkpoint."""

    format: Literal[CHECKPOINT_FORMAT]
    files: dict[Line, Sha256]
    """The sha256 of each."""
    kept: bool | None = None
    """True: for good, whatever the options of a later start."""
    copy: str | None = None
    """In a mirror: the folder of these files."""
    run: str | None = None
    """In a mirror: the folder of the run's small files."""

    def __post_init__(self):
        if "trainer.json" not in self.files:
            raise ValueError("files has no trainer.json")


@on_disk
class Code:
    """The code of a process that trains (code.py)."""

    commit: Annotated[str, "[0-9a-f]{1,64}"] | None = None
    """Of git; None: not known."""
    changed: bool = False
    """Whether its files differ from the commit: code.diff says how."""
    files: dict[Line, Sha256]
    """The sha256 of each file that computes."""


@on_disk
class Provenance:
    """Where weights come from: recorded by a checkpoint and by an export."""

    step: Whole
    tokens: Whole
    """Trained on; `step` determines it."""
    identity: dict[str, Any]
    """What decides the numbers of a run: its options for model and training, its code (a Code),
    data_fingerprint, tokenizer_sha256, the revisions of its sources (folders.identity)."""
    model: GPTConfig
    data_dir: Line | None = None
    """As typed: it may be a URL, without its password."""

    @property
    def tuned(self) -> bool:
        """Whether the text was conversations: then the model can chat."""
        return bool(self.identity.get("conversations"))

    @property
    def tokenizer_sha256(self) -> Any:
        return self.identity.get("tokenizer_sha256")

    @property
    def code(self) -> Code | None:
        """None: not known."""
        with suppress(DataError):
            return checked(Code, self.identity.get("code"), "its code")
        return None


@on_disk
class Counters:
    """How far a run has come: what a run that resumes needs to know of its past."""

    step: Whole = 0
    """Optimizer steps taken. The position in the data and the number of tokens follow from it."""
    skipped: Whole = 0
    """Steps with numbers that were not finite, without overflows of fp16; no weight changed."""
    best_bpb: float = math.inf
    """The lowest of its validations."""
    fp16_scale: Annotated[float, 1, 1 << 24] = 65536.0
    """The loss scale of fp16 (optim.next_scale)."""
    fp16_good_steps: Whole = 0
    """Steps without overflow since it changed."""


def counters_of(run: Counters) -> dict[str, Any]:
    """The counters in a Trainer or in a session.Progress, by name."""
    return {one.name: getattr(run, one.name) for one in fields(Counters)}


@on_disk
class Trainer(Provenance, Counters):
    """trainer.json: what a checkpoint holds beside its tensors."""

    world_size: Count = 1
    """Ranks of the run that saved it."""
    micro_batch: Count = 1
    """Rows of a forward pass on one rank."""
    eval_tokens: Whole = 0
    """The option --eval_tokens with which best_bpb was measured."""
    dtype: str = ""
    """Of the computation."""
    steps: Whole = 0
    """Of the whole run."""


@on_disk
class Export(Provenance):
    """`nano2049` in the config.json of an export (hf/)."""

    format: Literal[EXPORT_FORMAT]
    class_name: str
    """Of transformers, without ForCausalLM."""
    files: dict[Line, Sha256]
    """The sha256 of every other file."""
    checkpoint_sha256: Sha256 | None = None
    """Of the MANIFEST.json of the checkpoint."""
    val_bpb: Number | None = None
    val_rows: Whole | None = None
    """On which it was measured."""

    def __post_init__(self):
        if "model.safetensors" not in self.files:
            raise ValueError("files has no model.safetensors")


# ------------------------------------------------------------------------- RUN_DIR/metrics.jsonl


@on_disk
class Taken:
    """A step that was taken, whatever came of it."""

    step: Whole
    """From 1 on."""
    tokens: Whole
    """Trained on, with those of this step."""
    more: dict[str, float] = field(default_factory=dict)
    """Numbers that you add in train.py, and in fp16 the loss scale: in the file, they stand beside
    the others."""


@on_disk
class Step(Taken):
    """What train.py knows of a step when it judges it: over all its micro-batches and ranks."""

    loss: Number
    """Mean cross-entropy, in nats (-ln p), of the targets that count."""
    bpb: Number
    """Bits per byte of text."""
    lr: Number
    """The schedule's factor on every learning rate."""
    norm: Number
    """Of the loss's gradient, before clipping."""

    @property
    def bad(self) -> bool:
        """Not finite: such a step changes no weight."""
        return not math.isfinite(self.loss + self.norm)

    @property
    def overflow(self) -> bool:
        """Bad only because the gradients, scaled, are too large for fp16: a smaller scale helps."""
        return self.bad and math.isfinite(self.loss) and self.more.get("scale", 1) > 1


@on_disk
class StepLine(Step):
    """A step that changed the weights, and its speed."""

    time: Time
    """When it ended, in seconds since 1970."""
    step_s: Number
    """Seconds that it took."""
    tokens_per_s: Positive
    """On all ranks. This and tflops, dt_ms and mfu: by the median of the last 50 steps."""
    data_wait_ms: Number
    """Waiting for data: the mean of these steps."""
    tflops_full: Number
    """TFLOP/s of a device, with the whole attention matrix."""
    tflops_causal: Number
    """With the half of it that is used."""
    dt_ms: Number | None = None
    """Of a step."""
    mfu_full: Number | None = None
    """Share of the device's peak; None: its peak is not known."""
    mfu_causal: Number | None = None
    eval_s: Number | None = None
    """Seconds of validation since the process began."""
    save_s: Number | None = None
    """Seconds that training paused for checkpoints."""
    report_s: Number | None = None
    """Seconds of writing the report."""


@on_disk
class SkippedLine(Taken):
    """A step with numbers that were not finite, which changed no weight."""

    skipped: Whole
    """Of them so far, without overflows of fp16."""
    time: Time = 0
    """When it ended; 0, as the next one: in older files."""
    step_s: Number = 0
    """Seconds that it took."""


@on_disk
class Scored:
    """The model was scored on held-out text."""

    step: Whole
    tokens: Whole
    val_rows: Whole = 0
    """On which; 0: not known, in older folders."""
    reads_future: Number | None = None
    """By how many nats the loss of a text moved when later tokens were changed; 0: honest; None:
    not tried, or in older folders."""


@on_disk
class ValidationLine(Scored):
    """On the first rows of it."""

    val_loss: Number
    """In nats per token."""
    val_bpb: Number
    """In bits per byte."""
    val_bpb_by_source: dict[str, Number] = field(default_factory=dict)


@on_disk
class FullValidationLine(Scored):
    """On all of it, at the end of a run."""

    full_val_loss: Number
    full_val_bpb: Number
    full_val_bpb_by_source: dict[str, Number] = field(default_factory=dict)


@on_disk
class Start:
    """A process that began to train."""

    time: Time
    command: str
    device: str
    world_size: Count
    """Ranks."""
    data_dir: str
    init_from: str | None = None
    """The weights that it began from."""
    code: Code | None = None
    flops_per_token: Whole | None = None
    """Of the model, in the full convention."""
    micro_batch: Whole | None = None
    """This and the next three: as they were decided."""
    parallel: str | None = None
    compile: bool | None = None
    recompute: bool | None = None
    torch: str | None = None
    """Its version."""


@on_disk
class StartLine:
    """A process began to train."""

    start: Start


METRICS = StepLine | ValidationLine | FullValidationLine | SkippedLine | StartLine


@on_disk
class Stamp:
    """Any of these lines, or a SampleLine, of any version: what decides whether it stays when a
    run resumes."""

    step: Whole = 0
    """0 in a StartLine, which always stays."""
    val_bpb: Any = None
    full_val_bpb: Any = None


# ---------------------------------------------------------------------------- others in RUN_DIR


@on_disk
class SampleLine:
    """samples.jsonl: what the model wrote at a validation."""

    step: Whole
    tokens: Whole
    prompt: str
    text: str
    """With the prompt."""


@on_disk
class Verdict:
    """verdicts.jsonl: what a judge behind an address replied (eval.py tournament)."""

    key: Sha256
    """Of the request."""
    reply: str
    """Its end."""


@on_disk
class Status:
    """status.json: whether a run goes on, or how it ended."""

    state: str
    """running, done, preempted, failed or profiled."""
    step: Whole | None = None
    error: str | None = None
    exit_code: int | None = None
    from_step: Whole | None = None
    """That it began after; while it is running."""
    process: Whole | None = None
    """Its number; while it is running."""
    seconds: dict[str, Number] | None = None
    """Where the time of this process went, once it has ended: its steps, the pauses between them
    (eval, report, save), and start, which is the rest: data checked, model built, step compiled."""
