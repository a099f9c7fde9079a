"""An exported folder -> a repository on the Hugging Face Hub, when export.py is asked to.

Reads the folder, whose parity is checked already; the token is found by huggingface_hub in its own
place (`hf auth login`, or HF_TOKEN). A new repository is private: what was public cannot be taken
back. Guarantees: one commit, of files whose hashes huggingface_hub compares with the Hub's.
"""

import re
from pathlib import Path

from config import UsageError
from machinery.errors import StorageError


def repo_of(target: str) -> str:
    """`hf:USER/REPO` -> USER/REPO; UsageError for anything else."""
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)", target)
    if not match:
        raise UsageError(f"--push {target!r} is not hf:USER/REPO, as in --push hf:me/my-model")
    return match[1]


def push(folder: Path, target: str) -> str:
    """Upload the folder; returns its address. UsageError if the Hub wants another token,
    StorageError if it cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    api, repo = HfApi(), repo_of(target)
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        message = f"{folder.name}, by nano2049"
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except Exception as error:  # refused, no network, no such name: there are many classes
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in (401, 403) or isinstance(error, LocalTokenNotFoundError):
            how = "log in with a token that may write: hf auth login"
            raise UsageError(
                f"the Hub does not let you write to {repo} ({reason}); {how}"
            ) from None
        raise StorageError(f"{repo} could not be pushed ({reason}); {folder} is complete") from None
    return f"{api.endpoint}/{repo}"
