"""The results that settings name."""

from clipscale.eval.goals import check_goal
from tests.support.user_errors import refused


def test_a_goal_means_one_evaluated_set() -> None:
    check_goal("checkpoint.best", "holdout/loss", ["objects", "shop/holdout (limit 9)"])
    with refused(r"checkpoint\.best=holdout/loss: several such sets are evaluated; .* of shop/holdout, zoo/holdout"):
        check_goal("checkpoint.best", "holdout/loss", ["shop/holdout", "objects", "zoo/holdout"])
    with refused(r"sweep\.metric=birds/top1: no such set is evaluated; .* of objects"):
        check_goal("sweep.metric", "birds/top1", ["objects"])
