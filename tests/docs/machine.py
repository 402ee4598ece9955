"""What the documentation takes as given: data, weights and runs where its pages have them, and shells that read it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ENTER = Path(__file__).parent / "root.sh"
# They read lines on stdin, as typed: an interactive zsh knows no remarks.
SHELLS = {"bash": ["bash", "-e"], "zsh": ["zsh", "-f", "-e", "-i", "-o", "no_prompt_sp"]}
UNSHARE = ["unshare", "--mount", "--map-root-user"]
# Folders in /data, which have the same shards as /data/mine.
ALIKE = ("packed", "pairs", "laion", "laion2b", "laion400m", "cc12m", "datacomp")
# Folders in /data with those shards and the notes of teachers, which the commands before would write.
WITH_TEACHERS = {"l14": ["l14"], "both": ["l14", "h14"]}


def lay(folder: Path) -> None:
    """Write what lies in /data and /models, for `within`. Folders of weights are of tiny models; towers are zeros."""
    import open_clip
    import timm
    import torch
    from safetensors.torch import save_file

    from clipscale.cli.main import main
    from clipscale.data.shards.features import FEATURES_FILE
    from tests.conftest import TINY
    from tests.data.files import picture
    from tests.eval.sets import classification_set, retrieval_set
    from tests.support.bert import save_bert

    data = folder / "data"
    models = folder / "models"
    (data / "pictures").mkdir(parents=True)
    about = {"similarity": 0.5, "title": "a caption", "hard": "another caption"}
    table = [json.dumps({"image": f"{i}.png", "caption": f"picture {i}"} | about) for i in range(300)]
    (data / "pictures/table.jsonl").write_text("\n".join(table))
    for i in range(300):
        (data / f"pictures/{i}.png").write_bytes(picture(i, (70, 70)))
        (data / f"pictures/{i}.txt").write_text(f"picture {i}")
    assert main(["data", "pack", f"{data}/pictures/table.jsonl", f"out={data}/mine", "holdout=10%"]) == 0
    (data / "pictures/table.jsonl").unlink()
    shutil.copytree(data / "pictures", data / "photos")
    for name in ALIKE:
        shutil.copytree(data / "mine", data / name)
    for name, teachers in WITH_TEACHERS.items():
        shutil.copytree(data / "mine", data / name)
        note = {teacher: {"width": 8, "dtype": "float16", "scale": 100.0} for teacher in teachers}
        (data / name / FEATURES_FILE).write_text(json.dumps(note))
    classification_set(data / "imagenet1k")
    classification_set(data / "eval/imagenet1k")
    retrieval_set(data / "mscoco_captions")
    for loss, form, name in (("infcl", "hf", "clip-vit-base-patch32"), ("siglip", "open_clip", "ViT-B-16-SigLIP")):
        run = f"run={folder}/{loss}"
        assert main(["train", *TINY, f"loss={loss}", f"data={data}/mine", run]) == 0
        assert main(["export", run, f"format={form}", f"out={models}/{name}"]) == 0
    for name in ("clip", "CLIP-ViT-B-32-laion2B-s34B-b79K"):
        shutil.copytree(models / "clip-vit-base-patch32", models / name)
    for name in ("bert-base-uncased", "xlm-roberta-base"):
        save_bert(models / name)
    with torch.device("meta"):
        b16 = open_clip.model.CLIP(**open_clip.get_model_config("ViT-B-16")).state_dict()
        towers = {"vit_base_patch16_224": timm.create_model("vit_base_patch16_224").state_dict()}
    towers["b16"] = {name: tensor for name, tensor in b16.items() if name.startswith("visual.")}
    for name, tensors in towers.items():
        file = models / f"{name}.safetensors"
        save_file({key: torch.zeros(tensor.shape, dtype=torch.half) for key, tensor in tensors.items()}, file)
        subprocess.run(["fallocate", "--dig-holes", file])


def within(laid: Path, command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder `cwd`, with what is `laid` in /data and /models. Skips where it cannot be."""
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("a root folder of its own needs `unshare --mount --map-root-user`")
    (laid / "root").mkdir(exist_ok=True)
    return subprocess.run(
        [*UNSHARE, "bash", ENTER, laid / "root", laid, *command], capture_output=True, text=True, **options
    )


def programs(folder: Path, names: str, line: str) -> str:
    """Executables that do `line` of sh, in a folder that comes first in the PATH that is returned."""
    folder.mkdir()
    for name in names.split():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def checked() -> None:
    """Checks the commands on stdin in turn; prints the status and the output of `... --check` as JSON lines."""
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    from clipscale.cli.main import main
    from clipscale.data.shards import store

    store.MAX_WAIT_S = 0.01
    for words in json.load(sys.stdin):
        out = StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            status = main([*words, "--check"])
        print(json.dumps([status, out.getvalue()]), flush=True)


if __name__ == "__main__":
    checked()
