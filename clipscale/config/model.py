"""The settings of a model: its architecture and weights, what trains of each tower, and how pictures are prepared."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from clipscale.common.errors import UserError
from clipscale.common.record import Record
from clipscale.common.text import did_you_mean
from clipscale.common.units import parse_count
from clipscale.config.libraries import architectures, model_description
from clipscale.config.parse import dataclass_from
from clipscale.config.presets import group_options
from clipscale.config.setting import section, setting


@dataclass(frozen=True)
class TowerConfig:
    """One tower's own weights, and how it is trained."""

    weights: str | None = setting(
        None, "As `model.weights`, for this tower alone; also weights of a single tower (timm, Hugging Face)."
    )
    lr_factor: float = setting(1.0, "Factor of this tower's learning rate.", above=0)
    layer_decay: float = setting(
        1.0, "Learning rate of a layer group as a fraction of the next group's (0.75); 1: no decay.", above=0, most=1
    )
    train: str = setting(
        "all",
        "What trains: `all`, `none` (LiT), or the last N layer groups. 1: the projection; 2: also the last block.",
    )

    @property
    def groups(self) -> int | None:
        """The layer groups that train, counted from the last; None for all."""
        if self.train == "all":
            return None
        return 0 if self.train == "none" else parse_count(self.train)

    def check(self) -> None:
        """Raise UserError for another form of `train`."""
        if not re.fullmatch(r"all|none|\d+", self.train):
            raise UserError(
                f"model.image.train or model.text.train={self.train}: give all, none, or a number of groups"
            )


@dataclass(frozen=True)
class Preprocess:
    """How pictures become an image tower's inputs, in the words of open_clip's `preprocess_cfg`; by default as CLIP's.

    mean, std: for each channel, of pixels in [0, 1]. resize_mode, interpolation: how evaluation resizes pictures.
    """

    mean: tuple[float, float, float] = setting((0.48145466, 0.4578275, 0.40821073), "")
    std: tuple[float, float, float] = setting((0.26862954, 0.26130258, 0.27577711), "")
    resize_mode: str = setting("shortest", "", choices=("shortest", "squash", "longest"))
    interpolation: str = setting("bicubic", "", choices=("bicubic", "bilinear"))


@dataclass(frozen=True)
class ModelConfig:
    """Which encoders are trained, and which parts are frozen."""

    name: str = setting("ViT-B-32", "An open_clip architecture, or any name if `architecture` describes one.")
    architecture: Record = setting(
        {}, "open_clip's model description (embed_dim, vision_cfg, text_cfg); empty: the one registered under `name`."
    )
    weights: str | None = setting(
        None,
        "Weights to start from: one of open_clip's tags for `name`, hf-hub:ORG/NAME (only these use the network), a "
        "run, a folder of open_clip or transformers (CLIP, SigLIP), or a file. Runs and folders bring their model.",
    )
    image: TowerConfig = section(TowerConfig)
    text: TowerConfig = section(TowerConfig)
    lora: int = setting(
        0,
        "Rank of low-rank adapters on both towers' frozen blocks; they train, and the last N groups; 0: none.",
        least=0,
    )
    image_size: int | None = setting(None, "Side in pixels, a multiple of the patch; null: the model's own.", least=1)
    context_length: int | None = setting(
        None,
        "Most tokens of a caption; position embeddings are interpolated. null: the model's own.",
        least=2,
    )
    grad_checkpointing: bool = setting(False, "Recompute each block's activations in the backward pass.")
    batch_norm: str = setting(
        "sync",
        "Batch normalisation (RN50) by the statistics of the whole batch, in one chunk (`sync`), or by stored ones "
        "(`frozen`).",
        choices=("sync", "frozen"),
    )
    patch_dropout: float = setting(0.0, "Share of image patches dropped in training.", least=0, below=1)
    compile: str = setting(
        "auto",
        "Compile the towers' blocks with torch.compile; `auto`: on a GPU, for runs of a quarter of an hour or more.",
        choices=("auto", "true", "false"),
    )
    init_scale: float | None = setting(
        None, "Initial logit scale (the factor, not its logarithm); null: the architecture's, 1/0.07 for CLIP.", above=0
    )
    init_bias: float | None = setting(None, "Initial logit bias, -10 for the sigmoid loss; null: the architecture's.")
    correct_cls_mask: bool | None = setting(
        None,
        "open_clip's `correct_cls_mask` of a captioner's text tower, without which the class token sees a pad in its "
        "own place; null: as the weights were trained, true without weights.",
    )
    preprocess: dict[str, object] = setting(
        {},
        "How pictures are prepared, as open_clip's preprocess_cfg: mean, std, resize_mode (shortest, squash, longest), "
        "interpolation (bicubic, bilinear). Missing values are those of the weights, else of CLIP.",
    )

    @staticmethod
    def from_values(values: Mapping[str, object]) -> "ModelConfig":
        """The model's settings in a checkpoint. Raises UserError."""
        return dataclass_from(ModelConfig, values)

    @property
    def description(self) -> Record:
        """`architecture`, or open_clip's for `name`; empty for a name that it does not know."""
        return self.architecture or model_description(self.name)

    @property
    def is_captioner(self) -> bool:
        """Whether the model has a decoder of captions."""
        return "multimodal_cfg" in self.description

    @property
    def weight_settings(self) -> list[tuple[str, str]]:
        """The settings that name weights, each with its value."""
        values = {
            "model.weights": self.weights,
            "model.image.weights": self.image.weights,
            "model.text.weights": self.text.weights,
        }
        return [(setting, value) for setting, value in values.items() if value]

    def check_parts(self) -> None:
        """Raise UserError for an `architecture` without one of its parts."""
        for part in ("embed_dim", "vision_cfg", "text_cfg"):
            if self.architecture and part not in self.architecture:
                raise UserError(f"model.architecture lacks {part}; write it like open_clip's model configurations")

    @property
    def pixels(self) -> Preprocess:
        """`preprocess` with its defaults. Raises UserError for other words and values."""
        return dataclass_from(Preprocess, self.preprocess, "model.preprocess.")

    def check(self) -> None:
        """Raise UserError for a wrong `preprocess`, an incomplete `architecture`, and a name that open_clip does not
        know."""
        _ = self.pixels
        self.check_parts()
        if self.name and not self.weights and not self.description:
            preset = self.name.lower().replace("_", "-").replace("/", "-")
            is_preset = preset in group_options()["model"]
            meant = f"; the preset is model={preset}" if is_preset else did_you_mean(self.name, architectures())
            raise UserError(f"model.name={self.name!r} is not an open_clip architecture{meant}")
