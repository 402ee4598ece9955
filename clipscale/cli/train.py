"""The verb `train`: checks the settings, renders a missing demo set, plans the run on this machine, and starts it."""

from pathlib import Path
from typing import Any

from clipscale.config.eval import check_places
from clipscale.config.train import TrainConfig, settled
from clipscale.data.loader.fork_server import warm_up
from clipscale.launch import local


def dry_check(config: TrainConfig) -> None:
    """The same checks, where no run begins: nothing is rendered."""
    from clipscale.data.shards import listing
    from clipscale.tools.data.demo import is_missing

    local.check_train(config)
    if not local.under_torchrun() and not is_missing(config.data.train or ()):
        listing.check_local(config.data)
        check_places(config.eval)


def check(config: TrainConfig) -> None:
    """Every check that needs no torch, local shards among them. Raises UserError, prints warnings."""
    local.check_train(config)
    if local.under_torchrun():  # there all ranks find missing shards together
        return
    from clipscale.data.shards import listing
    from clipscale.tools.data.demo import render_missing

    render_missing(config.data.train or ())
    listing.check_local(config.data)
    check_places(config.eval)


def main(config: TrainConfig, *, isolated: bool = False) -> dict[str, Any]:
    """Say whether the run fits this machine, then start it. torchrun's workers start without a plan.

    `isolated`: in processes of its own, also if it is one. Raises as `launch.local.run` does, and UserError for a run
    that cannot fit.
    """
    config = settled(config)
    if not isolated and config.data.workers != 0:
        warm_up()  # beside the imports of planning and training
    if config.plan and not local.under_torchrun():
        from clipscale.launch.run_lock import check_free
        from clipscale.tools.plan.of_run import before

        check_free(Path(config.run))
        before(config, local.workers(config))
    return local.run(config, isolated=isolated)
