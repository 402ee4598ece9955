"""The names in the libraries' files are the libraries' own."""

import pytest

from clipscale.config import libraries
from clipscale.config.sections import SHARDABLE_OPTIMIZERS


def test_all_names_of_the_libraries_are_found_without_them() -> None:
    assert all(libraries.model_description(name) for name in libraries.architectures())
    assert set(SHARDABLE_OPTIMIZERS) < set(libraries.optimizers())
    left = {*libraries.optimizers()} - {*libraries.optimizers_in_file()}
    assert all(name.startswith(("bnb", "nesterov")) for name in left), left


def test_an_optimizer_is_known_by_the_library_wherever_its_name_is(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [name for name in [*libraries.optimizers(), "adamww", "betas"] if libraries.has_optimizer(name)]
    assert known == libraries.optimizers()
    monkeypatch.setattr(libraries, "_factory", lambda: "")  # of another version
    assert libraries.has_optimizer("lamb") and not libraries.has_optimizer("adamww")
