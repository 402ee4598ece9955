"""What the documentation takes as given: data, weights and runs where its pages have them, and shells that read it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENTER = ROOT / "tests/support/root.sh"
SHELLS = {"bash": ["bash", "-e"], "zsh": ["zsh", "-f", "-e", "-i", "-o", "no_prompt_sp"]}
"""They read lines on stdin, as typed: an interactive zsh knows no remarks."""
UNSHARE = ["unshare", "--mount", "--map-root-user"]


LARGE = dict.fromkeys(("laion", "laion2b", "laion400m", "cc12m", "datacomp", "l14", "both"), 2)
SHARDS = LARGE | dict.fromkeys(("mine", "packed", "pairs"), 300)
"""Folders in /data, and the samples of their first shard."""


def lay(folder: Path) -> None:
    """Write what lies in /data and /models, for `within`."""
    from tests.data.files import picture, write_tar
    from tests.eval.sets import classification_set, pair_set, retrieval_set

    data = folder / "data"
    about = {"similarity": 0.5, "title": "a caption", "caption": "a caption", "hard": ["no caption", "not one"]}
    pictures = [picture(i, (70, 70)) for i in range(300)]
    (data / "pictures").mkdir(parents=True)
    members = []
    for i, content in enumerate(pictures):
        (data / f"pictures/{i}.png").write_bytes(content)
        (data / f"pictures/{i}.txt").write_text(f"picture {i}")
        texts = ((f"{i:03}.json", json.dumps(about).encode()), (f"{i:03}.txt", f"picture {i}".encode()))
        members += [*texts, (f"{i:03}.png", content)]
    for name, count in SHARDS.items():
        (data / name).mkdir()
        write_tar(data / name / "00000.tar", members[: 3 * count])
    note = {"width": 768, "dtype": "float16", "scale": 100.0}
    (data / "both/features.json").write_text(json.dumps({"l14": note, "h14": note}))
    classification_set(data / "imagenet1k")
    classification_set(data / "eval/imagenet1k")
    retrieval_set(data / "mscoco_captions")
    for name in ("packed", "pairs"):
        pair_set(data / name / "holdout")
    lay_weights(folder / "models")


def lay_weights(folder: Path) -> None:
    """Weights of the real architectures, all zero: files with holes."""
    import open_clip
    import timm
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    siglip = open_clip.get_model_config("ViT-B-16-SigLIP")
    siglip.pop("custom_text")
    with torch.device("meta"):
        b16 = open_clip.model.CLIP(**open_clip.get_model_config("ViT-B-16")).state_dict()
        whole = open_clip.model.CustomTextCLIP(**siglip).state_dict()
        tower = timm.create_model("vit_base_patch16_224").state_dict()
        clip = transformers.CLIPModel(transformers.CLIPConfig())
    write_zeros(folder / "b16.safetensors", {n: x for n, x in b16.items() if n.startswith("visual.")})
    write_zeros(folder / "vit_base_patch16_224.safetensors", tower)
    write_zeros(folder / "clip-vit-base-patch32/model.safetensors", clip.state_dict())
    clip.config.save_pretrained(folder / "clip-vit-base-patch32")
    write_zeros(folder / "ViT-B-16-SigLIP/open_clip_model.safetensors", whole)
    description = {"model_cfg": siglip, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (folder / "ViT-B-16-SigLIP/open_clip_config.json").write_text(json.dumps(description))
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, "<unk>"))
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.save_pretrained(folder / "ViT-B-16-SigLIP")


def write_zeros(path: Path, tensors: Mapping[str, Any]) -> None:
    """A safetensors file of zeros of these shapes, in float16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header, end = {}, 0
    for name, tensor in tensors.items():
        size = 2 * tensor.numel()
        header[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)


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
    """Of commands on stdin, one after another, the status and the output of `... --check`, as JSON lines."""
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    from clipscale.cli.main import main
    from clipscale.data.shards import remote

    remote.LONGEST_WAIT_S = 0.01
    for words in json.load(sys.stdin):
        out = StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            status = main([*words, "--check"])
        print(json.dumps([status, out.getvalue()]), flush=True)


if __name__ == "__main__":
    checked()
