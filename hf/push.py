"""An exported folder -> a repository on the Hugging Face Hub, when export.py is asked to.

Reads the folder, whose parity is checked already; the token is found by huggingface_hub in its own
place (`hf auth login`, or HF_TOKEN). A new repository is private: what was public cannot be taken
back. Guarantees: one commit, after which the sizes and hashes there are those of the folder.
"""

import re
from pathlib import Path

from config import UsageError
from machinery.disk import sha256_of
from machinery.errors import StorageError


def repo_of(target: str) -> str:
    """`hf:USER/REPO` -> USER/REPO; UsageError for anything else."""
    found = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)", target)
    if not found:
        how = "as in --push hf:me/my-model (--push_step alone does nothing)"
        raise UsageError(f"--push {target!r} is not hf:USER/REPO, {how}")
    return found[1]


def push(folder: Path, target: str, revision: str = "") -> str:
    """Upload the folder to the branch `revision` (empty: main); returns its address. UsageError if
    the Hub wants another token, StorageError if it cannot be reached or has something else."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api, repo = HfApi(), repo_of(target)
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        message = f"{folder.name}, by nano2049"
        where = dict(repo_id=repo, revision=revision or "main")
        api.upload_folder(folder_path=folder, commit_message=message, **where)
        there = api.model_info(**where, files_metadata=True).siblings
    except (HfHubHTTPError, LocalTokenNotFoundError) as error:
        status = getattr(getattr(error, "response", None), "status_code", 401)
        said = str(error).strip().splitlines()[0][:200]
        if status in (401, 403):
            raise UsageError(
                f"the Hub does not let you write to {repo} ({said}); log in with a token that may "
                "write: hf auth login"
            ) from None
        raise StorageError(f"{repo} could not be pushed ({said}); {folder} is complete") from None
    except Exception as error:  # no network, no such name: the library has many ways to say so
        said = f"{type(error).__name__}: {str(error).strip()[:200]}"
        raise StorageError(f"{repo} could not be pushed ({said}); {folder} is complete") from None
    found = {file.rfilename: (file.size, file.lfs and file.lfs.sha256) for file in there}
    for path in sorted(folder.iterdir()):
        size, sha256 = found.get(path.name, (None, None))
        if size != path.stat().st_size or sha256 and sha256 != sha256_of(path):
            raise StorageError(f"{repo} has another {path.name} than {folder}; push it again")
    return f"{api.endpoint}/{repo}" + (f"/tree/{revision}" if revision else "")
