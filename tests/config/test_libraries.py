"""The names in the libraries' files are the libraries' own."""

import open_clip
import timm.optim

from clipscale.config.libraries import architectures, optimizers, pretrained_tags


def test_names_are_those_of_the_libraries() -> None:
    assert architectures() == sorted(open_clip.list_models())
    assert pretrained_tags() == sorted({tag for _, tag in open_clip.list_pretrained()})
    assert {*timm.optim.list_optimizers()} <= {*optimizers()}
