"""Finds a target: a local folder, or a repository of the Hugging Face hub, whose files huggingface_hub keeps.

huggingface_hub's own settings apply: HF_HOME (where downloads are kept), HF_HUB_OFFLINE=1 (use only what is kept), and
the token of HF_TOKEN or `hf auth login` (for gated and private repositories).
"""

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from dflash_lib.target.errors import TargetError

# What loading needs. Folders inside a repository hold other formats of the same weights (gpt-oss: original/, metal/).
FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
NOT_FILES = ("*/*", "consolidated*.safetensors")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: Path | str) -> bool:
    """Whether a name has the form `organisation/repository` and no folder of that name is here."""
    return isinstance(name, str) and bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()


def find_target(path_or_hub_id: Path | str, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """The local folder of a target; a hub repository is downloaded first, unless its files are here already.

    revision: branch, tag or commit of a hub repository (None = its main branch); the folder's name is the commit. With
    `trust_remote_code` the repository's Python files come, too. Raises TargetError for a folder that does not exist, a
    revision of a local folder, and for each way in which the hub refuses: no network, offline and not downloaded,
    gated or private, no such repository or revision.
    """
    if not isinstance(path_or_hub_id, str | Path) or not str(path_or_hub_id):
        raise TargetError(f"{path_or_hub_id!r} is no model folder and no hub id (organisation/name)")
    if not is_hub_id(path_or_hub_id):
        path = Path(path_or_hub_id)
        if not path.is_dir():
            raise TargetError(f"{path}: no such model folder (and no hub id, which has the form organisation/name)")
        if revision is not None:
            raise TargetError(f"{path}: a revision ({revision}) is for hub ids; this is a local folder")
        if (path / "adapter_config.json").is_file():
            raise TargetError(f"{path}: holds an adapter (adapter_config.json), which would not be loaded, or would "
                              "change what is. Merge it into its model, save that, and give that folder.")
        return path
    where = f"{path_or_hub_id}{f' at revision {revision}' if revision else ''} (no folder here, so taken as a hub id)"
    try:
        return Path(huggingface_hub.snapshot_download(
            path_or_hub_id, revision=revision, allow_patterns=[*FILES, *(["*.py"] if trust_remote_code else [])],
            ignore_patterns=list(NOT_FILES), local_files_only=constants.HF_HUB_OFFLINE))
    except GatedRepoError as error:  # a RepositoryNotFoundError, too: first
        raise TargetError(f"{where}: gated. Accept its conditions on its hub page, then give a token of that account: "
                          "`hf auth login`, or HF_TOKEN in the environment.") from error
    except RepositoryNotFoundError as error:
        raise TargetError(f"{where}: the hub has no such repository, or it is private and your token (`hf auth login` "
                          "or HF_TOKEN) may not see it.") from error
    except RevisionNotFoundError as error:
        raise TargetError(f"{where}: the repository has no such branch, tag or commit") from error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise TargetError(f"{where}: not (wholly) in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE=1 forbids to "
                              "download it. Unset HF_HUB_OFFLINE, point HF_HOME at the folder that has it, or give a "
                              f"local folder. ({_first_line(error)})") from error
        raise TargetError(f"{where}: not (wholly) in {constants.HF_HUB_CACHE}, and the hub cannot be reached "
                          f"({_first_line(error.__cause__ or error)}). Check the network, or download it on another "
                          "machine (`hf download`) and give the folder.") from error
    except (HfHubHTTPError, OSError) as error:
        raise TargetError(f"{where}: the download failed ({_first_line(error)}). Run it again: files that are whole "
                          "are kept.") from error


def find_cached(hub_id: str) -> Path | None:
    """The folder of `organisation/repository` or `organisation/repository@revision` in the hub's cache, when its
    config.json and weights (or their index) are there; None otherwise, and for names of another form. Nothing is
    downloaded."""
    name, _, revision = hub_id.partition("@")
    if not is_hub_id(name):
        return None
    for weights in ("model.safetensors", "model.safetensors.index.json"):
        found = [huggingface_hub.try_to_load_from_cache(name, file, revision=revision or None)
                 for file in ("config.json", weights)]
        if all(isinstance(file, str) for file in found):
            return Path(found[0]).parent
    return None


def hub_name(path: Path) -> tuple[str, str | None]:
    """Name and revision of a target's folder: `organisation/repository` and commit of a downloaded one, else the
    folder's own name and None."""
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1), path.name
    return path.name, None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
