"""Which of many unit features lie near each other: clusters, and near-duplicates inside them.

n: samples, K: clusters, D: feature width. `load` reads the features (n, D) of samples; those of one cluster are in
memory at a time, apart from a few numbers for each sample.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipscale.common.terminal import tracked

Load = Callable[[Tensor], Tensor]
# Most cosines that are computed at once.
CELLS = 1 << 24
# Most samples from which the clusters are found.
TRAINED = 1 << 17
# Of k-means.
ROUNDS = 10
# Clusters of a sample in which its near-duplicates are looked for: some lie across a border.
PROBES = 2


def nearest_clusters(load: Load, samples: Tensor, count: int) -> Tensor:
    """(n, at most PROBES) the clusters whose centres are nearest to each sample, by spherical k-means."""
    trained = load(samples[torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))[:TRAINED]])
    centres = trained[:count]
    step = max(1, CELLS // count)
    for _ in range(ROUNDS):
        own = torch.cat([(rows @ centres.T).argmax(1) for rows in trained.split(step)])
        centres = normalize(torch.zeros_like(centres).index_add_(0, own, trained))
    blocks = tracked(samples.split(step), "assigning clusters", -(-len(samples) // step))
    return torch.cat([(load(block) @ centres.T).topk(min(PROBES, len(centres))).indices.cpu() for block in blocks])


def near_duplicates(load: Load, samples: Tensor, clusters: Tensor, cosine: float) -> tuple[Tensor, Tensor]:
    """By number the largest cosine of a sample with an earlier one that is kept, or 0, and the number of that one.

    samples: the preferred ones first. clusters: their `nearest_clusters`. One with a cosine of at least `cosine` is a
    duplicate, and is not kept: of samples that are all near each other the first stays.
    """
    largest = torch.zeros(int(samples.max()) + 1)
    nearest = torch.arange(len(largest))
    ordered = samples[clusters.flatten().argsort(stable=True) // clusters.shape[1]]
    groups = ordered.split(clusters.flatten().bincount().tolist())
    for group in tracked(groups, "comparing inside clusters", len(groups)):
        group = group[largest[group] < cosine]
        features = load(group)
        kept = torch.ones(len(group), dtype=torch.bool, device=features.device)
        step = max(1, CELLS // max(1, len(group)))
        for first in range(0, len(group), step):
            last = first + step
            cosines = (features[first:last] @ features[:last].T).tril(first - 1)
            settled = False
            while not settled:  # one more of the block is right each time, and nearly always all at once
                stays = ((cosines < cosine) | ~kept[:last]).all(1)
                settled = torch.equal(stays, kept[first:last])
                kept[first:last] = stays
            values, at = (found.cpu() for found in (cosines * kept[:last]).max(1))
            nearer = values > largest[group[first:last]]
            changed = group[first:last][nearer]
            largest[changed] = values[nearer]
            nearest[changed] = group[at[nearer]]
    return largest, nearest
