from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.fashion_mnist import DEVIATION, MEAN, FashionMNISTDataModule, find_idx, read_idx


@pytest.mark.parametrize("name", ["cube", "cube.gz"])
def test_an_idx_file_is_read_in_its_shape(tmp_path, name):
    content = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (2, 3, 4)) + bytes(range(232, 256))
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert torch.equal(read_idx(tmp_path / name), torch.arange(232, 256, dtype=torch.uint8).view(2, 3, 4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"must be an IDX file of unsigned bytes; its head is "),
        (b"PNG\x01\0\0\0\x01x", r"must be an IDX file of unsigned bytes; its head is 504e4701"),
        (b"\0\0\x0d\x01\0\0\0\x01wxyz", r"its head is 00000d01"),
        (b"\0\0\x08\x01\0\0", r"must be an IDX file"),
        (b"\0\0\x08\x01\0\0\0\x05abc", r"must hold 5 bytes after its head, for shape \[5\], but holds 3; get"),
    ],
    ids=["empty", "another format", "floats", "cut head", "cut body"],
)
def test_a_file_that_is_not_idx_is_refused(tmp_path, content, message):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        read_idx(tmp_path / "file")


def test_batches_are_normalised_images_with_their_classes(fashion_mnist_folder):
    data = FashionMNISTDataModule(path=str(fashion_mnist_folder), batch_size=16)
    images, classes = data.on_after_batch_transfer(next(iter(data.val_dataloader())), 0)
    assert images.shape == (40, 1, 28, 28)
    assert images.dtype == torch.float32
    assert classes.tolist() == [index % 10 for index in range(40)]
    bright = (images[:, 0].amax(dim=2) > 0).float().argmax(dim=1)
    assert torch.equal(bright, 2 * classes), "the stripe of class c begins in row 2c"
    assert images.unique().tolist() == pytest.approx([(0.0 - MEAN) / DEVIATION, (1.0 - MEAN) / DEVIATION])


def test_training_is_shuffled_and_sees_every_image_once(fashion_mnist_folder):
    data = FashionMNISTDataModule(path=str(fashion_mnist_folder), batch_size=16)
    classes = torch.cat([classes for _, classes in data.train_dataloader()])
    assert classes.bincount().tolist() == [16] * 10
    assert classes.tolist() != [index % 10 for index in range(160)]


def test_a_slice_is_the_first_images(fashion_mnist_folder):
    data = FashionMNISTDataModule(path=str(fashion_mnist_folder), train_samples=20, val_samples=7)
    assert len(data.train_dataloader().dataset) == 20
    assert next(iter(data.val_dataloader()))[1].tolist() == list(range(7))


def test_missing_data_name_the_package(tmp_path):
    with pytest.raises(ConfigurationError, match=r"holds no train-images-idx3-ubyte\[.gz\]; on Debian run 'apt-get"):
        FashionMNISTDataModule(path=str(tmp_path)).setup()


def test_images_and_classes_must_fit(fashion_mnist_folder):
    find_idx(fashion_mnist_folder, "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x01\x07")
    with pytest.raises(ConfigurationError, match=r"t10k images of shape \(40, 28, 28\) and classes of shape \(1,\)"):
        FashionMNISTDataModule(path=str(fashion_mnist_folder)).setup()


def test_nothing_is_read_before_setup():
    FashionMNISTDataModule(path="/does/not/exist")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"batch_size=0: must be ≥ 1"),
        ({"train_samples": 0}, r"train_samples=0: must be ≥ 1"),
        ({"val_samples": -1}, r"val_samples=-1: must be ≥ 1"),
        ({"num_workers": -1}, r"num_workers=-1: must be ≥ 0"),
    ],
)
def test_a_bad_option_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        FashionMNISTDataModule(**options)


@pytest.mark.skipif(not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="dataset-fashion-mnist is absent")
def test_the_constants_are_those_of_the_real_images():
    images = read_idx(find_idx(Path("/usr/share/datasets/fashion-mnist"), "train-images-idx3-ubyte"))
    assert images.shape == (60_000, 28, 28)
    pixels = images.float() / 255
    assert (float(pixels.mean()), float(pixels.std())) == pytest.approx((MEAN, DEVIATION), abs=1e-4)
