"""The table of what the command line can do: each verb's settings, work and help. Imports nothing heavy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clipscale.config import tools
from clipscale.config.train import TrainConfig
from clipscale.launch import local


@dataclass(frozen=True)
class Tool:
    """A verb, or a tool of a verb that has several, such as `data index`."""

    settings: type[Any]
    """The dataclass of its settings."""
    main: str
    """MODULE:FUNCTION, imported when it is called: takes the settings; returns an exit status, a benchmark's rows, or
    anything else.
    """
    examples: str
    words: str = ""
    """The plain words before the settings, as the usage line shows them; `main` then takes the list of them first."""
    often: str = ""
    """Keys inside sections that help lists beside the top-level ones, because most people set them."""
    notes: str = ""
    """The last lines of the help."""
    check: Callable[[Any], object] = lambda settings: None
    """Raises UserError for wrong settings, before `main` is imported."""


VERBS = {
    "train": "train a model, or resume a run",
    "eval": "zero-shot classification and retrieval with a run's checkpoint, or any CLIP or SigLIP weights",
    "embed": "features of pictures and texts, as arrays or shards",
    "explore": "a local page: pictures by text, captions and classes of a picture, two models side by side",
    "plan": "predict whether a run fits, and its time; needs no GPU",
    "data": "`data demo`: a small data set; `index`, `check`, `stats`: inspect shards",
    "report": "curves, results and retrieved images of a run, on one page",
    "export": "write a run's weights for open_clip or transformers",
    "doctor": "test whether this machine is ready to train",
}

TOOLS = {
    "train": Tool(
        TrainConfig,
        "clipscale.launch.local:run",
        """\
clipscale train model=vit-l14 batch=1M data.train='/data/laion/{00000..41455}.tar'
clipscale train experiment=openclip-vit-b32-laion400m data.train='/data/laion/*.tar' run=b32
clipscale train experiment=demo run=demo samples=20k
clipscale train -m model=vit-b32,vit-b16 batch=32k,64k,128k run=sizes         # a sweep: six runs, one table
torchrun --nproc-per-node 8 -m clipscale train run=b32 batch=64k data.train=...   # several machines: see launch/""",
        often="model.name data.train data.workers optim.lr cache.chunk eval.sets eval.every checkpoint.every "
        "launch.procs",
        check=local.check_train,
        notes="""\
-m runs every combination of the comma-separated values. --cfg job prints the composed configuration instead of
training. --config-dir DIR adds your own presets, such as DIR/experiment/mine.yaml.""",
    ),
    "eval": Tool(
        tools.EvalRunConfig,
        "clipscale.eval.verb:main",
        """\
clipscale eval run=demo
clipscale eval run=b32 'eval.sets=[/data/imagenet1k,/data/mscoco_captions]' precision=bf16
clipscale eval run=b32 eval.suite=infcl-table3 eval.root=/data/eval
clipscale eval run=b32 checkpoint=all log=tensorboard                         # curves over all checkpoints
clipscale eval model=vit-b32 model.weights=laion2b_s34b_b79k 'eval.sets=[/data/imagenet1k]'
clipscale eval model.weights=/models/clip-vit-base-patch32 'eval.sets=[/data/imagenet1k]'""",
        often="model.weights eval.sets eval.root",
        check=tools.check_eval,
    ),
    "embed": Tool(
        tools.EmbedConfig,
        "clipscale.embed.run:main",
        """\
clipscale embed run=b32 data='/data/laion/*.tar' out=/data/b32
clipscale embed run=b32 data=/data/pairs.parquet out=/data/b32 launch.procs=8
clipscale embed model=vit-b32 model.weights=laion2b_s34b_b79k data=/data/pairs.csv out=/data/b32 features=image""",
        often="model.weights data.train launch.procs",
        notes="data=SHARDS is short for data.train=SHARDS.",
        check=tools.check_embed,
    ),
    "explore": Tool(
        tools.ExploreConfig,
        "clipscale.explore.verb:main",
        """\
clipscale explore run=b32 data=/data/laion-b32
clipscale explore run=b32 against=b16 data=[/data/laion-b32,/data/laion-b16]""",
        often="model.weights data.train",
        notes="data= takes folders of `clipscale embed`.",
        check=tools.check_explore,
    ),
    "plan": Tool(
        tools.PlanConfig,
        "clipscale.plan.show:main",
        """\
clipscale plan model=vit-l14 batch=4M hardware=a800-80g gpus=8
clipscale plan experiment=infcl-vit-l14 batch=1M hardware=h100-80g gpus=8 nodes=4 host_memory=1024G json=true
clipscale plan run=b16                                                        # against what that run measured""",
        often="cache.chunk",
        notes="The settings are those of `clipscale train`, without data. Exit status 1: the run does not fit.",
        check=tools.target_gpu,
    ),
    "data demo": Tool(
        tools.DemoSettings, "clipscale.data.tools.demo:main", "clipscale data demo root=/tmp/demo samples=5000 seed=1"
    ),
    "data index": Tool(
        tools.IndexSettings,
        "clipscale.data.tools.stats:make_index",
        "clipscale data index '/data/laion/{00000..41455}.tar'\nclipscale data index @shards.txt workers=8",
        words="SHARD...",
    ),
    "data check": Tool(
        tools.CheckSettings,
        "clipscale.data.tools.check:main",
        "clipscale data check '/data/laion/{00000..00099}.tar' 'data.captions=[json:caption]'",
        words="SHARD...",
    ),
    "data stats": Tool(
        tools.StatsSettings,
        "clipscale.data.tools.stats:show_stats",
        "clipscale data stats '/data/laion/*.tar'",
        words="SHARD...",
    ),
    "report": Tool(
        tools.ReportSettings, "clipscale.report.page:main", "clipscale report run=demo", check=tools.check_run
    ),
    "export": Tool(
        tools.ExportSettings,
        "clipscale.export.verb:main",
        """\
clipscale export run=b32
clipscale export run=b32 to=hf out=/models/b32-hf
clipscale export run=b32 checkpoint=20000 dtype=float16 out=/models/b32""",
        check=tools.check_run,
    ),
    "doctor": Tool(tools.DoctorSettings, "clipscale.doctor:main", "clipscale doctor"),
}
"""Every verb, or every tool of a verb that has several."""


def tools_of(verb: str) -> list[str]:
    """The tools of a verb that has several: `demo`, `index`, ... of `data`."""
    return [name.partition(" ")[2] for name in TOOLS if name.startswith(verb + " ")]
