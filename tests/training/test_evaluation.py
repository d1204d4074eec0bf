"""After training: evaluate, load, predict, and the figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from PIL import Image, ImageDraw, ImageOps

from pcdeq.data import load_dataset
from pcdeq.errors import DataError, UsageError
from pcdeq.models import load
from pcdeq.report import figures
from pcdeq.training import Evaluation, evaluate, train
from pcdeq.training.evaluation import pick_device
from pcdeq.training.prediction import predict, prepare_picture


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_data):
    """A network that has learned something: three epochs of the bundled digits, two seconds."""
    from pcdeq.recipes import TrainConfig

    out = tmp_path_factory.mktemp("run")
    return train(TrainConfig("pcdeq-1-l-relu6", epochs=3, out=out, device="cpu"), progress="none")


class TestEvaluate:
    def test_agrees_with_the_last_epoch(self, run):
        evaluation, dataset = evaluate(run, device="cpu")
        assert evaluation.accuracy == run.accuracy > 85
        assert evaluation.loss == pytest.approx(run.metrics[-1].test_loss, rel=1e-4)
        assert (len(evaluation.labels), dataset.name) == (1000, "mnist-mini")

    def test_does_not_depend_on_the_batch(self, run):
        one, _ = evaluate(run, device="cpu", batch_size=7)
        other, _ = evaluate(run, device="cpu", batch_size=1000)
        assert (one.predictions != other.predictions).sum() <= 1  # rounding, at most

    def test_other_data(self, run, tiny_data):
        evaluation, _ = evaluate(run, str(tiny_data), device="cpu")
        assert len(evaluation.labels) == 50
        assert evaluation.accuracy > 80

    def test_data_that_do_not_fit(self, run, tmp_path):
        import numpy as np

        np.savez(tmp_path / "small.npz", images=np.zeros((10, 20, 20), np.uint8), labels=np.arange(10) % 2)
        with pytest.raises(UsageError, match="trained on 10 classes of 1 x 28 x 28 images; small has 2 classes"):
            evaluate(run, str(tmp_path / "small.npz"), device="cpu")

    def test_by_hand(self, run):
        model = load(run)
        test = load_dataset("mnist-mini").test
        with torch.no_grad():
            logits = model(model.preprocessing(test.images))
        assert 100 * (logits.argmax(1) == test.labels).double().mean().item() == pytest.approx(run.accuracy, abs=0.11)
        assert model.preprocessing.classes == tuple("0123456789")

    def test_confusion_and_worst_errors(self):
        labels, predictions = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 2, 1, 0])
        result = Evaluation(labels, predictions, torch.tensor([0.9, 0.5, 0.8, 0.6]), 0.0, (), 0, 0.0)
        assert result.confusion(3).tolist() == [[1, 0, 0], [0, 0, 1], [1, 1, 0]]
        assert result.worst_errors(2).tolist() == [2, 3]
        assert result.accuracy == 25.0

    def test_no_such_device(self):
        if torch.cuda.is_available():
            pytest.skip("there is one")
        with pytest.raises(UsageError, match="no cuda"):
            pick_device("cuda")

    def test_weights_that_do_not_fit(self, tiny):
        run = train(replace(tiny, epochs=1, lr_step=None), progress="none")
        config = run.path / "config.json"
        config.write_text(config.read_text().replace('"classes": [\n      "0",', '"classes": [\n      "0", "more",'))
        with pytest.raises(DataError, match="of another run"):
            load(run.path)


class TestPredict:
    def test_pictures_as_people_have_them(self, run, tmp_path):
        test = load_dataset("mnist-mini").test
        chosen = range(0, 1000, 40)
        paths = []
        for index in chosen:  # dark on white paper, large, in colour, off the centre
            digit = ImageOps.invert(Image.fromarray(test.images[index, 0].numpy()).resize((140, 140)))
            sheet = Image.new("RGB", (300, 240), (240, 235, 225))
            sheet.paste(digit.convert("RGB").point(lambda value: value * 235 // 255), (110, 40))
            sheet.save(path := tmp_path / f"{index}.png")
            paths.append(path)
        results = predict(run, paths, device="cpu")
        right = sum(result.label == str(int(test.labels[i])) for i, result in zip(chosen, results, strict=True))
        assert right >= 0.8 * len(paths)
        assert results[0].preparation == "inverted, ink scaled and centred"
        assert sum(probability for _, probability in results[0].ranking) <= 1.0 + 1e-6

    def test_a_picture_of_the_right_size_is_left_alone(self):
        test = load_dataset("mnist-mini").test
        image, done = prepare_picture(Image.fromarray(test.images[3, 0].numpy()), (1, 28, 28), ink=True)
        assert torch.equal(image, test.images[3])
        assert done == "as it is"

    def test_ink_is_scaled_and_centred_as_in_mnist(self):
        picture = Image.new("L", (200, 100), "white")
        ImageDraw.Draw(picture).rectangle((10, 10, 49, 89), fill="black")
        image, _ = prepare_picture(picture, (1, 28, 28), ink=True)
        rows, columns = (image[0] > 64).nonzero().unbind(1)
        assert (rows.min().item(), rows.max().item()) == (4, 23)
        assert columns.min() >= 9
        assert columns.max() <= 18

    @pytest.mark.parametrize(("channels", "ink"), [(1, True), (1, False), (3, False)])
    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK"])
    def test_every_kind_of_picture(self, mode, channels, ink):
        image, _ = prepare_picture(Image.new(mode, (50, 30)), (channels, 32, 32), ink)
        assert (image.shape, image.dtype) == ((channels, 32, 32), torch.uint8)

    def test_transparent_is_paper(self):
        picture = Image.new("RGBA", (28, 28), (0, 0, 0, 0))
        image, _ = prepare_picture(picture, (1, 28, 28), ink=False)
        assert image.min() == 255

    def test_what_is_not_a_picture(self, run, tmp_path):
        (tmp_path / "note.png").write_text("hello")
        with pytest.raises(DataError, match=r"note\.png cannot be read as a picture"):
            predict(run, [tmp_path / "note.png"])
        with pytest.raises(DataError, match="there is no picture"):
            predict(run, [tmp_path / "none.png"])


class TestFigures:
    def test_all_are_drawn(self, run):
        evaluation, dataset = evaluate(run, device="cpu")
        paths = [*figures.draw_run(run), figures.draw_evaluation(run, evaluation, dataset)]
        assert [path.name for path in paths] == ["curves.png", "steps.png", "errors-mnist-mini.png"]
        for path in paths:
            with Image.open(path) as picture:
                assert picture.width > 1000
                assert len(picture.convert("L").getcolors(10_000)) > 20  # not an empty sheet

    def test_curves_show_what_was_logged(self, run):
        loss, accuracy = figures.draw_curves(run).axes
        assert list(accuracy.lines[1].get_ydata()) == [line.test_accuracy for line in run.metrics]
        assert list(loss.lines[0].get_ydata()) == [line.loss for line in run.metrics]
        assert len(figures.draw_steps(run).axes) == 3  # with the singular value of the dense layer

    def test_three_layers_and_a_validation_split(self, tiny):
        config = replace(tiny, row="pcdeq-1-mc-tanh", channels=(2, 3, 4), epochs=1, lr_step=None, validation=0.2)
        run = train(config, progress="none")
        forward, backward = figures.draw_steps(run).axes
        assert len(forward.lines) == len(backward.lines) == 3
        assert len(figures.draw_curves(run).axes[1].lines) == 3

    def test_no_errors_at_all(self, run):
        dataset = load_dataset("mnist-mini")
        perfect = Evaluation(dataset.test.labels, dataset.test.labels, torch.ones(1000), 0.0, (1.0,), 0, 0.0)
        drawn = figures.draw_errors(perfect, dataset)
        assert "100.00 %" in drawn.get_suptitle()
