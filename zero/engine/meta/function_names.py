"""Names of torch functions that a tensor subclass or a mode receives, and whether a function writes."""

from typing import Any


def requested(func: Any) -> tuple[str, bool]:
    """Return the name of the function or attribute, and whether `func` is an attribute's getter or setter."""
    is_attribute = func.__name__ in ("__get__", "__set__")
    return func.__self__.__name__ if is_attribute else func.__name__, is_attribute


def writes(name: str) -> bool:
    """Return whether torch's naming rule (`add_`, `__iadd__`) says that the function writes into its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NO_WRITERS)
    return name.partition(".")[0].endswith("_")  # the name of an overload of torch.ops follows a dot


_NO_WRITERS = ("__invert__", "__int__", "__index__", "__iter__")
