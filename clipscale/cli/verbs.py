"""The one table of what the command line can do: where each verb's settings and work are, and how it is used. Imports nothing heavy.

The command line, its help and Tab completion all read it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tool:
    """A verb, or a tool of a verb that has several."""

    home: str
    """MODULE:CLASS that declares its keys."""
    main: str
    """Function that does the work, in that module, or MODULE:FUNCTION: takes the settings and returns an exit status or anything else."""
    examples: str
    words: str = ""
    """Plain words before the settings, as the usage line shows them; `main` then takes their list first."""
    file: str = ""
    """The file in conf/ that it is composed from; empty: settings are few, and taken as they are typed."""
    often: tuple[str, ...] = ()
    """Keys inside sections that most people set; help shows them beside the top-level ones."""
    flags: tuple[str, ...] = ()
    notes: str = ""
    """The help's last lines."""

    @property
    def settings(self) -> tuple[str, str]:
        """Module and name of the dataclass."""
        module, _, name = self.home.partition(":")
        return module, name

    @property
    def function(self) -> tuple[str, str]:
        """Module and name of `main`."""
        module, _, name = self.main.rpartition(":")
        return module or self.settings[0], name


VERBS = {
    "train": "train a model, or go on with a run",
    "eval": "zero-shot classification and retrieval with a run's checkpoint",
    "plan": "whether a run fits, and its time, before it is started: no GPU needed",
    "data": "`data demo`: a small set to try things on; `index`, `check`, `stats`: look after shards; `features`: a frozen tower's",
    "report": "draw a run: curves, results and retrieved images, on one page",
    "export": "a run's weights as a folder that open_clip loads",
    "bench": "`bench loss`, `step`, `data`: time and memory, beside other people's",
    "doctor": "whether this machine is ready to train, found out by trying",
    "completion": "Tab completion for the shell",
}

TOOLS = {
    "train": Tool(
        "clipscale.config.train:TrainConfig",
        "clipscale.launch:run",
        """\
clipscale train model=vit-l14 batch=1M data.train='/data/laion/{00000..41455}.tar'
clipscale train experiment=openclip-vit-b32-laion400m data.train='/data/laion/*.tar' run=b32
clipscale train experiment=demo run=demo samples=20k
clipscale train -m model=vit-b32,vit-b16 batch=32k,64k,128k run=sizes         # a sweep: six runs, one table
torchrun --nproc-per-node 8 -m clipscale train batch=64k data.train=...       # several machines: see launch/""",
        file="train",
        often=(
            "model.name",
            "data.train",
            "data.workers",
            "optim.lr",
            "cache.chunk",
            "eval.sets",
            "eval.every",
            "checkpoint.every",
            "launch.procs",
        ),
        flags=("-m", "--cfg job", "--config-dir DIR"),
        notes="""\
-m runs every combination of the comma-separated values. --cfg job prints the composed configuration instead of
training. --config-dir DIR adds group files of your own, DIR/experiment/mine.yaml for one.""",
    ),
    "eval": Tool(
        "clipscale.config.tools:EvalRunConfig",
        "clipscale.eval.verb:main",
        """\
clipscale eval run=demo
clipscale eval run=b32 'eval.sets=[/data/imagenet1k,/data/mscoco_captions]' precision=bf16
clipscale eval run=runs/b32 checkpoint=20000 eval.limit=1k""",
        file="eval",
    ),
    "plan": Tool(
        "clipscale.config.tools:PlanConfig",
        "clipscale.plan.show:main",
        """\
clipscale plan model=vit-l14 batch=4M hardware=a800-80g gpus=8
clipscale plan experiment=infcl-vit-l14 batch=1M hardware=h100-80g gpus=8 nodes=4 host_memory=1024G json=true
clipscale plan run=b16                                                        # beside what that run has measured""",
        file="plan",
        often=("cache.chunk",),
        notes="The settings are those of `clipscale train`; data.train is not needed. Status 1: does not fit.",
    ),
    "data demo": Tool(
        "clipscale.config.tools:DemoSettings",
        "clipscale.data.demo:main",
        "clipscale data demo root=/tmp/demo samples=5000 seed=1",
    ),
    "data index": Tool(
        "clipscale.config.tools:IndexSettings",
        "clipscale.data.verbs:make_index",
        "clipscale data index '/data/laion/{00000..41455}.tar'\nclipscale data index @shards.txt cache=/scratch/index",
        words="SHARD...",
    ),
    "data check": Tool(
        "clipscale.config.tools:CheckSettings",
        "clipscale.data.verbs:check_shards",
        "clipscale data check '/data/laion/{00000..00099}.tar' filter.min_side=64 'filter.fields=[similarity>=0.3]'",
        words="SHARD...",
    ),
    "data stats": Tool(
        "clipscale.config.tools:StatsSettings",
        "clipscale.data.verbs:show_stats",
        "clipscale data stats '/data/laion/*.tar'",
        words="SHARD...",
    ),
    "data features": Tool(
        "clipscale.config.tools:FeaturesConfig",
        "clipscale.data.compute_features:main",
        """\
clipscale data features model=vit-b16 model.pretrained_image=b16.pt data.train='/data/laion/*.tar' out=/data/b16
clipscale train model=vit-b16 model.pretrained_image=b16.pt model.freeze_image=true data.train=/data/b16 data.image_features=true""",
        file="features",
        often=("model.pretrained_image", "data.train"),
    ),
    "report": Tool("clipscale.config.tools:ReportSettings", "clipscale.report.page:main", "clipscale report run=demo"),
    "export": Tool(
        "clipscale.config.tools:ExportSettings",
        "clipscale.export:main",
        "clipscale export run=b32\nclipscale export run=b32 checkpoint=20000 dtype=float16 out=/models/b32",
    ),
    "bench loss": Tool(
        "clipscale.config.tools:LossBenchSettings",
        "clipscale.bench.loss:main",
        """\
clipscale bench loss n=4k,8k methods=infcl,open_clip
clipscale bench loss n=8k,64k,1M d=768 dtype=bf16 methods=infcl,open_clip,inf_cl device=cuda
clipscale bench loss n=2k ranks=4 methods=clip,openclip,disco,ring,infcl""",
    ),
    "bench step": Tool(
        "clipscale.config.tools:StepBenchSettings",
        "clipscale.bench.step:main",
        """\
clipscale bench step
clipscale bench step model=vit-b16 precision=bf16 batch=32k chunk=256 memory= methods=plain@max,cache,cache@256k seconds=300
clipscale bench step methods=cache,keep-30,frozen batch=1k chunk=256""",
    ),
    "bench data": Tool(
        "clipscale.config.tools:DataBenchSettings",
        "clipscale.bench.data:main",
        "clipscale bench data\nclipscale bench data sizes=512 stream=512 workers=8 batch=1k",
    ),
    "doctor": Tool(
        "clipscale.config.tools:DoctorSettings",
        "clipscale.doctor:main",
        "clipscale doctor\nclipscale doctor run=/scratch/runs",
    ),
}
"""Every verb, and every tool of the verbs that have several, but for `completion`, which has no settings."""


def tools_of(verb: str) -> list[str]:
    """The tools of a verb that has several, by their own names: `demo`, `index`, ... of `data`."""
    return [name.partition(" ")[2] for name in TOOLS if name.startswith(verb + " ")]
