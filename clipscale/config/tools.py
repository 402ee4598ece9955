"""The settings of every verb except `train`. Imports no torch."""

from dataclasses import dataclass, field

from clipscale.config.data import DataConfig, FilterConfig, TableConfig
from clipscale.config.sections import EvalConfig, ModelConfig, PrecisionConfig
from clipscale.config.train import TrainConfig


@dataclass
class ReportSettings:
    """`clipscale report`: a page and a picture of a run, made from its folder."""

    run: str = ""
    """NAME of the run's folder under runs/, or its path."""


@dataclass
class EvalRunConfig:
    """`clipscale eval`: zero-shot and retrieval figures of a run's checkpoint, as a table and in RUN/eval/step_N.json."""

    run: str = ""
    """NAME of the run's folder under runs/, or its path."""
    checkpoint: str = "latest"
    """`latest`, the number of a step, or a checkpoint's path."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu` or `cuda`."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)


@dataclass
class ExportSettings:
    """`clipscale export`: a run's weights for open_clip, as `local-dir:FOLDER`, or to be put on the Hugging Face hub as they are."""

    run: str = ""
    """NAME of the run's folder under runs/, or its path."""
    checkpoint: str = "latest"
    """`latest`, the number of a step, or a checkpoint's path."""
    out: str | None = None
    """Folder to write; RUN/export if not given."""
    dtype: str = "float32"
    """Of the matrices: `float32`, `bfloat16` or `float16`; vectors and the scale stay float32."""


@dataclass
class DoctorSettings:
    """`clipscale doctor`: try what training needs on this machine; status 1 where something does not work."""

    run: str = "runs"
    """Folder that runs are to be written to."""
    timeout_s: float = 120.0
    """Seconds for the processes to find each other and compute one loss together."""


@dataclass
class DemoSettings:
    """`clipscale data demo`: render a small set to try things on."""

    root: str | None = None
    """Folder to write; the user's cache folder if not given."""
    samples: int = 20_000
    """Training pairs."""
    seed: int = 0
    """The same seed renders the same bytes."""
    force: bool = False
    """Render anew even if the same set is already there."""


@dataclass
class IndexSettings:
    """`clipscale data index SHARD...`: note counts, places, sizes and checksums beside the shards."""

    cache: str | None = None
    """Folder for the index instead of the shards' own; where those cannot be written or are remote, the user's cache folder is taken."""
    checksum: bool = True
    """Read everything, for a checksum; false: the headers alone."""
    workers: int | None = None
    """Processes; null: one a core."""
    force: bool = False
    """Read the unchanged shards again too."""
    allow_pipe: bool = False
    """Permit `pipe:` addresses, which run a shell command."""


@dataclass
class StatsSettings:
    """`clipscale data stats SHARD...`: samples and bytes, from the index."""

    cache: str | None = None
    """Folder where the index lies if not beside the shards."""
    json: bool = False
    """Print JSON."""


@dataclass
class CheckSettings:
    """`clipscale data check SHARD...`: read everything and say what is broken, and why."""

    out: str = "data-check"
    """Folder for check.json, check.html and duplicates.txt."""
    workers: int | None = None
    """Processes; null: one a core."""
    pictures: int = 64
    """Thumbnails on the page."""
    near_duplicates: bool = False
    """Also look for pictures that look alike (a 64-bit difference hash)."""
    seed: int = 0
    """Of the thumbnails' choice."""
    cache: str | None = None
    """Folder where the index lies if not beside the shards."""
    max_pixels: int = 89_478_485
    """As `data.max_pixels` in training."""
    max_bytes: int = 67_108_864
    """As `data.max_bytes` in training."""
    caption_key: str = "txt"
    """As `data.caption_key` in training."""
    captions: list[str] = field(default_factory=list)
    """As `data.captions` in training."""
    allow_pipe: bool = False
    """Permit `pipe:` addresses, which run a shell command."""
    table: TableConfig = field(default_factory=TableConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)


@dataclass
class FeaturesConfig:
    """`clipscale data features`: the image tower's features of every picture in `data.train`, in shards of the same names."""

    out: str = ""
    """Folder to write; shards that are complete there are left as they are."""
    dtype: str = "float16"
    """Of the features: `float16` or `float32`."""
    transform: str = "eval"
    """`eval`: shorter side to the model's size and central crop, as in evaluation; `train`: the largest central square, resized as in
    training."""
    batch: int = 256
    """Pictures encoded at once."""
    threads: int = 4
    """Threads that decode."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu` or `cuda`."""
    seed: int = 0
    """Of the weights, where none are given."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)


@dataclass
class StepBenchSettings:
    """`clipscale bench step`: the gradient cache beside plain forward and backward, sample for sample."""

    model: str = "tiny"
    """A preset of conf/model."""
    batch: str = "512"
    """Pairs of one step, for methods that do not name their own."""
    chunk: str = "128"
    """Samples per chunk of either tower."""
    memory: str = "128,256,512,1k"
    """Batches at which memory is measured in processes apart, separated by commas; empty: none."""
    methods: str = "auto"
    """plain, cache, keep-N (room for N per cent of all graphs; keep-NG: N GiB), frozen, compiled, open_clip, and so on; METHOD@BATCH: at
    that batch; METHOD@max: at the largest that fits; `auto`: all that can run here, but for compiled ones."""
    precision: str = "fp32"
    """`fp32` or `bf16` (autocast)."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu` or `cuda`."""
    repeats: int = 7
    """Rounds."""
    seconds: float = 0.0
    """Bound on the whole: a step that would not end within it is recorded as not run, with what it would take; 0: none."""
    resume: bool = False
    """Keep what an earlier, interrupted run with the same settings measured on this machine."""
    malloc: str = "keep"
    """On a CPU: `keep` freed memory in the process while time is measured (faster plain steps), or leave it to the `system`."""
    out: str = "runs/bench"
    """Folder for step-DEVICE.json, .md and .png; earlier ones are replaced."""


@dataclass
class LossBenchSettings:
    """`clipscale bench loss`: the contrastive loss of clipscale and others, side by side."""

    n: str = "1k,2k,4k,8k"
    """Batches (pairs of all ranks), separated by commas."""
    d: str = "512"
    """Feature widths."""
    methods: str = "auto"
    """Presets (infcl, clip, ...), backends (tiled, dense, triton) and peers (open_clip, inf_cl, torch, compile)."""
    dtype: str = "fp32"
    """`fp32`, `bf16`, `fp16`, `tf32`."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu` or `cuda`."""
    ranks: int = 1
    """Processes that share the batch; with several, bytes on the wire are counted too."""
    repeats: int = 5
    """Measurements of each time."""
    scale: float = 100.0
    """Logit scale: 100 is where CLIP's training ends; the sigmoid preset keeps its own."""
    seconds: float = 0.0
    """Bound on the whole: smaller cases come first, and what would not end in time, judged by a smaller case, is recorded as not run; 0:
    none."""
    resume: bool = False
    """Keep what an earlier, interrupted run with the same settings measured on this machine."""
    profile: bool = False
    """One more step of each method under torch's profiler: which kernels its time goes to."""
    reference: int = 4096
    """Largest batch whose error against the float64 oracle is measured; 0: none."""
    out: str = "runs/bench"
    """Folder for loss-DEVICE.json, .md and .png (loss-DEVICE-Pranks with several ranks); earlier ones are replaced."""


@dataclass
class DataBenchSettings:
    """`clipscale bench data`: decoding and the whole data path, beside open_clip's."""

    sizes: str = "256,384,512,1024"
    """Sides of the source pictures in pixels, separated by commas."""
    image_size: int = 224
    """Side of the training pixels."""
    pictures: int = 48
    """Pictures of each size."""
    repeats: int = 5
    """Measurements of each rate."""
    stream: str = "256,512"
    """Source sizes measured end to end; empty: none."""
    workers: int = 2
    """Worker processes of the end-to-end measurement."""
    batch: int = 256
    """Samples of a batch of the end-to-end measurement."""
    device: str = "auto"
    """GPU whose decoder and model are measured: `auto` (where there is one), `cuda`, or `cpu`: none."""
    resume: bool = False
    """Keep what an earlier, interrupted run with the same settings measured on this machine."""
    model: str = "vit-b32"
    """A preset of conf/model whose step on the GPU is measured; empty: none."""
    out: str = "runs/bench"
    """Folder for data.json, .md and .png; earlier ones are replaced."""


@dataclass
class PlanConfig(TrainConfig):
    """`clipscale plan`: memory and time of a run that has yet to start, by the settings of `train`; with `run`, beside what it measured."""

    hardware: str = ""
    """The GPU: a100-80g, a800-80g, h100-80g, h200-141g, ... (a wrong name lists them); `cpu`."""
    gpus: int = 1
    """GPUs of a node; one process each."""
    nodes: int = 1
    """Machines."""
    host_memory: int | None = None
    """Memory of a node in bytes (`1024G`); null: not compared."""
    image_bytes: int = 40_000
    """Mean bytes of a picture in the shards."""
    reserve: float = 0.05
    """Share of a GPU's memory to leave free: fragments, and what is not foreseen."""
    utilisation: float = 0.4
    """Share of the GPU's peak that the arithmetic is assumed to reach, for the time."""
    network: float = 25.0
    """GB/s that a GPU is assumed to send to another node, for the time."""
    json: bool = False
    """Print one JSON object instead of tables."""
