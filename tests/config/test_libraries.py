"""The names in the libraries' files are the libraries' own."""

from clipscale.config import libraries
from clipscale.config.sections import SHARDABLE_OPTIMIZERS


def test_all_names_of_the_libraries_are_found_without_them() -> None:
    assert all(libraries.model_description(name) for name in libraries.architectures())
    assert set(SHARDABLE_OPTIMIZERS) < set(libraries.optimizers())
    left = {*libraries.optimizers()} - {*libraries.optimizers_to_complete()}
    assert all(name.startswith(("bnb", "nesterov")) for name in left), left
