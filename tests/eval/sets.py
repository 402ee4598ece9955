"""Tiny evaluation sets of single-coloured pictures, and a model that recognises colours without training."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from clipscale.config.sections import EvalConfig
from clipscale.data.eval_transform import EvalTransform
from clipscale.eval.classification import ClassificationSet
from clipscale.eval.run import Evaluation
from clipscale.eval.sets.load import load_set
from clipscale.eval.suites import load_chosen_sets
from tests.data.files import write_tar

COLOURS = {
    "red": (230, 20, 20),
    "green": (20, 230, 20),
    "blue": (20, 20, 230),
    "yellow": (230, 230, 20),
    "cyan": (20, 230, 230),
    "white": (230, 230, 230),
}
NAMES = list(COLOURS)
TEMPLATES = ["a photo of {c}.", "the colour {c} {{no braces}}"]


def picture(colour: str, kind: str = "PNG", size: tuple[int, int] = (8, 8)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, COLOURS[colour]).save(out, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return out.getvalue()


def write_shards(root: Path, shards: Sequence[Sequence[tuple[str, bytes]]], files: Mapping[str, str]) -> Path:
    """Write CLIP_benchmark's layout: `shards` of (member, content), and the text files beside them."""
    (root / "test").mkdir(parents=True, exist_ok=True)
    for index, members in enumerate(shards):
        write_tar(root / "test" / f"{index}.tar", members)
    (root / "test" / "nshards.txt").write_text(f"{len(shards)}\n")
    for name, text in files.items():
        (root / name).write_text(text)
    return root


def members(kind: str, texts: Sequence[str], pictures: Sequence[bytes]) -> list[tuple[str, bytes]]:
    """Samples of a text of this kind and a picture."""
    pairs = [((f"{i:04d}.{kind}", texts[i].encode()), (f"{i:04d}.png", data)) for i, data in enumerate(pictures)]
    return [member for pair in pairs for member in pair]


def shown(names: Sequence[str] = NAMES, broken: int = -1) -> list[bytes]:
    """A picture for each colour; at the index `broken` it is not a picture."""
    return [b"no picture" if i == broken else picture(name) for i, name in enumerate(names)]


def classification_set(root: Path, labels: Sequence[str] = NAMES, wrong: Sequence[int] = (), broken: int = -1) -> Path:
    """One picture a label, in two shards. Pictures at the indices `wrong` show the next colour instead of their own."""
    numbers = [NAMES.index(label) for label in labels]
    colours = [NAMES[(number + (i in wrong)) % len(NAMES)] for i, number in enumerate(numbers)]
    both = members("cls", list(map(str, numbers)), shown(colours, broken))
    files = {"classnames.txt": "\n".join(NAMES), "zeroshot_classification_templates.txt": "\n".join(TEMPLATES)}
    return write_shards(root, [both[: len(labels) // 2 * 2], both[len(labels) // 2 * 2 :]], files)


def retrieval_set(
    root: Path,
    captions: Callable[[str], list[str]] = lambda name: [f"all {name}", f"nothing but {name}"],
    broken: int = -1,
) -> Path:
    """One picture a colour, with two captions by default."""
    texts = ["\n".join(captions(name)) for name in NAMES]
    return write_shards(root, [members("txt", texts, shown(broken=broken))], {"dataset_type.txt": "retrieval\n"})


def pair_set(root: Path, broken: int = -1) -> Path:
    """A set in training's layout: a picture of each colour with two captions."""
    root.mkdir(parents=True)
    texts = [json.dumps({"captions": [name, f"all {name}"]}) for name in NAMES]
    write_tar(root / "00000.tar", members("json", texts, shown(broken=broken)))
    return root


def karpathy_json(folder: Path) -> Path:
    """Karpathy's split file with the pictures of all colours in `images/`; the last is in the training split."""
    (folder / "images").mkdir(parents=True)
    images = []
    for i, name in enumerate(NAMES):
        (folder / "images" / f"{name}.png").write_bytes(picture(name))
        split = "test" if i < len(NAMES) - 1 else "train"
        images.append({"filename": f"{name}.png", "split": split, "sentences": [{"raw": f"all {name}"}]})
    path = folder / "dataset_colours.json"
    path.write_text(json.dumps({"images": images}))
    return path


def folders(root: Path, names: Sequence[str]) -> Path:
    """Class folders of one, two, ... red pictures."""
    for i, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for j in range(i + 1):
            (root / name / f"{j}.PNG").write_bytes(picture("red"))
        (root / name / "notes.txt").write_text("no image")
    return root


class ColourModel(nn.Module):
    """A perfect model of these sets: a picture's feature is its mean colour, a text's the colour that it names."""

    image_size = 8

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = torch.zeros(())
        self.logit_bias: Tensor | None = None
        self.is_captioner = False
        self.passes = 0
        self.modes: set[bool] = set()

    def eval_transform(self) -> EvalTransform:
        return EvalTransform(self.image_size)

    def tokenizer(self, texts: list[str]) -> Tensor:
        return torch.tensor([[next(i for i, name in enumerate(NAMES) if name in text)] for text in texts])

    def image(self, pixels: Tensor) -> Tensor:
        self.passes += 1
        self.modes.add(self.training)
        assert pixels.dtype == torch.uint8 and pixels.shape[1:] == (3, 8, 8)
        return pixels.float().mean((2, 3)) - 125

    def text(self, tokens: Tensor) -> Tensor:
        self.passes += 1
        return torch.tensor(list(COLOURS.values()))[tokens[:, 0]].float() - 125


def load_classes(path: Path) -> ClassificationSet:
    """The set of this path, which is one of classes."""
    loaded = load_set(path)
    assert isinstance(loaded, ClassificationSet), loaded.kind
    return loaded


def evaluation(config: EvalConfig, objective: str = "", sizes: Sequence[int] = ()) -> Evaluation:
    """The evaluation that the settings name."""
    return Evaluation(load_chosen_sets(config), config.batch, objective, sizes)
