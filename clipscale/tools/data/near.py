"""Finds which of many unit features lie near each other: clusters, and near-duplicates inside them.

n: samples, K: clusters, D: feature width. `load` reads the features (n, D) of samples. The features of one cluster are
in memory at a time, and a few numbers for each sample.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipscale.common.terminal import tracked

Load = Callable[[Tensor], Tensor]
# Most cosines that are computed at once.
MAX_COSINES = 1 << 24
# Most samples from which the clusters are found.
MAX_TRAINING_SAMPLES = 1 << 17
# Rounds of k-means.
KMEANS_ROUNDS = 10
# A sample's near-duplicates are looked for in this many clusters, because some lie across a border.
PROBES = 2


def nearest_clusters(load: Load, samples: Tensor, count: int) -> Tensor:
    """Spherical k-means. Returns the clusters whose centres are nearest to each sample, (n, at most PROBES)."""
    shuffled = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
    trained = load(samples[shuffled[:MAX_TRAINING_SAMPLES]])
    centres = trained[:count]
    step = max(1, MAX_COSINES // count)
    for _ in range(KMEANS_ROUNDS):
        nearest_centre = torch.cat([(rows @ centres.T).argmax(1) for rows in trained.split(step)])
        centres = normalize(torch.zeros_like(centres).index_add_(0, nearest_centre, trained))
    blocks = tracked(samples.split(step), "assigning clusters", -(-len(samples) // step))
    return torch.cat([(load(block) @ centres.T).topk(min(PROBES, len(centres))).indices.cpu() for block in blocks])


def near_duplicates(load: Load, samples: Tensor, clusters: Tensor, cosine: float) -> tuple[Tensor, Tensor]:
    """For each sample, by its number: its largest cosine with a kept sample before it, and that sample's number.

    The cosine is 0 if no kept sample before it is in its clusters. A sample with a cosine of at least `cosine` is a
    duplicate, and not kept; the sample of which it is one is kept. Among samples that are all near each other the first
    stays.

    samples: numbers, the preferred ones first. clusters: their `nearest_clusters`.
    """
    largest = torch.zeros(int(samples.max()) + 1)
    nearest = torch.arange(len(largest))
    clusters_in_a_row = clusters.flatten()
    ordered = samples[clusters_in_a_row.argsort(stable=True) // clusters.shape[1]]
    groups = ordered.split(clusters_in_a_row.bincount().tolist())
    for group in tracked(groups, "comparing inside clusters", len(groups)):
        compare(load, group[largest[group] < cosine], cosine, largest, nearest)
    # The sample that a duplicate was compared with may have become one in a later cluster. Compare such a duplicate
    # again, after the kept samples. Each round settles at least the first of them.
    is_duplicate = largest >= cosine
    is_open = is_duplicate & is_duplicate[nearest]
    while is_open.any():
        largest[is_open] = 0
        nearest[is_open] = torch.arange(len(largest))[is_open]
        for group in tracked(groups, f"comparing {int(is_open.sum())} again", len(groups)):
            if is_open[group].any():
                settled_first = torch.cat([group[~is_open[group]], group[is_open[group]]])
                compare(load, settled_first[largest[settled_first] < cosine], cosine, largest, nearest)
        is_duplicate = largest >= cosine
        is_open = is_duplicate & is_duplicate[nearest]
    return largest, nearest


def compare(load: Load, sample_G: Tensor, cosine: float, largest: Tensor, nearest: Tensor) -> None:
    """Compare the samples of a cluster with the kept ones before them; see `near_duplicates`, whose results it updates.

    G: samples of the cluster, in their order. b: samples of a block of them. S: samples of the blocks up to this one.
    """
    features_GD = load(sample_G)
    kept_G = torch.ones(len(sample_G), dtype=torch.bool, device=features_GD.device)
    step = max(1, MAX_COSINES // max(1, len(sample_G)))
    for first in range(0, len(sample_G), step):
        block = slice(first, first + step)
        up_to_block = slice(first + step)
        # cosines with earlier samples; 0 for the sample itself and for later ones
        cosines_bS = (features_GD[block] @ features_GD[up_to_block].T).tril(first - 1)
        kept_G[block] = keep_greedily(cosines_bS, kept_G[up_to_block], cosine)
        values_b, indices_b = (tensor.cpu() for tensor in (cosines_bS * kept_G[up_to_block]).max(1))
        sample_b = sample_G[block]
        nearer_b = values_b > largest[sample_b]
        largest[sample_b[nearer_b]] = values_b[nearer_b]
        nearest[sample_b[nearer_b]] = sample_G[indices_b[nearer_b]]


def keep_greedily(cosines_bS: Tensor, kept_S: Tensor, cosine: float) -> Tensor:
    """(b,) bool: the samples of a block that stay. Their cosine with each earlier kept sample is below `cosine`.

    cosines_bS: 0 for later samples. kept_S: which of the earlier blocks' samples are kept; the last b are not read.
    """
    b = len(cosines_bS)
    kept_S = kept_S.clone()
    kept_S[-b:] = True
    while True:  # each round settles at least one more sample of the block, usually all
        stays_b = ((cosines_bS < cosine) | ~kept_S).all(1)
        if torch.equal(stays_b, kept_S[-b:]):
            return stays_b
        kept_S[-b:] = stays_b
