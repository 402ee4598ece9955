"""The exchanges and backends that `contrastive_loss` and the settings `loss.*` take, and what `auto` stands for.

Imports no torch. docs/contributing/how-to-add.md says how to add an exchange.
"""

EXCHANGES = ("auto", "replicated", "local", "gather", "ring", "nodes")
BACKENDS = ("auto", "dense", "tiled", "triton")
# Across nodes `auto` gathers if the texts of all ranks and their gradients take at most this much memory.
GATHER_BYTES = 5 << 30
# Within a node of GPUs `auto` gathers if they take at most this much memory. It suffices for 64 MiB of texts in half
# precision and 128 MiB of their gradients.
SMALL_GATHER_BYTES = 192 << 20
# A ring of more ranks takes no more memory on a rank.
MAX_RING_RANKS = 4


def auto_exchange(nodes: int, entries: int, itemsize: int, on_gpu: bool) -> str:
    """The name of the exchange that `auto` stands for. `entries`: of the texts' features of all ranks.

    Within a node it is a ring, which takes the least memory. But GPUs gather a small batch: a ring's blocks would take
    longer to launch than to compute. Across nodes a ring in rank order would send all texts through one network card
    per node. A gather uses all cards, and is taken if its memory is small: a million texts of 768 numbers in half
    precision take 4.5 GiB with their float32 gradients. Otherwise it is `nodes`, whose rings use all cards, too.
    """
    if nodes > 1:
        limit = GATHER_BYTES
    elif on_gpu:
        limit = SMALL_GATHER_BYTES
    else:
        limit = 0
    if entries * (itemsize + 4) <= limit:
        return "gather"
    return "nodes" if nodes > 1 else "ring"


def num_simulated_ranks(exchange_name: str, world_size: int, ranks_of_node: int) -> int:
    """How many ranks a dry run of the loss has, to take as much memory on a rank as with `world_size` ranks.

    Columns that travel are on a rank only a few at a time, so further ranks or nodes take no more memory.
    """
    most = {"ring": MAX_RING_RANKS, "nodes": 2 * ranks_of_node}
    return min(world_size, most.get(exchange_name, world_size))
