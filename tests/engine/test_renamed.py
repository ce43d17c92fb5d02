"""Names of 0.1 work for one more version, with a warning that names the new one."""

import pytest

import zero


def test_a_module_that_is_two_now_has_the_names_of_both() -> None:
    with pytest.warns(DeprecationWarning, match=r"zero.step is zero.engine.init and zero.engine.step now"):
        import zero.step as old  # type: ignore[import-not-found]
    assert old.open_store is zero.open_store
    assert old.make_step is zero.make_step
