"""The objectives of `contrastive_loss` and of the setting `loss.objective`. Imports no torch.

docs/contributing/how-to-add.md says how to add one. `Distillation` is not in OBJECTIVES: it is made for
each call, with that call's teachers (distillation/distillation_objective.py).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from clipscale.loss.exchange import Exchange
    from clipscale.loss.inputs import Inputs
    from clipscale.loss.runtime import LossRuntime
    from clipscale.loss.tile import TileOps


@dataclass(frozen=True)
class Objective:
    """A loss function: its formula, and what is needed to compute it. OBJECTIVES has one for each name."""

    # (a, b): the weights of the mean cross-entropy from image to text, and from text to image. None leaves that
    # direction out.
    direction_weights: tuple[float | None, float | None] = (None, None)
    # Whether each pair adds to the loss by itself. Then one sweep, in the forward pass, computes value and gradients.
    # If not, a first sweep collects the log-sum-exps of the rows and columns that have a weight.
    is_pairwise: bool = True
    # Whether the loss takes a logit bias, which is trained.
    needs_bias: bool = False
    # The backend with its Triton kernels for the dot product, as "module:Class"; None if there is none.
    triton_backend: str | None = None
    # The public function that computes it, for messages.
    function_name: str = "contrastive_loss"

    @property
    def is_symmetric(self) -> bool:
        """Whether it is the mean of a softmax over rows and the same over columns.

        Then `Distillation` can compute it together with the teachers' loss, as one softmax with mixed targets.
        """
        return self.direction_weights == (0.5, 0.5)

    @property
    def reads_hard_negatives(self) -> bool:
        """Whether hard negatives change the loss. `softmax_text` compares each text with images only: there they do
        not."""
        return self.direction_weights != (None, 1.0)

    @property
    def num_sweeps(self) -> int:
        """How often a training step computes all scores."""
        return 1 if self.is_pairwise else 2

    def prepare(self, inputs: "Inputs", exchange: "Exchange", runtime: "LossRuntime") -> "Inputs":
        """The inputs with what the sweeps need beside features. A collective. The base class adds nothing."""
        return inputs

    def target_inputs_by_name(self, inputs: "Inputs") -> "dict[str, Tensor]":
        """The tensors of which the targets are computed, by their names in errors. The base class has none."""
        return {}

    def dense_loss(self, scores: "Tensor", is_positive: "Tensor", paired: int) -> "Tensor":
        """The loss by its formula, from all scores at once; `loss/reference.py` uses it.

        `scores`: (N, M), -inf where a pair is left out. `is_positive`: (N, M) bool. The first `paired` texts belong to
        an image.
        """
        raise NotImplementedError

    def make_tile_ops(self) -> "TileOps":
        """The objective's two functions of a tile of scores, in torch."""
        raise NotImplementedError


@dataclass(frozen=True)
class Softmax(Objective):
    """Cross-entropy of an image's text among all texts, of a text's image among all images, or of both.

    L = sum_i a_i (r_i - x_ii) + sum_j b_j (c_j - x_jj): CLIP, arXiv 2103.00020. r and c are the log-sum-exps of rows
    and columns, a and b are `direction_weights` / N. Several positives: the outer form of SupCon, arXiv 2004.11362,
    eq. 2.
    """

    is_pairwise: bool = False
    triton_backend: str | None = "clipscale.loss.softmax.kernel:TritonSoftmax"

    def dense_loss(self, scores: "Tensor", is_positive: "Tensor", paired: int) -> "Tensor":
        value = scores.new_zeros(())
        image_weight, text_weight = self.direction_weights
        directions = [
            (image_weight, scores, is_positive),
            (text_weight, scores.T[:paired], is_positive.T[:paired]),
        ]
        for weight, x, mask in directions:
            if weight is not None:
                target = x.masked_fill(~mask, 0).sum(1) / mask.sum(1)
                value = value + weight * (x.logsumexp(1) - target).mean()
        return value

    def make_tile_ops(self) -> "TileOps":
        from clipscale.loss.softmax.tile import SoftmaxTileOps

        return SoftmaxTileOps()


@dataclass(frozen=True)
class Sigmoid(Objective):
    """Binary cross-entropy of every pair: whether its image and text belong together.

    L = sum_ij softplus(-z_ij (x_ij + bias)) / N, where z is 1 at the positives and -1 elsewhere: SigLIP, arXiv
    2303.15343.
    """

    needs_bias: bool = True
    triton_backend: str | None = "clipscale.loss.sigmoid.kernel:TritonSigmoid"

    def dense_loss(self, scores: "Tensor", is_positive: "Tensor", paired: int) -> "Tensor":
        """`scores`: with the bias. A pair that is left out adds softplus(-inf) = 0."""
        return scores.where(~is_positive, -scores).logaddexp(scores.new_zeros(())).sum() / len(scores)

    def make_tile_ops(self) -> "TileOps":
        from clipscale.loss.sigmoid.tile import SigmoidTileOps

        return SigmoidTileOps()


OBJECTIVES: dict[str, Objective] = {
    "softmax": Softmax((0.5, 0.5)),
    "softmax_image": Softmax((1.0, None)),
    "softmax_text": Softmax((None, 1.0)),
    "sigmoid": Sigmoid(),
}
