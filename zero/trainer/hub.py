"""Models and datasets of Hugging Face's hub, by their names, through its own libraries and their caches.

Where there is no network, only what the caches have is read. Does not import torch.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from zero.errors import ConfigError, in_short
from zero.platform.installed import require_hf

BESIDE = ("*.json", "*.model", "*.txt", "*.jinja")
"""Patterns of the files beside a model's weights: settings, tokenizer, templates."""

WEIGHTS = "*.safetensors"


def is_name(place: str) -> bool:
    """Return whether a place is a name such as org/model. A path that exists is none."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", place) is not None and not Path(place).exists()


@cache
def model_folder(name: str, *, weights: bool) -> Path:
    """Return the folder of the cache with a model's settings and tokenizer, and its weights if asked for.

    Raises:
        ConfigError: the hub cannot be read, or has no such model.
    """
    require_hf("huggingface_hub", f"model.path={name} needs")
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=[*BESIDE, *[WEIGHTS] * weights]))
    except Exception as error:  # of HTTP, of the hub, or of files
        raise _unread("model", name, "", error) from error
    if weights and not any(folder.glob(WEIGHTS)):
        raise _unread("model", name, "", FileNotFoundError("the cache has no safetensors of it"))
    return folder


@cache
def dataset(name: str) -> Any:
    """Return the split "train" of a dataset, in files of the cache.

    Raises:
        ConfigError: the hub cannot be read, or has no such dataset.
    """
    require_hf("datasets", f"data.path={name} needs")
    import datasets
    import huggingface_hub

    try:
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            huggingface_hub.dataset_info(name)  # fails at once without a network, and load_dataset after 25 s
        return datasets.load_dataset(name, split="train", keep_in_memory=False).with_format(None)
    except Exception as error:  # of HTTP, of the hub, or of a split
        raise _unread("data", name, " --repo-type dataset --include '*train*'", error) from error


def _unread(section: str, name: str, of_type: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{section}.path={name} is no path, and the hub cannot be read: {in_short(error)}. Where there is a network "
        f"type `hf download {name}{of_type} --local-dir {name}`."
    )
