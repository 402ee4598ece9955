"""Every program that the page on exports names loads the folders, and computes what the run's model does."""

import json
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from clipscale.config.data import DataConfig
from clipscale.config.model import ModelConfig
from clipscale.config.presets import PACKAGE
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights.hugging_face import TANH
from clipscale.models.weights.load_weights import completed_by_weights
from clipscale.tools.embed.settings import EmbedConfig
from clipscale.tools.embed.verb import main as embed
from clipscale.tools.export.hugging_face import write_tokenizer
from clipscale.tools.export.settings import ExportSettings
from clipscale.tools.export.verb import main
from tests.data.files import picture, sample, write_tar
from tests.support.bert import save_bert
from tests.support.checkpoints import save_model
from tests.support.gradients import gradients
from tests.support.towers import architecture

pytestmark = pytest.mark.slow
SIDE = 32
WIDTH = 16
# Of a caption; transformers' pipeline pads for SigLIP to 64, whatever the tokenizer says.
TOKENS = {"clip": 12, "siglip": 64}
# transformers resizes by another library: single pixels are one of 255 steps off, and features so much.
ROUNDING = 1e-3
TEXTS = ["a red ring", "two cats on a chair"]
KINDS = ("clip", "siglip")


def client(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed (clipscale[clients])")


def clip_run(folder: Path) -> tuple[ClipModel, ModelConfig]:
    config = ModelConfig("own", architecture(SIDE, 8, TOKENS["clip"]))
    return build_model(config), config


def siglip_run(folder: Path) -> tuple[ClipModel, ModelConfig]:
    """From a folder of transformers, as all SigLIPs of sizes of their own, with CLIP's words as its tokenizer."""
    transformers = client("transformers")
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_act": TANH}
    text = sizes | {"max_position_embeddings": TOKENS["siglip"], "vocab_size": 49408}
    vision = sizes | {"image_size": SIDE, "patch_size": 8}
    transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    write_tokenizer(folder, TOKENS["siglip"])
    words = json.loads((folder / "vocab.json").read_text())
    words["red</w>"], words["ring</w>"] = words["ring</w>"], words["red</w>"]
    (folder / "vocab.json").write_text(json.dumps(words))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"model_input_names": ["input_ids"]}))
    config = completed_by_weights(ModelConfig(name="", weights=str(folder)))
    return build_model(config), config


class Exported:
    """A run's model, what it says of two pictures and two texts, and its folders."""

    def __init__(self, root: Path, kind: str) -> None:
        torch.manual_seed(3)
        made = clip_run if kind == "clip" else siglip_run
        self.kind = kind
        self.model, config = made(root / "start")
        for parameter in self.model.parameters():
            if parameter.ndim < 2:  # biases and gains begin as zeros and ones
                parameter.data += 0.1 * torch.randn_like(parameter)
        self.model.eval()
        self.run = root / "run"
        save_model(self.run, self.model, config)
        self.hf = self.folder("hf")
        # Twice the side, so that every program crops and resizes alike.
        self.pictures = [Image.open(BytesIO(picture(seed, (2 * SIDE, 2 * SIDE)))).convert("RGB") for seed in (1, 2)]
        with torch.no_grad():
            self.images = self.model.image(self.pixels())
            self.tokens = self.model.tokenizer(TEXTS)
            self.texts = self.model.text(self.tokens)

    def folder(self, format: str) -> Path:
        return main(ExportSettings(run=str(self.run), format=format))

    def pixels(self) -> Tensor:
        resized = self.model.eval_transform().resized
        return torch.stack([torch.from_numpy(np.array(resized(image))).permute(2, 0, 1) for image in self.pictures])

    def normalised(self) -> Tensor:
        return self.model.image.encoder_inputs(self.pixels())


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    made: dict[str, Exported] = {}

    def of_kind(kind: str) -> Exported:
        if kind not in made:
            made[kind] = Exported(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return of_kind


def assert_same(ours: Tensor, theirs: Any, atol: float = 1e-5) -> None:
    """Assert that features are the same up to their lengths."""
    theirs = torch.as_tensor(getattr(theirs, "pooler_output", theirs)).detach().float()
    torch.testing.assert_close(F.normalize(theirs, dim=-1), ours, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers(exports: Callable[[str], Exported], kind: str) -> None:
    transformers = client("transformers")
    export = exports(kind)
    name = {"clip": "CLIP", "siglip": "Siglip"}[kind]
    processor = transformers.AutoProcessor.from_pretrained(export.hf)
    inputs = processor(
        text=TEXTS, images=export.pictures, padding="max_length", max_length=TOKENS[kind], return_tensors="pt"
    )
    torch.testing.assert_close(inputs["pixel_values"], export.normalised(), atol=1 / 64, rtol=0)
    inputs["pixel_values"] = export.normalised()
    pixels = {"pixel_values": inputs["pixel_values"]}
    tokens = {"input_ids": inputs["input_ids"]}
    for of in ("Auto", name):
        model = getattr(transformers, f"{of}Model").from_pretrained(export.hf).eval()
        assert_same(export.images, model.get_image_features(**pixels))
        assert_same(export.texts, model.get_text_features(**tokens))
    image = getattr(transformers, f"{name}VisionModel").from_pretrained(export.hf).eval()
    text = getattr(transformers, f"{name}TextModel").from_pretrained(export.hf).eval()
    if kind == "siglip":
        assert_same(export.images, image(**pixels))
        assert_same(export.texts, text(**tokens))
    else:
        image = transformers.CLIPVisionModelWithProjection.from_pretrained(export.hf).eval()
        text = transformers.CLIPTextModelWithProjection.from_pretrained(export.hf).eval()
        assert_same(export.images, image(**pixels).image_embeds)
        assert_same(export.texts, text(**tokens).text_embeds)


def test_the_cut_of_transformers_is_a_pixel_off_on_odd_sizes(exports: Callable[[str], Exported]) -> None:
    transformers = client("transformers")
    export = exports("clip")
    processor = transformers.AutoProcessor.from_pretrained(export.hf)
    wide = Image.open(BytesIO(picture(1, (79, 64)))).convert("RGB")  # resized to 39 x 32
    theirs = processor(images=wide, return_tensors="pt")["pixel_values"][0]
    pixels = torch.from_numpy(np.array(export.model.eval_transform().resized(wide))).permute(2, 0, 1)
    ours = export.model.image.encoder_inputs(pixels[None])[0]
    torch.testing.assert_close(theirs[:, :, 1:], ours[:, :, :-1], atol=1 / 32, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pipeline_of_transformers(exports: Callable[[str], Exported], kind: str) -> None:
    transformers = client("transformers")
    export = exports(kind)
    pipe = transformers.pipeline("zero-shot-image-classification", str(export.hf), device="cpu")
    answers = pipe(export.pictures[0], candidate_labels=TEXTS, hypothesis_template="{}")
    scores = export.images[:1] @ export.texts.T * export.model.logit_scale.exp()
    if kind == "siglip":
        assert export.model.logit_bias is not None
        expected = (scores + export.model.logit_bias).sigmoid()
    else:
        expected = scores.softmax(-1)
    found = [next(a["score"] for a in answers if a["label"] == text) for text in TEXTS]
    assert found == pytest.approx(expected[0].tolist(), abs=ROUNDING)


def test_the_penultimate_layer_for_a_language_model(exports: Callable[[str], Exported]) -> None:
    transformers = client("transformers")
    export = exports("clip")
    tower = transformers.CLIPVisionModel.from_pretrained(export.hf).eval()
    layers: list[Tensor] = []
    loaded = open_clip.create_model_from_pretrained(f"local-dir:{export.folder('open_clip')}")[0].eval()
    loaded.visual.transformer.resblocks[-2].register_forward_hook(lambda *call: layers.append(call[-1]))
    with torch.no_grad():
        loaded.encode_image(export.normalised())
        states = tower(pixel_values=export.normalised(), output_hidden_states=True).hidden_states
    torch.testing.assert_close(states[-2], layers[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_sentence_transformers(exports: Callable[[str], Exported], kind: str) -> None:
    library = client("sentence_transformers")
    export = exports(kind)
    model = library.SentenceTransformer(str(export.hf), device="cpu")
    if kind == "siglip":
        model[0].processing_kwargs = {"text": {"padding": "max_length"}}
    assert_same(export.images, model.encode(export.pictures), ROUNDING)
    assert_same(export.texts, model.encode(TEXTS))


def test_gradients_are_those_of_the_cached_loss_of_sentence_transformers(tmp_path: Path) -> None:
    """The code is the block of docs/howto/gradcache.md, with a model of the library."""
    library = client("sentence_transformers")
    save_bert(tmp_path)
    modules = client("sentence_transformers.models")
    losses = client("sentence_transformers.losses")
    tower = [modules.Transformer(str(tmp_path)), modules.Pooling(32)]
    model = library.SentenceTransformer(modules=tower, device="cpu").eval()
    texts = [["a red ring", "blue", "a ring", "red"], ["red ring", "a blue", "ring", "a red"], ["blue ring"] * 4]
    columns = [model.tokenize(column) for column in texts]
    theirs = losses.CachedMultipleNegativesRankingLoss(model, scale=20, mini_batch_size=3)
    expected = theirs(columns, torch.zeros(4))
    expected.backward()
    of_theirs = gradients(model)
    model.zero_grad()
    blocks = re.findall(r"```python\n(.*?)```", (PACKAGE.parent / "docs/howto/gradcache.md").read_text(), re.S)
    (code,) = [block for block in blocks if "sentence_embedding" in block]
    names = {"model": model, "columns": columns}
    exec(code, names)
    assert float(names["value"]) == pytest.approx(expected.item(), rel=1e-5)
    of_ours = gradients(model)
    assert len(of_theirs) > 20
    for name, gradient in of_theirs.items():
        torch.testing.assert_close(of_ours[name], gradient, atol=1e-4, rtol=1e-3, msg=name)


def test_timm(exports: Callable[[str], Exported]) -> None:
    timm = client("timm")
    export = exports("clip")
    file = export.folder("open_clip") / "open_clip_model.safetensors"
    sizes = {"img_size": SIDE, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": WIDTH}
    overlay = {"file": str(file), "num_classes": WIDTH}
    name = "vit_base_patch32_clip_224"
    tower = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **sizes).eval()
    assert_same(export.images, tower(export.normalised()))


def test_timm_has_the_image_tower_of_a_siglip(tmp_path: Path) -> None:
    """The model has a published size, as each of timm's names has one. The text tower is small, with CLIP's words."""
    timm = client("timm")
    torch.manual_seed(3)
    details = open_clip.get_model_config("ViT-B-16-SigLIP")
    text = {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    config = ModelConfig("own", details | {"text_cfg": text})
    model = build_model(config).eval()
    save_model(tmp_path, model, config)
    file = main(ExportSettings(run=str(tmp_path), format="open_clip")) / "open_clip_model.safetensors"
    overlay = {"file": str(file), "num_classes": 0}
    name = "vit_base_patch16_siglip_224"
    tower = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=0).eval()
    pixels = torch.randint(256, (2, 3, 224, 224), dtype=torch.uint8)
    with torch.no_grad():
        assert_same(model.image(pixels), tower(model.image.encoder_inputs(pixels)))


def towers(export: Exported) -> tuple[Any, Any]:
    """The image and text tower: open_clip's of CLIP, and of a small SigLIP, which it does not build, transformers'."""
    if export.kind == "siglip":
        transformers = client("transformers")
        image = transformers.SiglipVisionModel.from_pretrained(export.hf, return_dict=False)
        text = transformers.SiglipTextModel.from_pretrained(export.hf, return_dict=False)
    else:
        model, _ = open_clip.create_model_from_pretrained(f"local-dir:{export.folder('open_clip')}")
        image, text = model.visual, model.text
    return image.eval(), text.eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx_runtime_with_other_batches(
    exports: Callable[[str], Exported], kind: str, dynamo: bool, tmp_path: Path
) -> None:
    runtime = client("onnxruntime")
    client("onnxscript")
    export = exports(kind)
    image, text = towers(export)
    batch = (
        {"dynamic_shapes": ({0: torch.export.Dim("batch")},)} if dynamo else {"dynamic_axes": {"input": {0: "batch"}}}
    )
    for tower, inputs, expected in (
        (image, export.normalised(), export.images),
        (text, export.tokens, export.texts),
    ):
        file = tmp_path / "tower.onnx"
        torch.onnx.export(tower, (inputs,), file, dynamo=dynamo, input_names=["input"], **batch)
        session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        *_, found = session.run(None, {"input": inputs.repeat(2, *[1] * (inputs.ndim - 1)).numpy()})
        assert_same(expected.repeat(2, 1), found)


def test_diffusers(exports: Callable[[str], Exported]) -> None:
    diffusers = client("diffusers")
    transformers = client("transformers")
    export = exports("clip")
    text = transformers.CLIPTextModel.from_pretrained(export.hf)
    width = text.config.hidden_size
    blocks = {"block_out_channels": (32,), "layers_per_block": 1}
    pipe = diffusers.StableDiffusionPipeline(
        text_encoder=text,
        tokenizer=transformers.CLIPTokenizer.from_pretrained(export.hf),
        vae=diffusers.AutoencoderKL(**blocks),
        unet=diffusers.UNet2DConditionModel(
            sample_size=8,
            cross_attention_dim=width,
            down_block_types=("CrossAttnDownBlock2D",),
            up_block_types=("CrossAttnUpBlock2D",),
            **blocks,
        ),
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
    )
    pipe.set_progress_bar_config(disable=True)
    states, _ = pipe.encode_prompt(TEXTS, "cpu", 1, False)
    ends = export.tokens.argmax(-1)
    projected = states[torch.arange(len(TEXTS)), ends] @ export.model.text.encoder.text_projection
    assert_same(export.texts, projected)
    assert pipe(TEXTS[0], num_inference_steps=1, output_type="np").images.shape == (1, 8, 8, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_and_back(exports: Callable[[str], Exported], kind: str, tmp_path: Path) -> None:
    peft = client("peft")
    transformers = client("transformers")
    export = exports(kind)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(transformers.AutoModel.from_pretrained(export.hf), config)
    assert {name.rpartition(".lora_")[0] != "" for name, p in model.named_parameters() if p.requires_grad} == {True}
    model.merge_and_unload().save_pretrained(tmp_path)
    transformers.AutoProcessor.from_pretrained(export.hf).save_pretrained(tmp_path)
    again = build_model(completed_by_weights(ModelConfig(name="", weights=str(tmp_path)))).eval()
    merged = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert_same(again.image(export.pixels()), merged.get_image_features(pixel_values=export.normalised()))
        assert not torch.allclose(again.image(export.pixels()), export.images, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_faiss(exports: Callable[[str], Exported], kind: str, tmp_path: Path) -> None:
    faiss = client("faiss")
    export = exports(kind)
    shards = [write_tar(tmp_path / f"{k}.tar", [*sample(f"{k}a", k), *sample(f"{k}b", k + 4)]) for k in range(4)]
    data = DataConfig(train=[str(shard) for shard in shards])
    settings = EmbedConfig(run=str(export.run), data=data, out=str(tmp_path / "out"), device="cpu")
    out = Path(embed(settings)["out"])
    rows = np.concatenate([np.load(file) for file in sorted(out.glob("*.image.npy"))]).astype("float32")
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    scores, nearest = index.search(rows, 2)
    assert nearest[:, 0].tolist() == list(range(8))
    assert scores[:, 0] == pytest.approx(1, abs=1e-2)
