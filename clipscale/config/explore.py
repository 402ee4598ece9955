"""The settings of `clipscale explore`."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from clipscale.config.checks import existing_run, one_model
from clipscale.config.sections import ModelConfig
from clipscale.config.setting import setting
from clipscale.config.tools import CHECKPOINT_HELP, EmbedConfig, EncodeConfig
from clipscale.errors import UserError
from clipscale.units import run_folder


@dataclass
class ExploreConfig(EncodeConfig):
    """`clipscale explore`: a local page that searches a set by texts and pictures, with one model, or two side by side."""

    against: str = setting(
        "", "A second model, to compare: a run, or any value of `model.weights`. Empty: none.", literal=True
    )
    against_checkpoint: str = setting("latest", f"Of `against`, if it is a run: {CHECKPOINT_HELP}", literal=True)
    host: str = setting("127.0.0.1", "Address of the page. Others than loopback let whoever reaches it see the set.")
    port: int = setting(8765, "Port of the page; 0: a free one.", least=0)
    out: str = setting(
        "", "Folder for features that it computes itself; empty: explore/ in the folder of each run.", literal=True
    )

    def models(self) -> list[EmbedConfig]:
        """How each model embeds the set. `out` is the folder that the features' own folders go to. Raises UserError."""
        first = EmbedConfig(**{one.name: getattr(self, one.name) for one in fields(EncodeConfig)})
        found = [first]
        if self.against:
            trained = (run_folder(self.against) / "checkpoints").is_dir()
            other = ModelConfig(name="" if trained else self.model.name, weights=None if trained else self.against)
            found.append(
                replace(first, run=self.against if trained else "", checkpoint=self.against_checkpoint, model=other)
            )
        return [replace(one, out=str(Path(self.out).expanduser() if self.out else _folder(one))) for one in found]


def check_explore(config: ExploreConfig) -> None:
    """Raises UserError if neither a run nor weights are given, or both, or no data."""
    one_model(config.run, config.model.weights, "explore", "give the second as against=")
    if not config.data.train:
        raise UserError(
            "data is not set; give a folder of `clipscale embed`, or shards, a table or a folder: data=PATH"
        )
    if config.port > 65535:
        raise UserError(f"port={config.port}: give 0 to 65535")


def _folder(config: EmbedConfig) -> Path:
    return existing_run(config.run) / "explore" if config.run else run_folder("explore")
