import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kln_jax.training import augmentation

_keys_at = jax.jit(augmentation.example_keys)
_crop = jax.jit(augmentation.random_crop, static_argnames="padding")
_flip = jax.jit(augmentation.random_flip)


def _images(n, height=6, width=5, channels=2):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (n, height, width, channels), np.uint8)


def _keys(n, seed=0):
    return _keys_at(jax.random.key(seed), jnp.arange(n))


def _offsets(image, crops, padding):
    """Finds where in the reflected image each crop was cut."""
    height, width, _ = image.shape
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)), "reflect")
    places = {
        padded[top : top + height, left : left + width].tobytes(): (top, left)
        for top in range(2 * padding + 1)
        for left in range(2 * padding + 1)
    }
    assert len(places) == (2 * padding + 1) ** 2
    return [places[crop.tobytes()] for crop in crops]


def test_to_unit_is_the_value_over_255():
    values = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    unit = augmentation.to_unit(values)
    assert unit.dtype == jnp.float32
    np.testing.assert_allclose(unit.ravel(), np.arange(256) / 255, rtol=1e-7)
    assert unit.min() == 0
    assert unit.max() == 1


def test_to_unit_refuses_what_is_scaled_already():
    with pytest.raises(ValueError, match="uint8"):
        augmentation.to_unit(jnp.zeros((1, 2, 2, 1)))


@pytest.mark.parametrize("padding", [1, 2, 3])
def test_crop_is_a_window_of_the_reflected_image_at_every_place_alike(padding):
    places = (2 * padding + 1) ** 2
    n = 40 * places
    image = _images(1)[0]
    crops = np.asarray(
        _crop(_keys(n), np.repeat(image[None], n, axis=0), padding=padding)
    )
    assert crops.dtype == np.uint8
    drawn = _offsets(image, crops, padding)
    counts = np.array(
        [
            drawn.count((top, left))
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
        ]
    )
    # Chi-square of a uniform draw: mean places - 1, deviation its root of 2.
    chi_square = ((counts - 40) ** 2 / 40).sum()
    assert chi_square < places - 1 + 5 * np.sqrt(2 * (places - 1))


def test_crop_by_nothing_is_the_image():
    images = _images(3)
    np.testing.assert_array_equal(_crop(_keys(3), images, padding=0), images)


@pytest.mark.parametrize("padding", [-1, 5])
def test_crop_refuses_a_padding_that_cannot_be_reflected(padding):
    with pytest.raises(ValueError, match=rf"padding={padding} must be in 0\.\.4 "):
        _crop(_keys(1), _images(1), padding=padding)


def test_flip_mirrors_half_of_the_images_left_to_right():
    images = _images(1000)
    flipped = np.asarray(_flip(_keys(1000), images))
    is_flipped = (flipped != images).any(axis=(1, 2, 3))
    np.testing.assert_array_equal(flipped[is_flipped], images[is_flipped, :, ::-1])
    # Five standard deviations of a fair coin.
    assert abs(is_flipped.sum() - 500) < 5 * np.sqrt(250)


def test_flip_does_not_follow_the_crop_made_with_the_same_keys():
    n = 2000
    image = _images(1)[0]
    keys = _keys(n)
    images = np.repeat(image[None], n, axis=0)
    crops = np.asarray(_crop(keys, images, padding=1))
    flips = (np.asarray(_flip(keys, images)) != images).any((1, 2, 3))
    offsets = np.array(_offsets(image, crops, 1))
    for axis in range(2):
        for place in range(3):
            share = flips[offsets[:, axis] == place].mean()
            assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(n / 3)


@pytest.mark.parametrize(
    "augmentation",
    [lambda k, x: _crop(k, x, padding=2), _flip],
    ids=["crop", "flip"],
)
def test_an_example_depends_on_its_key_and_position_only(augmentation):
    images = _images(64)
    key = jax.random.key(3)
    whole = augmentation(_keys_at(key, jnp.arange(64)), images)
    for positions in (np.arange(16, 32), np.arange(64)[::-1]):
        part = augmentation(_keys_at(key, jnp.asarray(positions)), images[positions])
        np.testing.assert_array_equal(part, whole[positions])
    other = augmentation(_keys_at(jax.random.key(4), jnp.arange(64)), images)
    assert (np.asarray(other) != np.asarray(whole)).any()


def test_statistics_are_exact_across_chunks():
    images = _images(augmentation._STATISTICS_CHUNK * 2 + 7, 3, 3, 3)
    # One channel at the bound of the integer sums.
    images[..., 1] = 255
    images[0, 0, 0, 1] = 0
    mean, std = augmentation.channel_statistics(images)
    unit = images.astype(np.float64) / 255
    assert mean.dtype == std.dtype == np.float32
    np.testing.assert_allclose(mean, unit.mean((0, 1, 2)), rtol=1e-7)
    np.testing.assert_allclose(std, unit.std((0, 1, 2)), rtol=1e-6)


def test_statistics_refuse_what_cannot_be_normalised():
    images = _images(4)
    images[..., 1] = 7
    with pytest.raises(ValueError, match="Channel 1 is 7 in every pixel"):
        augmentation.channel_statistics(images)
    with pytest.raises(ValueError, match="uint8"):
        augmentation.channel_statistics(images.astype(np.float32))
    with pytest.raises(ValueError, match="n > 0"):
        augmentation.channel_statistics(images[:0])


def test_normalise_known_values():
    images = jnp.array([[[[0.5, 1.0]]], [[[1.0, 0.0]]]])
    result = augmentation.normalise(
        images, np.array([0.5, 0.5], np.float32), np.array([0.25, 0.5], np.float32)
    )
    np.testing.assert_allclose(result, [[[[0.0, 1.0]]], [[[2.0, -1.0]]]])
