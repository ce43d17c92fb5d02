"""A model in a folder of Hugging Face: built on meta, then read from its files under the model's names.

Names in a file may differ from the model's names, and a file may store one tensor of the model as several, as with the
experts of a Mixtral. Stored tensors are converted with transformers' own tables, one at a time.

Source: `transformers.core_model_loading`, which does this for a model in memory.
"""

import copy
import re
from collections.abc import Iterator
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zero.core import checks
from zero.core.peft_names import COPIES, plain_name
from zero.engine.meta import empty
from zero.errors import ConfigError, in_short
from zero.platform.installed import require_hf
from zero.platform.safetensors_files import RangedWeights, StoredWeights


def build(path: str | PathLike[str]) -> nn.Module:
    """Build a model on meta, of the class that its settings name, else of a causal language model.

    The key-value cache is off, because a recomputed forward would find it filled already.

    Args:
        path: a folder with config.json, or a model type such as "llama" with all its defaults, or a name in
            transformers' cache.

    Raises:
        ConfigError: transformers is not installed, or knows no such model.
    """
    transformers = _transformers()
    config = settings(path)
    config.use_cache = False
    name = next(iter(getattr(config, "architectures", None) or ()), None)
    build_class = getattr(transformers, name, None) if name else transformers.AutoModelForCausalLM.from_config
    if build_class is None:
        raise ConfigError(f"{path}: transformers {transformers.__version__} has no {name}. Upgrade transformers.")
    try:
        with empty():
            model: nn.Module = build_class(config)
    except (ValueError, KeyError) as error:  # no causal language model, sizes that do not divide
        raise ConfigError(f"{path}: {in_short(error)}") from error
    if (Path(path).expanduser() / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(str(Path(path).expanduser()))
    return model


def settings(path: str | PathLike[str]) -> Any:
    """Return the configuration object of transformers for a model.

    Raises:
        ConfigError: see `build`.
    """
    transformers = _transformers()
    checks.instance("path", path, str | PathLike, "Pass a folder with config.json, or a model type.")
    folder = Path(path).expanduser()
    if not folder.is_dir() and str(path) in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(str(path))
    if not folder.is_dir() and (str(path).startswith(("/", ".", "~")) or str(path).count("/") > 1):
        raise ConfigError(f"{path} does not exist. Give a folder with config.json, or a model type.")
    try:
        where = str(folder if folder.is_dir() else path)
        return transformers.AutoConfig.from_pretrained(where, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: transformers cannot read this model: {in_short(error)}") from error


class HFWeights(RangedWeights):
    """Stored tensors by the model's names. A tensor is read, and converted if necessary, when it is accessed.

    Attributes:
        unused: names in the files for which the model has no tensor, except names that its class ignores.
        fresh: names of the parameters that peft has added to the model, except copies of modules.
    """

    def __init__(self, model: nn.Module, stored: StoredWeights) -> None:
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        adapters = frozenset(getattr(model, "peft_config", ()))
        tensors = model.state_dict(keep_vars=True)
        plain = {name: plain_name(name, adapters) for name in tensors}
        model = getattr(model, "get_base_model", lambda: model)()  # the base of a PeftModel
        known, prefix = dict.fromkeys(plain.values(), True), getattr(model, "base_model_prefix", None)
        table = get_model_conversion_mapping(model)
        renamings = [entry for entry in table if isinstance(entry, loading.WeightRenaming)]
        converters = [entry for entry in table if isinstance(entry, loading.WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        self._model, self._stored = model, stored
        self._sources: dict[str, list[tuple[str, str]]] = {}
        self._converters: dict[str, Any] = {}
        self._first: dict[str, str] = {}
        self._last: tuple[str, dict[str, Tensor]] | None = None
        ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        unused = []
        for key in sorted(stored, key=loading.dot_natural_key):  # sorts experts by number
            name, pattern = loading.rename_source_key(key, renamings, converters, prefix, known)
            if name not in known and key in known:
                name, pattern = key, None
            if name not in known:
                unused += [] if any(pattern.search(name) for pattern in ignored) else [key]
                continue
            self._sources.setdefault(name, []).append((pattern or key, key))
            for target in by_pattern[pattern].target_patterns if pattern else (name,):
                first = by_pattern[pattern].target_patterns[0] if pattern else name
                self._first.setdefault(name.replace(first, target), name)
            if pattern:
                self._converters[name] = by_pattern[pattern]
        self.unused = tuple(unused)
        in_files = {id(tensors[name]): base_name for name, base_name in plain.items() if base_name in self._first}
        tied = {plain[name]: in_files[id(tensor)] for name, tensor in tensors.items() if id(tensor) in in_files}
        stored_as = tied | {name: name for name in self._first}
        self._plain = {name: stored_as[base_name] for name, base_name in plain.items() if base_name in stored_as}
        new = {name for name in tensors if not adapters.isdisjoint(parts := name.split(".")) and COPIES not in parts}
        self.fresh = frozenset(new - self._plain.keys())

    def __getitem__(self, name: str) -> Tensor:
        name = self._plain[name]
        first = self._first[name]
        if first not in self._converters:
            return self._stored[self._key(first)]
        if self._last is None or self._last[0] != first:
            self._last = None  # freed before the next tensors are made
            self._last = first, self._translated(first)
        return self._last[1][name]

    def shape(self, name: str) -> tuple[int, ...]:
        first = self._first[self._plain[name]]
        return tuple(self[name].shape) if first in self._converters else self._stored.shape(self._key(first))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        first = self._first[self._plain[name]]
        if first in self._converters:
            return self[name].reshape(-1)[start:stop]
        return self._stored.read(self._key(first), start, stop)

    def _key(self, first: str) -> str:
        """Return the name in the files of a tensor that needs no conversion."""
        return self._sources[first][0][1]

    def __contains__(self, name: object) -> bool:
        return name in self._plain  # the method of Mapping would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)

    def __str__(self) -> str:
        keys = [key for sources in self._sources.values() for _, key in sources]
        nbytes = sum(map(self._stored.nbytes, keys))
        return f"weights of {self._stored.path}: {len(keys)} tensors, {nbytes:,} bytes"

    def _translated(self, first: str) -> dict[str, Tensor]:
        converter = copy.deepcopy(self._converters[first])
        for pattern, key in self._sources[first]:
            converter.add_tensor(first, key, pattern, partial(self._stored.__getitem__, key))
        tensors = converter.convert(first, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}


def weights(model: nn.Module, path: str | PathLike[str]) -> HFWeights:
    """Return the weights of a folder or file by the names in `model`, for `zero.init(weights=...)`.

    `str` of the result is a line with the number of tensors and their bytes.

    Raises:
        PlanError, CheckpointError: as `StoredWeights`.
    """
    return HFWeights(model, StoredWeights(Path(path).expanduser()))


def _transformers() -> Any:
    require_hf("transformers", "models of Hugging Face need")
    import transformers

    return transformers
