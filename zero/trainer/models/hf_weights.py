"""The stored weights of a model of transformers, read under the model's names.

Names in a file may differ from the model's names, and a file may store one tensor of the model as several, as with the
experts of a Mixtral. Stored tensors are converted with transformers' own tables, one at a time.

Source: `transformers.core_model_loading`, which does this for a model in memory.
"""

import copy
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from zero.core.peft_names import COPIES, plain_name
from zero.platform.safetensors_files import RangedWeights, StoredWeights


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
