"""The settings of every verb except `train`."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.common.hardware import Hardware, gpu_here, hardware, hardware_of
from clipscale.common.units import run_folder
from clipscale.config import sections
from clipscale.config.data import DataConfig
from clipscale.config.setting import setting
from clipscale.config.train import TrainConfig, check_sigmoid, shared


@dataclass(frozen=True)
class ReportSettings:
    """`clipscale report RUN...`: a page about runs, with charts to look into; or a picture of them for a paper."""

    run: list[str] = setting([], "NAMES of folders under runs/, or paths; a sweep's folder means all of its runs.")
    out: str | None = setting(None, "FILE.html, FILE.png or FILE.pdf; null: report.html in the run's folder, or above.")
    expected: str = setting("", "A published curve behind one's own, as openclip-b32-2b (a wrong name lists all).")
    live: bool = setting(False, "Serve the page to this machine's browsers instead, as the runs go on.")
    port: int = setting(8766, "Port of the live page; 0: a free one.", least=0, most=65535)


@dataclass(frozen=True)
class RunModel:
    """The model of a run."""

    run: str = setting("", "NAME of the run's folder under runs/, or its path.")
    checkpoint: str = setting("latest", "`latest`, a step's number, a checkpoint's path, or (eval) `all`: every one.")


@dataclass(frozen=True)
class AnyModel(RunModel):
    """The model of a run, or of any `model.weights`."""

    device: str = setting("auto", sections.DEVICE_HELP, choices=sections.DEVICES)
    model: sections.ModelConfig = field(default_factory=lambda: sections.ModelConfig(name=""))
    precision: str = setting("fp32", sections.PRECISION_HELP, choices=sections.PRECISIONS)


@dataclass(frozen=True)
class EvalRunConfig(AnyModel):
    """`clipscale eval`: zero-shot and retrieval results of a run (also in RUN/eval/), or of any `model.weights`."""

    out: str | None = setting(None, "Folder for the results of `model.weights`; null: runs/eval-NAME, after them.")
    eval: sections.EvalConfig = field(default_factory=sections.EvalConfig)
    log: sections.SinkConfig = field(default_factory=sections.SinkConfig)
    launch: sections.LaunchConfig = field(default_factory=sections.LaunchConfig)


@dataclass(frozen=True)
class ExportSettings(RunModel):
    """`clipscale export`: a run's weights as a folder for open_clip (`local-dir:FOLDER`) or transformers."""

    to: str = setting("open_clip", "`open_clip`, or `hf`: transformers' CLIP or SigLIP.", choices=("open_clip", "hf"))
    weights: str = setting("trained", sections.WEIGHTS_HELP, choices=sections.WEIGHTS)
    average: list[str] = setting(
        [], "Averaged with the run: runs, checkpoints' paths, or values of `model.weights` (WiSE-FT, model soups)."
    )
    shares: list[float] = setting([], "Of the run and of each in `average`, adding up to 1; empty: equal ones.")
    out: str | None = setting(None, "Folder to write; null: RUN/export, -average after it, or RUN/export-hf.")
    dtype: str = setting(
        "float32", "Dtype of the matrices; all else stays float32.", choices=("float32", "bfloat16", "float16")
    )


@dataclass(frozen=True)
class DoctorSettings:
    """`clipscale doctor`: test what training needs on this machine; exit status 1 if something does not work."""


@dataclass(frozen=True)
class DemoSettings:
    """`clipscale data demo`: render a small set to try things on."""

    root: str | None = setting(None, "Folder to write; null: the user's cache folder.")
    samples: int = setting(20_000, "Training pairs to render.")


@dataclass(frozen=True)
class IndexSettings:
    """`clipscale data index SHARD...`: write an index of counts, offsets and sizes beside the shards; print counts."""

    only_keys: str | None = setting(None, "Index the subset for `data.only_keys`, instead of all samples.")


@dataclass(frozen=True)
class CheckSettings:
    """`clipscale data check SHARD...`: read and decode everything, and print what is broken."""

    data: DataConfig = field(default_factory=DataConfig)


IMAGE, TEXT = "image", "text"


@dataclass(frozen=True)
class EmbedConfig(AnyModel):
    """`clipscale embed`: features of the pictures and texts in `data.train`, by a run or any `model.weights`."""

    weights: str = setting("trained", sections.WEIGHTS_HELP, choices=sections.WEIGHTS)
    out: str = setting("", "Folder to write; complete files in it are kept.")
    format: str = setting(
        "npy",
        "`npy`: arrays, and keys and captions as JSON lines; `webdataset`: shards with features for pictures.",
        choices=("npy", "webdataset"),
    )
    features: str = setting("both", "Which features.", choices=(IMAGE, TEXT, "both"))
    teacher: str = setting(
        "", "Keep the pictures, and add both features as one member TEACHER.npy, for `distill.teachers`; empty: do not."
    )
    dtype: str = setting("float16", "Dtype of the features.", choices=("float16", "float32"))
    transform: str = setting(
        "eval",
        "The pixels of evaluation, or of training without augmentation (the largest central square).",
        choices=("eval", "train"),
    )
    batch: int = setting(256, "Pictures or texts encoded at once.", least=1)
    data: DataConfig = field(default_factory=DataConfig)
    launch: sections.LaunchConfig = field(default_factory=sections.LaunchConfig)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The features of a sample."""
        return (IMAGE, TEXT) if self.features == "both" else (self.features,)


@dataclass(frozen=True)
class ExploreConfig(AnyModel):
    """`clipscale explore`: a local page that searches what `embed` has written, with one model or two."""

    weights: str = setting("trained", sections.WEIGHTS_HELP, choices=sections.WEIGHTS)
    against: str = setting("", "A second model, to compare: a run, or any value of `model.weights`. Empty: none.")
    port: int = setting(8765, "Port of the page; 0: a free one.", least=0, most=65535)
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """`clipscale plan`: predict memory and time of a run from the settings of `train`; or compare with `run`."""

    hardware: str = setting(
        "", "The GPU: a100-80g, h100-80g, ... (a wrong name lists all), or `cpu`; empty: this machine."
    )
    gpus: int = setting(1, "GPUs per node; one process each.", least=1)
    nodes: int = setting(1, "Nodes.", least=1)
    host_memory: int | None = setting(None, "Host memory of a node in bytes (`1024G`); null: not compared.")
    utilisation: float | None = setting(
        None, "Share of the GPU's peak FLOP/s, for the time; null: what was measured or published.", above=0, most=1
    )
    fit: bool = setting(False, "Find the largest batch that fits, and the fastest chunks and offload.")
    json: bool = setting(False, "Print one JSON object instead of tables.")


def existing_run(run: str) -> Path:
    """The folder of a run. Raises UserError if none is given, or there is none, or if it is a sweep."""
    if not run:
        raise UserError("run is not set; give run=NAME or run=PATH")
    folder = run_folder(run)
    if not folder.is_dir():
        raise UserError(f"run={run}: there is no folder {folder}")
    runs = sorted(path.parent for path in folder.glob("*/config.yaml"))
    if runs and not (folder / "config.yaml").exists():
        raise UserError(f"run={run}: a sweep of {len(runs)} runs; give one of them, as in run={runs[0]}")
    return folder


def model_run(config: AnyModel) -> Path | None:
    """The folder of the run; None for weights of another source. Raises UserError if neither is given, or both."""
    model = config.model
    weights = model.weights or model.image.weights or model.text.weights
    if config.run and weights:
        raise UserError(f"run={config.run} and model.weights={weights} are two models; give one of them")
    if not config.run and not weights:
        raise UserError("run is not set; give run=NAME or run=PATH, or model=vit-b32 model.weights=laion2b_s34b_b79k")
    return existing_run(config.run) if config.run else None


def check_explore(config: ExploreConfig) -> None:
    """Raises UserError for one model that is not given, or given twice, or no data."""
    model_run(config)
    if not config.data.train:
        raise UserError("data is not set; give a folder of `clipscale embed`: data=PATH")


def check_eval(config: EvalRunConfig) -> Path:
    """The folder of the results. Raises UserError for a model that is not given, or given twice."""
    if folder := model_run(config):
        return folder
    name = re.sub(r"[^\w.-]+", "-", f"{config.model.name}-{config.model.weights}").strip("-.")
    return Path(config.out).expanduser() if config.out else run_folder(f"eval-{name}")


def check_embed(config: EmbedConfig) -> Path | None:
    """The folder of the run; None for another model, also one of random weights. Raises UserError."""
    if not config.out:
        raise UserError("out is not set; give the folder to write, out=DIR")
    if config.teacher and not (config.format == "webdataset" and config.features == "both"):
        raise UserError(f"teacher={config.teacher}: needs format=webdataset and features=both")
    if config.teacher and not re.fullmatch(r"[a-z0-9_-]+", config.teacher):
        raise UserError(f"teacher={config.teacher}: take lower-case letters, digits, _ and -")
    return model_run(config) if config.run or not config.model.name else None


def on_machine(config: PlanConfig) -> PlanConfig:
    """The settings with the machine to plan for: this one's GPUs, or with `fit` its CPU, where they name none.

    Raises UserError for GPUs that the table does not have.
    """
    if config.run or config.hardware:
        return config
    import torch

    from clipscale.data.loader.memory import free_memory

    gpu = gpu_here()
    name = "cpu" if config.fit else None
    if gpu:
        name = hardware_of(gpu)
    if name is None:
        raise UserError("hardware is not set; give the GPU, hardware=a100-80g, or run=NAME to compare with a run")
    memory = config.host_memory or free_memory()
    return replace(config, hardware=name, gpus=max(1, torch.cuda.device_count()), nodes=1, host_memory=memory)


def target_gpu(config: PlanConfig) -> Hardware | None:
    """The GPU to plan for; None for a CPU, and with `run`, which names its own. Raises UserError."""
    if config.run:
        existing_run(config.run)
        return None
    gpu = None if config.hardware == "cpu" else hardware(config.hardware)
    check_sigmoid(config)
    shared(config.batch, config.gpus * config.nodes, f"gpus={config.gpus} x nodes={config.nodes}")
    return gpu
