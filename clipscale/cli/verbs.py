"""The table of what the command line can do: each verb's settings, work and help. Imports nothing heavy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clipscale.cli.train_checks import check_without_torch
from clipscale.common.errors import UserError
from clipscale.common.text import did_you_mean
from clipscale.config.parse import removal_message
from clipscale.config.setting import Section
from clipscale.config.train_config import TrainConfig
from clipscale.tools.data import settings as data
from clipscale.tools.embed import settings as embed
from clipscale.tools.eval.settings import EvalRunConfig, check_eval
from clipscale.tools.explore import settings as explore
from clipscale.tools.export.settings import ExportSettings, check_export
from clipscale.tools.plan import settings as plan
from clipscale.tools.report.settings import ReportSettings

FLAGS = ("--multirun", "--cfg", "--check", "--config-dir")


@dataclass(frozen=True)
class Verb:
    """A command: its settings, its function, and its help."""

    # The dataclass of its settings. Its docstring says what the verb does.
    settings: type[Section]
    # MODULE:FUNCTION, imported when it is called: takes the settings; returns an exit status, or anything else.
    main: str
    examples: str
    # The plain words before the settings, as the usage line shows them; `main` then takes the list of them first.
    plain_words: str = ""
    # Keys inside sections that help lists with the top-level ones, because most people set them.
    common_keys: str = ""
    # The last lines of the help.
    notes: str = ""
    # Takes what `main` takes. Raises UserError for wrong settings, before `main` is imported. Writes nothing.
    check: Callable[..., object] = lambda *settings: None
    # MODULE:FUNCTION of `--check`, which reads what `main` would begin with; empty: `check` alone.
    check_work: str = ""
    # The file of conf/ with the verb's presets, NAME.yaml; empty: none.
    conf: str = ""
    # Whether it downloads weights that are not on this machine. The connection is then checked before the work.
    fetches_weights: bool = False
    # Whether it imports torch before it prints anything. The line "loading torch" is then printed first.
    imports_torch: bool = False
    # Whether signals are left to `main`, as by a verb that starts workers. If not, a signal ends its work, with a line.
    handles_signals: bool = False
    # Whether it only prints. All other verbs go on after a closed output (`| head`), because they write files.
    only_prints: bool = False


@dataclass(frozen=True)
class DoctorSettings:
    """`clipscale doctor`: show versions, memory and devices; exit status 1 if torch cannot use the GPU."""


@dataclass(frozen=True)
class CompletionSettings:
    """`clipscale completion SHELL`: print a script by which the shell completes verbs, settings, presets, paths."""


# Every verb; a name may be two words.
VERBS = {
    "train": Verb(
        TrainConfig,
        "clipscale.cli.train_verb:main",
        """\
clipscale train model=vit-l14 batch=1M data.train='/data/laion/{00000..41455}.tar'
clipscale train experiment=openclip-vit-b32-laion400m data.train='/data/laion/*.tar' run=b32
clipscale train experiment=demo run=demo samples=20k
clipscale train -m model=vit-b32,vit-b16 batch=32k,64k data=/data/laion run=sizes
torchrun --nproc-per-node 8 -m clipscale train run=b32 batch=64k data=/data/laion""",
        common_keys="model.name data.train data.workers optim.lr cache.chunk eval.sets eval.every checkpoint.every "
        "launch.procs",
        check=check_without_torch,
        check_work="clipscale.tools.check_start:main",
        notes="""\
-m runs every combination of the comma-separated values. With it hydra/launcher=submitit_slurm makes each a Slurm job, \
and hydra/sweeper=optuna chooses the values (pip install 'clipscale[sweeps]'). --cfg job prints the settings. \
--check reads the weights, the evaluation sets and the first samples too, says what is wrong, and starts nothing.
CLIPSCALE_MAX_SAMPLES=1k: no run trains on more samples than this; to try a command out.
--config-dir DIR adds your own presets, such as DIR/experiment/mine.yaml. Several machines: the scripts in launch/.""",
        conf="train",
        fetches_weights=True,
        handles_signals=True,
    ),
    "eval": Verb(
        EvalRunConfig,
        "clipscale.tools.eval.verb:main",
        """\
clipscale eval run=demo
clipscale eval run=b32 'eval.sets=[/data/imagenet1k,/data/mscoco_captions]' precision=bf16
clipscale eval run=b32 checkpoint=latest log=tensorboard
clipscale eval model.weights=/models/clip-vit-base-patch32 eval.sets=/data/imagenet1k""",
        common_keys="model.weights eval.sets eval.root",
        check=check_eval,
        conf="eval",
        fetches_weights=True,
        imports_torch=True,
        handles_signals=True,
    ),
    "embed": Verb(
        embed.EmbedConfig,
        "clipscale.tools.embed.verb:main",
        """\
clipscale embed run=b32 data='/data/laion/*.tar' out=/data/b32
clipscale embed model=vit-b32 model.weights=laion2b_s34b_b79k data=/data/mine out=/data/b32""",
        common_keys="model.weights data.train launch.procs",
        notes="data=SHARDS is short for data.train=SHARDS.",
        check=embed.check_embed,
        conf="embed",
        fetches_weights=True,
        imports_torch=True,
        handles_signals=True,
    ),
    "explore": Verb(
        explore.ExploreConfig,
        "clipscale.tools.explore.verb:main",
        "clipscale explore run=b32 data=/data/laion-b32",
        common_keys="model.weights data.train",
        notes="data= takes a folder of `clipscale embed`.",
        check=explore.check_explore,
        check_work="clipscale.tools.explore.verb:check",
        conf="explore",
        fetches_weights=True,
        imports_torch=True,
        handles_signals=True,
    ),
    "plan": Verb(
        plan.PlanConfig,
        "clipscale.tools.plan.verb:main",
        """\
clipscale plan model=vit-l14 batch=4M hardware=a800-80g gpus=8
clipscale plan experiment=infcl-vit-l14 batch=1M hardware=h100-80g gpus=8 nodes=4 host_memory=1024G json=true""",
        common_keys="cache.chunk",
        notes="All settings of `clipscale train` are accepted. Exit status 1: the run does not fit.",
        check=lambda settings: plan.target_gpu(plan.on_machine(settings)),
        conf="train",
        imports_torch=True,
        only_prints=True,
    ),
    "data demo": Verb(data.DemoSettings, "clipscale.tools.data.demo:main", "clipscale data demo"),
    "data pack": Verb(
        data.PackSettings,
        "clipscale.tools.data.pack.verb:main",
        """\
clipscale data pack captions.csv out=/data/mine holdout=1%
clipscale data pack /data/pictures out=/data/small resize=512
clipscale data pack shop.csv 'columns=[photo,title]' root=/data/photos out=/data/shop""",
        common_keys="holdout.share holdout.by",
        plain_words="SOURCE",
    ),
    "data index": Verb(
        data.IndexSettings,
        "clipscale.tools.data.make_index:main",
        "clipscale data index '/data/laion/{00000..41455}.tar'\nclipscale data index @shards.txt",
        plain_words="SHARD...",
    ),
    "data check": Verb(
        data.CheckSettings,
        "clipscale.tools.data.check:main",
        "clipscale data check '/data/laion/{00000..00099}.tar' data.captions=json:caption",
        plain_words="SHARD...",
        only_prints=True,
    ),
    "data select": Verb(
        data.SelectSettings,
        "clipscale.tools.data.select:main",
        "clipscale data select /data/laion-b32 best=0.8 duplicates=0.95 power=0.5 out=weights.parquet",
        check=data.check_select,
        plain_words="FOLDER",
        imports_torch=True,
    ),
    "report": Verb(
        ReportSettings,
        "clipscale.tools.report.page:main",
        """\
clipscale report demo
clipscale report b32 b16 out=both.html""",
        plain_words="RUN...",
    ),
    "export": Verb(
        ExportSettings,
        "clipscale.tools.export.verb:main",
        """\
clipscale export run=b32
clipscale export run=b32 checkpoint=latest out=/models/b32
clipscale export run=b32 format=hf
clipscale export run=tuned average=runs/start 'shares=[0.5,0.5]'""",
        check=check_export,
        imports_torch=True,
    ),
    "doctor": Verb(
        DoctorSettings, "clipscale.tools.doctor:main", "clipscale doctor", imports_torch=True, only_prints=True
    ),
    "completion": Verb(
        CompletionSettings,
        "clipscale.cli.completion:main",
        """\
eval "$(clipscale completion bash)"
clipscale completion fish | source""",
        plain_words="bash|zsh|fish",
        notes="Add the line to ~/.bashrc, ~/.zshrc or ~/.config/fish/config.fish.",
    ),
}


def split_verb(words: Sequence[str]) -> tuple[str, list[str]]:
    """The verb that the first words name, and the other words. Raises UserError."""
    for length in (1, 2):
        name = " ".join(words[:length])
        if name in VERBS:
            return name, list(words[length:])
        if removal := removal_message(f"verb {name}"):
            raise UserError(removal)
    first = words[0]
    name = first if first not in {verb.partition(" ")[0] for verb in VERBS} else " ".join(words[:2])
    raise UserError(f"unknown verb '{name}'{did_you_mean(name, VERBS)}; there are {', '.join(VERBS)}")
