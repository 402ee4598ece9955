"""Small copies of sets as their own sites give them, and torchvision's readers of them, by the sets' names."""

import gzip
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import scipy.io
import torchvision.datasets as tv
from PIL import Image

from tests.eval.sets import write_tar

N = 6
RNG = np.random.default_rng(0)
LABELS = [2, 0, 1, 1, 2, 0]
SCENES = ["a/abbey", "b/bar", "c/church/indoor"]


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def png() -> bytes:
    """A picture of noise; Pillow knows it whatever its name is."""
    out = io.BytesIO()
    Image.fromarray(pixels(6, 5, 3)).save(out, "PNG")
    return out.getvalue()


def ppm() -> bytes:
    return b"P6\n5 6\n255\n" + pixels(6, 5, 3).tobytes()


def mat(values: dict[str, Any], *, packed: bool = True) -> bytes:
    out = io.BytesIO()
    scipy.io.savemat(out, values, do_compression=packed)
    return out.getvalue()


class Python2(pickle._Pickler):
    """Writes bytes as Python 2 did, as CIFAR's files are."""

    def save_text(self, data: bytes) -> None:
        head = b"U" + bytes([len(data)]) if len(data) < 256 else b"T" + struct.pack("<i", len(data))
        self.write(head + data)

    dispatch: ClassVar = {**pickle._Pickler.dispatch, bytes: save_text}


def pickled(value: Any) -> bytes:
    out = io.BytesIO()
    Python2(out, 2).dump(value)
    return out.getvalue()


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">I{values.ndim}I", 0x800 + values.ndim, *values.shape) + values.tobytes()


@dataclass
class Copy:
    """A set: its files, unpacked, and how they are packed."""

    name: str
    files: dict[str, bytes]
    packed: dict[str, str]
    """The published archives, and the beginning of the names of the files in each."""
    torchvision: Callable[[str], Any]
    """Reads `root/inside/...`."""
    inside: str = ""
    here: str = "."
    """The unpacked set's own folder."""
    unchecked: list[str] = field(default_factory=list)
    """What compares torchvision's checksums."""

    def write(self, root: Path) -> Path:
        for name, content in self.files.items():
            path = root / self.inside / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return root / self.inside / self.here

    def pack(self, root: Path) -> Path:
        """The archive, or the folder of several."""
        root.mkdir(parents=True, exist_ok=True)
        for archive, start in self.packed.items():
            members = {name: content for name, content in self.files.items() if name.startswith(start)}
            if archive.endswith(".zip"):
                with zipfile.ZipFile(root / archive, "w", zipfile.ZIP_DEFLATED) as out:
                    for name, content in members.items():
                        out.writestr(name, content)
            elif archive.endswith((".tar", ".tar.gz", ".tgz")):
                write_tar(root / archive, [(f"./{name}", content) for name, content in members.items()])
            else:
                (content,) = members.values()
                (root / archive).write_bytes(gzip.compress(content) if archive.endswith(".gz") else content)
        return root / archive if len(self.packed) == 1 else root

    def theirs(self, root: Path) -> list[tuple[int, bytes]]:
        """Labels and pixels, by torchvision."""
        for name in self.unchecked:
            patch(f"torchvision.datasets.{name}", lambda *_: True).start()
        try:
            return [(int(label), image.convert("RGB").tobytes()) for image, label in self.torchvision(str(root))]
        finally:
            patch.stopall()


def lines(items: list[str]) -> bytes:
    return "".join(f"{item}\n" for item in items).encode()


def folders(top: str, names: list[str], ends: str = ".jpg") -> dict[str, bytes]:
    return {
        f"{top}{name}/{name.rpartition('/')[2]}_{i}{ends}": png() for name in names for i in range(1 + (name < "b"))
    }


def codes() -> list[str]:
    """211 of two capital letters, AD and ZW among them, as countries have."""
    every = [a + b for a in map(chr, range(65, 91)) for b in map(chr, range(65, 91)) if a + b not in ("AD", "ZW")]
    return sorted([*every[:209], "AD", "ZW"])


def copies() -> list[Copy]:
    """Every set whose original archives are read, but for those whose class folders torchvision expects elsewhere."""
    names = ["ash", "birch_tree", "cedar"]
    listed = {name: png() for name in "pqrstu"}
    classes = [names[label] for label in LABELS]
    cifar = np.concatenate([np.array(LABELS, np.uint8)[:, None], pixels(N, 3072)], 1)
    stl, digits, streets = pixels(N, 3, 96, 96), pixels(N, 28, 28), pixels(32, 32, 3, N)
    flowers = {f"jpg/image_{i:05d}.jpg": png() for i in range(1, 9)}
    cars = np.array([(1.0, float(label + 1), f"{i:05d}.jpg") for i, label in enumerate(LABELS)], "O,O,O")
    cars.dtype.names = "bbox_x1", "class", "fname"
    test = lambda kind: lambda root: kind(root, split="test")  # noqa: E731
    return [
        Copy(
            "fgvc_aircraft",
            {f"fgvc-aircraft-2013b/data/images/{i}.jpg": png() for i in range(N)}
            | {
                "fgvc-aircraft-2013b/data/images_variant_test.txt": lines([f"{i} {c}" for i, c in enumerate(classes)]),
                "fgvc-aircraft-2013b/data/variants.txt": lines(names),
            },
            {"fgvc-aircraft-2013b.tar.gz": ""},
            test(tv.FGVCAircraft),
            here="fgvc-aircraft-2013b",
        ),
        Copy(
            "food101",
            {f"food-101/images/{c}/{n}.jpg": data for c, (n, data) in zip(classes, listed.items())}
            | {
                "food-101/meta/test.txt": lines([f"{c}/{n}" for c, n in zip(classes, listed)]),
                "food-101/meta/test.json": json.dumps(
                    {c: [f"{c}/{n}" for d, n in zip(classes, listed) if c == d] for c in names}
                ).encode(),
                "food-101/meta/classes.txt": lines(names),
            },
            {"food-101.tar.gz": ""},
            test(tv.Food101),
            here="food-101",
        ),
        Copy(
            "vtab/dtd",
            {f"dtd/images/{c}/{c}_{n}.jpg": data for c, (n, data) in zip(classes, listed.items())}
            | {"dtd/labels/test1.txt": lines([f"{c}/{c}_{n}.jpg" for c, n in zip(classes, listed)])},
            {"dtd-r1.0.1.tar.gz": ""},
            test(tv.DTD),
            inside="dtd",
            here="dtd",
        ),
        Copy(
            "vtab/pets",
            {f"images/{c}_{n}.jpg": data for c, (n, data) in zip(classes, listed.items())}
            | {"annotations/test.txt": lines([f"{c}_{n} {k + 1} 1 1" for c, n, k in zip(classes, listed, LABELS)])},
            {"images.tar.gz": "images/", "annotations.tar.gz": "annotations/"},
            test(tv.OxfordIIITPet),
            inside="oxford-iiit-pet",
        ),
        Copy(
            "gtsrb",
            {f"GTSRB/Final_Test/Images/{i:05d}.ppm": ppm() for i in range(N)}
            | {
                "GTSRB/Final_Test/Images/GT-final_test.test.csv": b"Filename;Width\n",
                "GT-final_test.csv": lines(
                    ["Filename;Width;Height;ClassId", *(f"{i:05d}.ppm;5;6;{k}" for i, k in enumerate(LABELS))]
                ),
            },
            {"GTSRB_Final_Test_Images.zip": "GTSRB/", "GTSRB_Final_Test_GT.zip": "GT-"},
            test(tv.GTSRB),
            inside="gtsrb",
        ),
        Copy(
            "vtab/flowers",
            flowers
            | {
                "imagelabels.mat": mat({"labels": np.array([[1, 2, 3, 3, 2, 1, 1, 2]], np.uint8)}),
                "setid.mat": mat({"trnid": [[2, 5]], "valid": [[1]], "tstid": [[8, 3, 4, 6, 7]]}, packed=False),
            },
            {"102flowers.tgz": "jpg/", "imagelabels.mat": "imagelabels", "setid.mat": "setid"},
            test(tv.Flowers102),
            inside="flowers-102",
            unchecked=["flowers102.check_integrity"],
        ),
        Copy(
            "cars",
            {f"cars_test/{i:05d}.jpg": png() for i in range(N)}
            | {
                "devkit/cars_meta.mat": mat({"class_names": np.array([*names, "d"], object)[None]}),
                "cars_test_annos_withlabels.mat": mat({"annotations": cars[None]}),
            },
            {
                "cars_test.tgz": "cars_test/",
                "car_devkit.tgz": "devkit/",
                "cars_test_annos_withlabels.mat": "cars_test_annos",
            },
            test(tv.StanfordCars),
            inside="stanford_cars",
        ),
        Copy(
            "sun397",
            {f"SUN397/{place}/sun_{i}.jpg": png() for place in SCENES for i in range(2)}
            | {"SUN397/ClassName.txt": lines([f"/{place}" for place in SCENES])},
            {"SUN397.tar.gz": ""},
            tv.SUN397,
            here="SUN397",
        ),
        Copy(
            "country211",
            folders("country211/test/", codes()) | folders("country211/valid/", ["AD"]),
            {"country211.tgz": ""},
            test(tv.Country211),
            here="country211",
        ),
        Copy(
            "renderedsst2",
            folders("rendered-sst2/test/", ["negative", "positive"], ".png")
            | folders("rendered-sst2/train/", ["negative", "positive"], ".png"),
            {"rendered-sst2.tgz": ""},
            test(tv.RenderedSST2),
            here="rendered-sst2",
        ),
        Copy(
            "vtab/eurosat",
            folders("2750/", ["AnnualCrop", "Forest", "HerbaceousVegetation", *(f"Z{i}" for i in range(7))]),
            {"EuroSAT.zip": ""},
            tv.EuroSAT,
            inside="eurosat",
            here="2750",
        ),
        Copy(
            "cifar10",
            {
                "cifar-10-batches-bin/test_batch.bin": cifar.tobytes(),
                "cifar-10-batches-bin/batches.meta.txt": lines([*names, ""]),
            }
            | {f"cifar-10-batches-py/{name}": content for name, content in cifar_python(cifar, names).items()},
            {"cifar-10-binary.tar.gz": "cifar-10-batches-bin/"},
            lambda root: tv.CIFAR10(root, train=False),
            here="cifar-10-batches-bin",
            unchecked=["cifar.check_integrity"],
        ),
        Copy(
            "vtab/cifar100",
            {
                "cifar-100-binary/test.bin": np.insert(cifar, 0, 7, 1).tobytes(),
                "cifar-100-binary/fine_label_names.txt": lines(names),
            }
            | {
                f"cifar-100-python/{n}": c
                for n, c in cifar_python(cifar, names, "fine_labels", "fine_label_names").items()
            },
            {"cifar-100-binary.tar.gz": "cifar-100-binary/"},
            lambda root: tv.CIFAR100(root, train=False),
            here="cifar-100-binary",
            unchecked=["cifar.check_integrity"],
        ),
        Copy(
            "mnist",
            {
                "t10k-images-idx3-ubyte": idx(digits),
                "t10k-labels-idx1-ubyte": idx(np.array(LABELS, np.uint8)),
            },
            {"t10k-images-idx3-ubyte.gz": "t10k-images", "t10k-labels-idx1-ubyte.gz": "t10k-labels"},
            lambda root: tv.MNIST(root, train=False),
            inside="MNIST/raw",
            unchecked=["mnist.check_integrity"],
        ),
        Copy(
            "stl10",
            {
                "stl10_binary/test_X.bin": stl.swapaxes(2, 3).tobytes(),
                "stl10_binary/test_y.bin": bytes(label + 1 for label in LABELS),
                "stl10_binary/class_names.txt": lines(names),
            },
            {"stl10_binary.tar.gz": ""},
            test(tv.STL10),
            here="stl10_binary",
            unchecked=["stl10.check_integrity"],
        ),
        Copy(
            "vtab/svhn",
            {"test_32x32.mat": mat({"X": streets, "y": np.array([[label or 10] for label in LABELS], np.uint8)})},
            {"test_32x32.mat": ""},
            test(tv.SVHN),
            unchecked=["svhn.check_integrity"],
        ),
    ]


def imagenet() -> Copy:
    """Of three classes and a synset above them; torchvision reads the archives themselves."""
    wnids = ["n01484850", "n01440764", "n01443537", "n00000001"]
    synsets = np.array([(n + 1, w, "words", "gloss", 2 * (n == 3)) for n, w in enumerate(wnids)], "O,O,O,O,O")
    synsets.dtype.names = "ILSVRC2012_ID", "WNID", "words", "gloss", "num_children"
    data = "ILSVRC2012_devkit_t12/data"
    files = {f"ILSVRC2012_val_{i + 1:08d}.JPEG": png() for i in range(N)}
    files |= {f"{data}/meta.mat": mat({"synsets": synsets[:, None]})}
    files |= {f"{data}/ILSVRC2012_validation_ground_truth.txt": lines([str(label + 1) for label in LABELS])}
    archives = {"ILSVRC2012_img_val.tar": "ILSVRC2012_val", "ILSVRC2012_devkit_t12.tar.gz": "ILSVRC2012_devkit"}
    return Copy(
        "imagenet1k", files, archives, lambda root: tv.ImageNet(root, "val"), unchecked=["imagenet._verify_archive"]
    )


def cifar_python(
    rows: np.ndarray, names: list[str], labels: str = "labels", key: str = "label_names"
) -> dict[str, bytes]:
    """The test batch and the names, as in CIFAR-10's or CIFAR-100's python version."""
    of_100 = labels == "fine_labels"
    batch = {
        b"data": np.ascontiguousarray(rows[:, 1:]),
        labels.encode(): rows[:, 0].tolist(),
        b"batch_label": b"testing",
    }
    meta = {key.encode(): [name.encode() for name in names]}
    return {"test" if of_100 else "test_batch": pickled(batch), "meta" if of_100 else "batches.meta": pickled(meta)}
