"""Putting what was exported on a model hub: `lora-moe-rl export ... --push-to-hub OWNER/NAME`.

Through huggingface_hub, which takes the hub's address (HF_ENDPOINT) and the token (HF_TOKEN, or
what `hf auth login` has kept) from where it always does; a token is in no argument and no file of
ours.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from lora_moe_rl.errors import ConfigError, ExportError


def check_name(repo: str) -> None:
    """Raises ConfigError for what is not the name of a repository."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub {repo}: {error}") from error
    if repo.count("/") != 1:
        raise ConfigError(f"--push-to-hub {repo} names no owner: write OWNER/NAME")


def push(directory: Path, repo: str, public: bool) -> str:
    """Makes the repository, if there is none, and puts all files of `directory` there in one
    commit. Returns its address. Raises ExportError, with the command that does it later, when it is
    not done: what was exported stays."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        raise _not_pushed(directory, repo, public, "HF_HUB_OFFLINE is set")
    if get_token() is None:
        why = "there is no token: log in with `hf auth login`, or set HF_TOKEN"
        raise _not_pushed(directory, repo, public, why)
    try:
        api = HfApi()
        address = api.create_repo(repo, private=not public, exist_ok=True)
        _check_visible(directory, repo, public, bool(api.repo_info(repo).private))
        message = "Written by lora_moe_rl"
        api.upload_folder(repo_id=repo, folder_path=directory, commit_message=message)
    except ExportError:
        raise
    except Exception as error:  # some twenty kinds: no network, no right, no room
        raise _not_pushed(directory, repo, public, f"{error}") from error
    return str(address)


def _check_visible(directory: Path, repo: str, public: bool, private: bool) -> None:
    """Raises ExportError for a repository that was there and is not as visible as was asked for,
    which pushing does not change."""
    if private and public:
        why = "it is there already, and is private: leave out --public, or make it public first"
        raise _not_pushed(directory, repo, False, why)
    if not private and not public:
        why = "it is there already, and is public: give --public for that"
        raise _not_pushed(directory, repo, True, why)


def _not_pushed(directory: Path, repo: str, public: bool, why: str) -> ExportError:
    visible = "--no-private" if public else "--private"
    command = shlex.join(["hf", "upload", repo, str(directory), ".", visible])
    return ExportError(
        f"{directory} is written, and was not pushed to {repo}: {why}; to push it later: {command}"
    )
