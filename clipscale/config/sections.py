"""The sections of a training run's settings, one dataclass each. Imports no torch."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    every: int = 0
    """Steps between checkpoints; 0: none by steps."""
    minutes: float = 30.0
    """Minutes between checkpoints; 0: none by time. The end of a run always writes one."""
    keep: int = 2
    """Newest checkpoints kept; 0: all."""


PARALLEL = ("ddp", "fsdp")


DEVICES = ("auto", "cpu", "cuda")


@dataclass
class LaunchConfig:
    """How many worker processes `clipscale train` starts on this machine when it is not run under torchrun."""

    procs: int | None = None
    """None: one per visible GPU, or one on a machine without."""
    threads: int | None = None
    """CPU threads per worker; None: an even share of the cores."""
    parallel: str = "ddp"
    """`ddp` (every rank holds the model) or `fsdp` (FSDP2: parameters, gradients and optimizer state are sharded over the ranks)."""


LR_SCALING = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""Rule -> power of the batch."""


@dataclass
class OptimConfig:
    """The optimizer, by timm's name."""

    name: str = "adamw"
    """Any of timm's optimizers: adamw, adafactorbv, lion, lamb, muon, ..."""
    lr: float = 5e-4
    """The schedule's peak; with `lr_scaling`, at a batch of `reference_batch`."""
    lr_scaling: str = "none"
    """How the peak follows the batch: `none`; `sqrt` or `linear`, of batch / reference_batch."""
    reference_batch: int | None = None
    """The batch that `lr` is meant for."""
    weight_decay: float = 0.2
    """Applied to matrices only: gains, biases and the logit scale are never decayed."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of the first and second moment (adafactorbv: momentum, and the cap of the second)."""
    eps: float | None = 1e-6
    """None: the optimizer's own default."""
    clip_norm: float | None = None
    """Largest global gradient norm; None or 0: no clipping."""
    max_logit_scale: float = 100.0
    """The logit scale is clamped to at most this after each step."""
    on_divergence: str = "stop"
    """A loss or gradient that is not finite: `stop` the run, leaving what is needed to look into it, or `skip` the step."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of timm's factory."""


SCHEDULES = ("cosine", "constant")


@dataclass
class ScheduleConfig:
    """The learning rate over the run."""

    name: str = "cosine"
    """`cosine`, or `constant` with an optional linear cooldown at the end."""
    warmup: str = "2000"
    """Linear warm-up: steps (`2000`), a share of the run (`5%`) or epochs (`0.5ep`)."""
    cooldown: str = "0"
    """Linear cooldown at the end of a constant schedule, in the same forms."""
    final: float = 0.0
    """Learning rate at the end, as a share of the peak."""


@dataclass
class PrecisionConfig:
    """Precision of the encoders' arithmetic and weights."""

    name: str = "fp32"
    """`fp32`, `bf16` (autocast) or `fp16` (autocast with a gradient scaler). A frozen tower's matrices are held in it."""
    weights: str = "fp32"
    """Of trained towers: `fp32`, or `bf16` with precision=bf16: no casts in every chunk."""
    master: bool = True
    """With bf16 weights: gradients are added up, and the optimizer works, on float32 copies, which checkpoints keep."""
    tf32: bool = True
    """Allow TF32 in float32 matrix products on GPUs that have it."""


@dataclass
class CacheConfig:
    """How the local batch is cut into chunks."""

    chunk: str = "auto"
    """Samples per chunk for both towers; `auto`: found by a short trial on a GPU, 256 on a CPU."""
    image_chunk: int | None = None
    """Samples per image chunk; None: `chunk`."""
    text_chunk: int | None = None
    """Samples per text chunk; None: `chunk`."""
    activation_budget: str = "none"
    """Memory for graphs kept from the first pass, whose chunks need no second one: `none`, bytes (`20G`), or `auto` (what is free)."""
    negatives: str = "batch"
    """Whom a pair is told apart from: the whole `batch`, or its own `chunk`, as plain gradient accumulation has it (for comparison)."""


OBJECTIVES = ("softmax", "softmax_image", "softmax_text", "sigmoid")


SIMILARITIES = ("dot", "late")


EXCHANGES = ("auto", "none", "replicated", "local", "gather", "ring")


BACKENDS = ("auto", "dense", "tiled", "triton")


PRECISIONS = ("ieee", "tf32")


@dataclass
class LossConfig:
    """Which contrastive loss, and how it is computed; the fields are keyword arguments of `contrastive_loss`."""

    objective: str = "softmax"
    """`softmax` (CLIP), `softmax_image` or `softmax_text` (one direction), `sigmoid` (SigLIP)."""
    similarity: str = "dot"
    """`dot`, or `late` interaction over tokens."""
    exchange: str = "auto"
    """How ranks meet: `none`, `replicated`, `local`, `gather`, `ring`; `auto`: the ring where there are several."""
    backend: str = "auto"
    """`dense` blocks of scores, `tiled` torch, `triton` kernels; `auto`: the best for the device."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over all candidates."""
    ranks_per_node: int | None = None
    """Makes the ring a two-level one: inside a node, then between nodes."""
    fp32_precision: str = "ieee"
    """`ieee` or `tf32`, for matmuls of float32 features on CUDA."""
    tile: int | None = None
    """Side of the torch backend's tiles; None: chosen."""


WANDB = ("disabled", "offline", "online")


@dataclass
class LogConfig:
    """Sinks of the metrics besides `metrics.jsonl`, which is always written."""

    every: int = 1
    """Steps between console lines."""
    progress: bool = True
    """A live progress bar where the console is a terminal."""
    wandb: str = "disabled"
    """`online`, `offline` or `disabled`."""
    wandb_project: str = "clipscale"
    """Project on Weights & Biases."""
    wandb_entity: str | None = None
    """Team or user there; None: the account's default."""
    noise_scale: int = 0
    """Steps between estimates of the gradient noise scale (the batch beyond which larger ones pay less); 0: none."""
    tensorboard: bool = False
    """Event files in RUN/tensorboard."""


@dataclass
class ModelConfig:
    """Which encoders are trained, and what of them is frozen."""

    name: str = "ViT-B-32"
    """An open_clip architecture, or any name when `architecture` spells one out."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """open_clip's own model description (embed_dim, vision_cfg, text_cfg); empty: the one registered under `name`."""
    pretrained: str | None = None
    """A local checkpoint of the whole model to start from."""
    pretrained_image: str | None = None
    """A local checkpoint of the image tower to start from (LiT)."""
    freeze_image: bool = False
    """Lock the image tower (LiT): no gradient, no second pass."""
    freeze_text: bool = False
    """Lock the text tower."""
    grad_checkpointing: bool = False
    """Recompute each block's activations in the backward pass."""
    batch_norm: str = "sync"
    """Batch normalisation, where a tower has it (RN50): `sync`, statistics of the whole batch, each process's share of which is then one
    chunk; `frozen`, the running statistics as they are (for pretrained weights)."""
    patch_dropout: float = 0.0
    """Share of image patches dropped in training."""
    compile: bool = False
    """torch.compile the towers."""
    init_scale: float | None = None
    """Initial logit scale (the multiplier); None: the architecture's, 1/0.07 for CLIP's."""
    init_bias: float | None = None
    """Initial logit bias; None: the architecture's, none for CLIP's (-10 is usual for the sigmoid loss)."""
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    """Per-channel mean of the pixels, of values in [0, 1]; the default is CLIP's."""
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    """Per-channel standard deviation likewise."""


@dataclass
class EvalConfig:
    """What is evaluated, and when."""

    every: int = 0
    """Steps between evaluations during training; 0: never. The end of a run evaluates whenever there are sets."""
    sets: list[str] = field(default_factory=list)
    """Folders in CLIP_benchmark's webdataset layout, folders of class folders, or caption JSONs; the kind is read from the folder."""
    batch: int = 256
    """Images or captions encoded at once."""
    workers: int = 0
    """Decoding threads per process; 0: one per core, at most 8."""
    limit: int | None = None
    """At most so many images of each set, evenly spaced over it."""


RULES = ("linear", "double")


@dataclass
class RampConfig:
    """A batch that grows from `start` to `batch` over the first `samples` samples."""

    start: int | None = None
    """Pairs per step at the beginning; every later batch is a multiple of it. None: `batch` from the first step on."""
    samples: int = 0
    """Samples over which the batch grows."""
    rule: str = "linear"
    """`linear`: start, 2 start, 3 start, ...; `double`: start, 2 start, 4 start, ...; each for an equal share of `samples`."""
