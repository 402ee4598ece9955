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
# Rounds of k-means.
ROUNDS = 10
# Clusters of a sample in which its near-duplicates are looked for: some lie across a border.
PROBES = 2


def nearest_clusters(load: Load, samples: Tensor, count: int) -> Tensor:
    """(n, at most PROBES) the clusters whose centres are nearest to each sample, by spherical k-means."""
    trained = load(samples[torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))[:TRAINED]])
    centres = trained[:count]
    step = max(1, CELLS // count)
    for _ in range(ROUNDS):
        nearest_centre = torch.cat([(rows @ centres.T).argmax(1) for rows in trained.split(step)])
        centres = normalize(torch.zeros_like(centres).index_add_(0, nearest_centre, trained))
    blocks = tracked(samples.split(step), "assigning clusters", -(-len(samples) // step))
    return torch.cat([(load(block) @ centres.T).topk(min(PROBES, len(centres))).indices.cpu() for block in blocks])


def near_duplicates(load: Load, samples: Tensor, clusters: Tensor, cosine: float) -> tuple[Tensor, Tensor]:
    """For each sample, by its number: its largest cosine with an earlier kept sample, and that sample's number.

    The cosine is 0 if no earlier kept sample is in its clusters. A sample with a cosine of at least `cosine` is a
    duplicate, and not kept. Of samples that are all near each other the first stays.

    samples: numbers, the preferred ones first. clusters: their `nearest_clusters`.
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
            stop = first + step
            cosines = (features[first:stop] @ features[:stop].T).tril(first - 1)
            settled = False
            while not settled:  # each round settles at least one more sample of the block, usually all
                stays = ((cosines < cosine) | ~kept[:stop]).all(1)
                settled = torch.equal(stays, kept[first:stop])
                kept[first:stop] = stays
            values, indices = (tensor.cpu() for tensor in (cosines * kept[:stop]).max(1))
            nearer = values > largest[group[first:stop]]
            changed = group[first:stop][nearer]
            largest[changed] = values[nearer]
            nearest[changed] = group[indices[nearer]]
    return largest, nearest
