"""What a trained network sees in a picture of one's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from pcdeq.data.userdata import cut_and_scale, open_picture
from pcdeq.errors import PcdeqError
from pcdeq.models import load
from pcdeq.recipes import ImageShape, paper_dataset
from pcdeq.training.evaluation import Device, pick_device
from pcdeq.training.run import Run, Which

INK_BOX = 20 / 28  # MNIST scales a digit into 20 of 28 pixels and centres it by mass


@dataclass(frozen=True)
class Prediction:
    """The classes that a network finds likeliest for one picture, best first."""

    path: Path
    ranking: tuple[tuple[str, float], ...]  # class and probability
    preparation: str  # what was done to the picture

    @property
    def label(self) -> str:
        """The likeliest class."""
        return self.ranking[0][0]


def predict(
    run: str | os.PathLike[str] | Run,
    pictures: Sequence[str | os.PathLike[str]],
    *,
    checkpoint: Which = "last",
    device: Device = "auto",
    best: int = 3,
) -> list[Prediction]:
    """Classify picture files with the network of a run.

    A picture of another size is brought to the network's: for the MNIST-likes as their makers did it
    (light on black, the ink scaled and centred), otherwise by cutting out the middle and scaling it.

    >>> import tempfile, pcdeq.training
    >>> from pcdeq.recipes import TrainConfig
    >>> folder = Path(tempfile.mkdtemp())
    >>> config = TrainConfig("pcdeq-1-l-tanh", epochs=1, channels=(8,), out=folder / "run")
    >>> run = pcdeq.training.train(config, progress="none")
    >>> Image.new("L", (100, 80), "white").save(folder / "paper.png")
    >>> (prediction,) = predict(run, [folder / "paper.png"])
    >>> prediction.label in "0123456789", len(prediction.ranking), prediction.preparation
    (True, 3, 'inverted, ink scaled and centred')
    """
    run = Run.open(run)
    paths = [Path(picture) for picture in pictures]
    ink = paper_dataset(run.config.data) == "mnist"
    prepared = [prepare_picture(open_picture(path), run.image_shape, ink) for path in paths]
    network, where = load(run, checkpoint), pick_device(device)
    images = torch.stack([image for image, _ in prepared]).to(where)
    with torch.inference_mode():
        probabilities = network.to(where)(run.preprocessing(images)).softmax(1)
    if not bool(probabilities.isfinite().all()):
        raise PcdeqError(f"the network of {run.path} gives infinite numbers or NaN: its weights are of no use")
    classes = run.preprocessing.classes
    predictions = []
    for path, (_, preparation), row in zip(paths, prepared, probabilities, strict=True):
        ranking = sorted(zip(classes, row.tolist(), strict=True), key=itemgetter(1), reverse=True)
        predictions.append(Prediction(path, tuple(ranking[:best]), preparation))
    return predictions


def prepare_picture(picture: Image.Image, image_shape: ImageShape, ink: bool) -> tuple[Tensor, str]:
    """A picture as uint8 (channels, height, width), and what was done to it.

    >>> grey, done = prepare_picture(Image.new("RGB", (64, 32), "white"), (1, 28, 28), ink=False)
    >>> grey.shape, done
    (torch.Size([1, 28, 28]), 'cut to its middle and scaled')
    """
    channels, height, width = image_shape
    picture = _on_white(ImageOps.exif_transpose(picture)).convert("L" if channels == 1 else "RGB")
    done = []
    if ink and (light := _border(picture)) > 127:
        darkness = (1 - np.asarray(picture) / light).clip(0, 1)  # 0 for paper, 1 for black ink
        picture = Image.fromarray((255 * darkness).round().astype(np.uint8))
        done.append("inverted")
    if picture.size != (width, height):
        if ink:
            picture = _centre_ink(picture, (width, height))
            done.append("ink scaled and centred")
        else:
            picture = cut_and_scale(picture, (width, height))
            done.append("cut to its middle and scaled")
    pixels = torch.from_numpy(np.array(picture)).reshape(height, width, channels)
    return pixels.permute(2, 0, 1).contiguous(), ", ".join(done) or "as it is"


def _on_white(picture: Image.Image) -> Image.Image:
    """Transparent parts as paper."""
    if not picture.has_transparency_data:
        return picture
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)


def _border(picture: Image.Image) -> float:
    """How bright the frame of a grey picture is, typically."""
    pixels = np.asarray(picture)
    return float(np.median(np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])))


def _centre_ink(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale what is light on black into the middle of a small picture, its centre of mass at the centre."""
    picture = ImageOps.autocontrast(picture)
    box = Image.fromarray(np.asarray(picture) > 64).getbbox()
    if box is None:  # nothing but black
        return Image.new("L", size)
    ink = picture.crop(box)
    scale = min(INK_BOX * size[0] / ink.width, INK_BOX * size[1] / ink.height)
    ink = ink.resize((max(1, round(ink.width * scale)), max(1, round(ink.height * scale))), Image.Resampling.LANCZOS)
    mass = np.asarray(ink, dtype=np.float64)
    left = round(size[0] / 2 - 0.5 - np.average(np.arange(ink.width), weights=mass.sum(0)))
    top = round(size[1] / 2 - 0.5 - np.average(np.arange(ink.height), weights=mass.sum(1)))
    canvas = Image.new("L", size)
    canvas.paste(ink, (left, top))
    return canvas
