"""The images hold what the README promises. They are read here, not built."""

import re

import pytest

from clipscale.config.presets import PACKAGE

CHECKOUT = PACKAGE.parent


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_an_image_reads_every_kind_of_storage(name: str) -> None:
    text = (CHECKOUT / "docker" / name).read_text()
    (extras,) = re.findall(r'pip install .* "\.\[(.*)\]"', text)
    assert set(extras.split(",")) == {"s3", "gs"}


def test_the_gpu_image_has_what_nccl_loads_for_infiniband() -> None:
    text = (CHECKOUT / "docker/Dockerfile").read_text()
    (packages,) = re.findall(r"apt-get install --yes --no-install-recommends (.*) \\\n", text)
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(packages.split())
