"""Choose the frozen parameters that are stored as codes, and make their codes.

By default these are matrices (2 dimensions or more), because they are nearly all bytes of a model. Embeddings and the
head stay in the dtype of compute, because errors in a row reach the loss without a sum over other rows. The head is the
last matrix with the shape of the largest embedding; there is none if that embedding is tied.
"""

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from math import prod

from torch import Tensor, nn

from zero.core.formats import PackedFormat
from zero.core.precision import Precision
from zero.core.suggest import meant, some
from zero.engine.model.split import embedding_ids
from zero.errors import PlanError
from zero.platform.safetensors_files import RangedWeights


def packed_names(model: nn.Module, precision: Precision) -> frozenset[str]:
    """Return the full names of the parameters that are stored as codes.

    Raises:
        PlanError: nothing is frozen; or a pattern of `precision.coded` matches no parameter, or only parameters that
            train.
    """
    if precision.frozen is None:
        return frozenset()
    parameters = dict(model.named_parameters())
    first = {id(parameter): name for name, parameter in parameters.items()}
    names = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad and parameter.numel()}
    chosen = set[str]() if precision.coded else frozen_matrices(model)
    if not (chosen or precision.coded):
        raise PlanError(
            f"precision.frozen={precision.frozen.name}: the model has no frozen matrix. Freeze the base with "
            "requires_grad_(False) or model.lora.rank=16, or set precision.frozen=compute."
        )
    for pattern in precision.coded:
        fitting = {names[alias] for alias in names if fnmatchcase(alias, pattern)}
        if not fitting:
            raise PlanError(f"precision.coded: no parameter is named {pattern}{meant(pattern, names)}")
        if fitting.isdisjoint(frozen):
            raise PlanError(
                f"precision.coded: {some(sorted(fitting))} would be stored as codes, but trains. Freeze it with "
                "requires_grad_(False), or remove the pattern."
            )
        chosen |= fitting & frozen
    return frozenset(chosen)


def frozen_matrices(model: nn.Module) -> set[str]:
    """Return the full names of the parameters that are stored as codes by default."""
    parameters, tables = dict(model.named_parameters()), embedding_ids(model)
    head = _head(model, parameters, tables)
    return {
        name
        for name, parameter in parameters.items()
        if not parameter.requires_grad and parameter.numel() and parameter.dim() > 1
        if id(parameter) not in tables and name != head
    }


def _head(model: nn.Module, parameters: Mapping[str, Tensor], tables: Collection[int]) -> str | None:
    """Return the name of the head: the last matrix with the shape of the largest embedding; None if that is tied."""
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
    largest = max(embeddings, key=lambda module: module.num_embeddings, default=None)
    if largest is None:
        return None
    others = (module for module in model.modules() if not isinstance(module, nn.Embedding))
    if any(parameter is largest.weight for module in others for parameter in module._parameters.values()):
        return None
    shaped = [name for name, parameter in parameters.items() if parameter.shape == largest.weight.shape]
    return next((name for name in reversed(shaped) if id(parameters[name]) not in tables), None)


class CodedWeights(RangedWeights):
    """First values for `zero.init`, some of which are codes that are taken over as they are.

    Args:
        form: the format of the codes.
        codes: name of a parameter -> its codes, (`form.nbytes(n)`,) uint8.
        tensors: all other weights, by name.
        shapes: the shapes of the parameters that have codes, by name.

    As a mapping it has the values of all parameters.
    """

    def __init__(
        self,
        form: PackedFormat,
        codes: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.form, self.codes, self._tensors, self._shapes = form, codes, tensors, shapes

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, 0, prod(self.shape(name))).view(self.shape(name))

    def __iter__(self) -> Iterator[str]:
        return iter((*self.codes, *self._tensors))

    def __len__(self) -> int:
        return len(self.codes) + len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.codes or name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name] if name in self.codes else tuple(self._tensors[name].shape)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self.codes:
            return self._tensors[name].reshape(-1)[start:stop]
        codes = self.codes[name]
        return self.form.values_of(lambda a, b: codes[a:b].cpu(), prod(self.shape(name)))(start, stop)


def codes_in(weights: object, form: PackedFormat | None, names: Collection[str]) -> Mapping[str, Tensor]:
    """Return the codes of `CodedWeights` by name, and none of other weights.

    Args:
        form, names: the format of a plan's codes, and the parameters that have them.

    Raises:
        PlanError: the plan does not keep one of the codes as it is.
    """
    if not isinstance(weights, CodedWeights):
        return {}
    left = [name for name in weights.codes if form != weights.form or name not in names]
    if left:
        raise PlanError(
            f"weights have {some(left)} in {weights.form.name}, but the plan does not. Give zero.Plan "
            f'precision=zero.Precision("bf16", frozen="{weights.form.name}", coded=list(weights.codes)).'
        )
    return weights.codes
