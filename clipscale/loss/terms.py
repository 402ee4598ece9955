"""The terms of a call. The loss of a call is the mean of its terms: `local` has two, every other exchange one.

Letters: P ranks; n rows (images) and m columns (texts) of this rank.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from clipscale.loss.choices import auto_exchange
from clipscale.loss.communicator import Communicator, broadcast_from_rank0
from clipscale.loss.exchange import Exchange, Gather, Ring
from clipscale.loss.inputs import Inputs
from clipscale.loss.objective import Objective
from clipscale.loss.runtime import LossRuntime
from clipscale.loss.similarity import DotProduct, Similarity


@dataclass(frozen=True)
class LossTerm:
    """An objective over some rows and columns. The exchange shares the columns among the ranks."""

    objective: Objective
    inputs: Inputs
    exchange: Exchange

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that get a gradient from this term, except for a similarity's parameters."""
        inputs = self.inputs
        return inputs.rows.features, inputs.cols.features, inputs.scale, inputs.bias


def make_terms(
    exchange_name: str,
    objective: Objective,
    inputs: Inputs,
    similarity: Similarity,
    comm: Communicator | None,
    runtime: LossRuntime,
) -> list[LossTerm]:
    """A collective: the terms of the exchange of this name. `comm`: None in a group of one."""
    # Without as many texts as images, or with a module, `replicated` and `local` are the same as `gather`.
    is_paired = isinstance(similarity, DotProduct) and inputs.is_paired
    if exchange_name == "replicated" and is_paired and comm is not None:
        return replicated_terms(objective, inputs, comm, runtime)
    if not objective.reads_hard_negatives:
        inputs = inputs.without_hard_negatives()
    exchange = make_exchange(exchange_name, inputs, comm, runtime)
    inputs = objective.prepare(inputs, exchange, runtime)
    if exchange_name == "local" and is_paired and objective.is_symmetric:
        return local_terms(objective, inputs, exchange)
    return [LossTerm(objective, inputs, exchange)]


def replicated_terms(objective: Objective, inputs: Inputs, comm: Communicator, runtime: LossRuntime) -> list[LossTerm]:
    """A collective: CLIP's one term, the whole loss on every rank."""
    inputs = objective.prepare(inputs.gather_over_ranks(comm), Exchange(), runtime)
    return [LossTerm(objective, inputs, Exchange())]


def local_terms(objective: Objective, inputs: Inputs, exchange: Exchange) -> list[LossTerm]:
    """OpenCLIP's two terms: this rank's images against all texts, and its texts against all images."""
    one_sided = replace(objective, direction_weights=(1.0, None))
    text_inputs = replace(inputs, rows=inputs.cols, cols=inputs.rows)
    return [LossTerm(one_sided, inputs, exchange), LossTerm(one_sided, text_inputs, exchange)]


def make_exchange(exchange_name: str, inputs: Inputs, comm: Communicator | None, runtime: LossRuntime) -> Exchange:
    """A collective: the exchange of this name; by default a gather."""
    if comm is None:
        return Exchange()
    nodes = runtime.num_nodes(comm.size)
    if runtime.ranks_of_node is None:  # other nodes may have other numbers of ranks
        assert comm.group is not None
        nodes = broadcast_from_rank0(comm.group, nodes, inputs.scale.device)
    if exchange_name == "auto":
        entries = comm.size * inputs.cols.features.numel()
        exchange_name = auto_exchange(nodes, entries, inputs.dtype.itemsize, runtime.is_gpu(inputs.scale.device))
    if exchange_name == "nodes" and nodes > 1:
        return Ring.between_nodes(comm, nodes, runtime.timeout)
    return Ring(comm) if exchange_name == "ring" else Gather(comm)
