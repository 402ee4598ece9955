"""The results that settings name."""

from clipscale.common.goal import Goal
from tests.support.user_errors import refused


def test_a_goal_means_one_evaluated_set() -> None:
    holdout = Goal("holdout", "loss")
    holdout.check_evaluated("checkpoint.best", ["objects", "shop/holdout (limit 9)"])
    with refused(r"checkpoint\.best=holdout/loss: several such sets are evaluated; .* of shop/holdout, zoo/holdout"):
        holdout.check_evaluated("checkpoint.best", ["shop/holdout", "objects", "zoo/holdout"])
    with refused(r"sweep\.metric=birds/top1: no such set is evaluated; .* of objects"):
        Goal("birds", "top1").check_evaluated("sweep.metric", ["objects"])
