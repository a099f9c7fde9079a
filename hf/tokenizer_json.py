"""Somebody's tokenizer.json -> a Tokenizer of ours, which `tokenizers` itself runs.

Reads a tokenizer.json and the tokenizer_config.json beside it, from a folder or from the Hub. Which
token begins a document is known by its role, not by its name, and is written into the file where
the file does not say it; else the file stays as it is, to the byte, and with it its hash. Next:
prepare_data.py --tokenizer, hf/imported.py.
"""

import json
from contextlib import suppress
from pathlib import Path

from config import UsageError
from machinery import disk
from machinery.errors import DataError, reason_of
from tokenizer import Tokenizer, begins_with, read_spec

WANTED = ("*.safetensors", "*.json")  # what is fetched from the Hub: no code, and no pickle


class Given(Tokenizer):
    """A tokenizer that was given, not trained here."""

    def same_ids(self, other: Tokenizer) -> bool:
        """Whether both give the same ids, whichever token begins a document."""
        mine, theirs = (json.loads(t.spec) | {"post_processor": None} for t in (self, other))
        return mine == theirs


def local_folder(word: str | Path) -> Path:
    """A folder as it is; `hf:REPO[@REVISION]` -> its copy in the Hub's cache, made if there is
    none. UsageError if it cannot be fetched."""
    if not str(word).startswith("hf:"):
        return Path(word)
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import HFValidationError

    repo, _, revision = str(word).removeprefix("hf:").partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=WANTED))
    except (HFValidationError, OSError) as error:
        raise UsageError(f"{word} cannot be read from the Hub: {reason_of(error)}") from None


def file_in(folder: Path, name: str) -> Path:
    """FOLDER/name, for a name that a file may say; DataError if it leads out of the folder. In the
    Hub's cache, snapshots/REVISION/name is a link to a file in blobs/, beside snapshots/."""
    blob = (folder / Path(name).name).resolve()
    snapshots = folder.resolve().parent
    if snapshots.name == "snapshots" and blob.parent == snapshots.parent / "blobs":
        return blob
    return disk.inside(folder, name)


def read(word: str | Path, bos_token: str = "") -> Given:
    """word: a tokenizer.json, its folder, or hf:REPO. The token that begins a document is
    bos_token, else what the file puts first, else what the files beside it name (`named_in`);
    UsageError if none of them says so, or if it is of another kind."""
    folder = local_folder(word)
    path = file_in(folder, "tokenizer.json") if folder.is_dir() else folder.resolve()
    try:
        spec = disk.read_text(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}): --tokenizer needs the path of a "
            "tokenizer.json, such as that of a run (bash run.sh trains tiny's)"
        ) from None
    try:
        return Given(with_first_token(spec, bos_token, folder))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def with_first_token(spec: str, bos_token: str, folder: Path) -> str:
    """The text of a tokenizer.json that says which token begins a document; `spec` itself if it
    says so. UsageError if it is of a kind that tokenizer.py refuses."""
    tree, _ = read_spec(spec)
    for t in tree["added_tokens"]:
        if not t["special"] and (t["lstrip"] or t["rstrip"]):
            raise UsageError(f"the tokenizer's {t['content']!r} swallows the spaces beside it")
    special = {t["content"]: t["id"] for t in tree["added_tokens"] if t["special"]}
    post = tree["post_processor"] or {}
    steps = (s for s in post.get("processors", [post]) if s.get("type") == "TemplateProcessing")
    template = next(steps, None)
    first = begins_with({"post_processor": template})
    if bos_token in ("", first) and first in special and template in (None, post):
        return spec
    first = bos_token or (first if first in special else named_in(folder, special))
    if first not in special:
        reason = f"has no special token {first}" if first else "does not say what begins a document"
        names = ", ".join(special) or "none"
        raise UsageError(f"the tokenizer {reason}; give one of its own with --bos_token: {names}")
    return json.dumps(json.loads(spec) | begin_with(first, special[first]), ensure_ascii=False)


def named_in(folder: Path, special: dict[str, int]) -> str:
    """The token that the files in a folder, or beside a tokenizer.json, name: the bos_token of
    tokenizer_config.json; the bos_token_id of config.json, if it is special; the eos_token."""
    folder = folder if folder.is_dir() else folder.parent
    said = {}
    for file in ("config.json", "tokenizer_config.json"):
        with suppress(DataError):
            said |= disk.read_json(file_in(folder, file))
    by_id = [text for text, i in special.items() if i == said.get("bos_token_id")]
    tokens = [said.get("bos_token"), *by_id, said.get("eos_token")]
    names = [t.get("content") if isinstance(t, dict) else t for t in tokens]
    return next((name for name in names if isinstance(name, str) and name), "")


def begin_with(token: str, token_id: int) -> dict:
    """A tokenizer.json's entry that puts `token` first, by a post-processor: of the ways to say so,
    the only one that every version of transformers and lm_eval obeys."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text, second = ({"Sequence": {"id": s, "type_id": i}} for i, s in enumerate("AB"))
    entry = {"id": token, "ids": [token_id], "tokens": [token]}
    template = {"type": "TemplateProcessing", "special_tokens": {token: entry}}
    return {"post_processor": template | {"single": [first, text], "pair": [first, text, second]}}
