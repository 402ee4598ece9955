"""Tables and figures of the papers that clipscale unites, one command each.

    python benchmarks/sources.py table1        # Inf-CL: memory of the losses and at the peak, predicted and published
    python benchmarks/sources.py table2        # Inf-CL: largest batches
    python benchmarks/sources.py table4        # Inf-CL: the loss's memory, step by step from CLIP's to Inf-CL's
    python benchmarks/sources.py figure4       # Inf-CL: time a step against the batch, as `plan` expects it
    python benchmarks/sources.py figure1       # Gradient Cache: time an update, beside accumulation and checkpointing
    python benchmarks/sources.py dpr           # Gradient Cache: dense retrieval with hard negatives, trained
    python benchmarks/sources.py discrepancy   # EfficientDDP: gradients of several ranks against one process's

The first four calculate; the others measure on this machine. Settings follow as KEY=VALUE (DEFAULTS). Published figures
are of arXiv 2410.17243. The record is docs/benchmarks/sources.md. MISSING has what is not here, and the way to it.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from words import Row, settings_of

from clipscale.common.errors import UserError

TABLES = ("table1", "table2", "table4", "figure4", "figure1", "dpr", "discrepancy")
# These are Inf-CL's. Gradient Cache's table of Natural Questions needs that set; `dpr` trains on a made-up one.
MISSING = {
    "table3": "the accuracies of Inf-CL's table 3 take its trainings: clipscale train -m experiment=infcl-vit-b16-lit "
    "model=lit-b16-bert batch=64k,256k,1024k, with the sets of eval.suite=infcl-table3",
    "figure2": "Inf-CL's figures 2 and 3 are drawings of the method",
    "figure3": "Inf-CL's figures 2 and 3 are drawings of the method",
    "figure5": "the accuracies of Inf-CL's figure 5 take its trainings: clipscale train -m "
    "experiment=infcl-vit-b32-cc12m batch=8k,16k,32k,64k,128k, and so with infcl-vit-b32 for LAION-400M",
}
DEFAULTS = {"batches": "64,128,256,512", "chunk": 32, "repeats": 3, "steps": 400}


def main(words: Sequence[str]) -> list[Row]:
    """Print one table. Raises UserError, for wrong words before anything heavy is imported."""
    name = words[0] if words else "nothing given"
    if name in MISSING:
        raise UserError(f"{name}: {MISSING[name]}")
    if name not in TABLES:
        raise UserError(f"{name}: give one of {', '.join(TABLES)}")
    settings = settings_of(DEFAULTS, words[1:])
    rows, columns = getattr(import_module("source_tables"), name)(settings)
    from measure import markdown

    print(markdown(columns, rows))
    return rows


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
