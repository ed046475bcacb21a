import zlib
from io import BytesIO
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from capsule.experiment.contract import EvaluationPoint, Film
from capsule.host.errors import CapsuleError
from capsule.report.pictures import animation, check_form

ROWS, COLUMNS = 3, 100


def filmed(folder, number=20, *, rate=10.0, **other):
    """Make the film of an episode: screen ``k`` has a line of its own colour."""
    screens = np.zeros((number, ROWS, COLUMNS, 3), np.uint8)
    for index in range(number):
        screens[index, 1, :, index % 3] = 10 * index + 5
    path = folder / "screens.zlib"
    path.write_bytes(zlib.compress(screens.tobytes()))
    point = EvaluationPoint(step=1, returns=("0x0p+0",), lengths=(number - 1,))
    facts = {"screens": number, "rows": ROWS, "columns": COLUMNS, "rate": rate} | other
    return Film(point=point, **facts), path, screens


def drawn(film, path, suffix, begin=0.0, seconds=None):
    data = animation(film, path, suffix, begin=begin, seconds=seconds)
    with Image.open(BytesIO(data)) as picture:
        return [
            (np.asarray(frame.convert("RGB")), frame.info["duration"])
            for frame in ImageSequence.Iterator(picture)
        ]


@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp", ".GIF"])
def test_every_screen_is_shown_in_its_colours_for_its_time(tmp_path, suffix):
    film, path, screens = filmed(tmp_path)
    frames = drawn(film, path, suffix)
    assert len(frames) == len(screens)
    for (shown, duration), screen in zip(frames, screens, strict=True):
        assert np.array_equal(shown, screen)
        assert duration == 100


@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp"])
@pytest.mark.parametrize("skip", [1, 3, 4])
def test_an_episode_lasts_as_long_as_the_game(tmp_path, suffix, skip):
    film, path, _ = filmed(tmp_path, rate=60 / skip)
    durations = [duration for _, duration in drawn(film, path, suffix)]
    unit = 10 if suffix == ".gif" else 1
    assert sum(durations) == round(20 * 1000 / unit / film.rate) * unit
    assert max(durations) - min(durations) <= unit


@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp"])
def test_equal_screens_last_their_time_and_one_screen_is_a_picture(tmp_path, suffix):
    film, path, screens = filmed(tmp_path, rate=15.0)
    path.write_bytes(zlib.compress(screens[:1].tobytes() * 19 + screens[1:2].tobytes()))
    durations = [duration for _, duration in drawn(film, path, suffix)]
    assert len(durations) == 2
    assert sum(durations) == (1330 if suffix == ".gif" else 1333)
    assert animation(film, path, suffix, begin=0.0, seconds=0.1)


def test_a_part_of_an_episode_is_shown(tmp_path):
    film, path, screens = filmed(tmp_path)
    frames = drawn(film, path, ".png", begin=0.5, seconds=0.3)
    assert [shown.tolist() for shown, _ in frames] == screens[5:8].tolist()
    assert len(drawn(film, path, ".png", begin=1.5)) == 5


def test_small_screens_are_enlarged_by_whole_pixels(tmp_path):
    film, path, _ = filmed(tmp_path)
    small = film.model_copy(update={"columns": 10, "screens": 200})
    ((first, _), *_rest) = drawn(small, path, ".png")
    assert first.shape == (ROWS * 16, 160, 3)


@pytest.mark.parametrize("part", [(2.0, None), (0.0, 0.05), (99.0, 1.0), (inf, inf), (nan, None)])
def test_a_part_without_a_screen_is_refused(tmp_path, part):
    film, path, _ = filmed(tmp_path)
    with pytest.raises(CapsuleError, match=r"CAP-V092 .* it lasts 2\.0 seconds"):
        drawn(film, path, ".gif", *part)


def test_an_episode_that_its_start_ended_has_no_screens(tmp_path):
    film, path, _ = filmed(tmp_path)
    for rate in (0.0, nan, inf):
        empty = film.model_copy(update={"screens": 0, "rate": rate})
        with pytest.raises(CapsuleError, match=r"CAP-V092 .* it lasts .* seconds"):
            drawn(empty, path, ".gif")


@pytest.mark.parametrize(
    "lie",
    [
        {"screens": 21},
        {"rows": 0},
        {"rows": 10**9},
        {"columns": 0},
        {"columns": 1025},
        *({"rate": rate} for rate in (-1.0, 0.0, 1e-9, 1e9, nan, inf)),
    ],
    ids=str,
)
def test_a_film_of_other_screens_is_malformed(tmp_path, lie):
    film, path, _ = filmed(tmp_path)
    for suffix in (".gif", ".png"):
        with pytest.raises(CapsuleError, match="CAP-E011"):
            drawn(film.model_copy(update=lie), path, suffix)


def test_a_film_without_its_screens_is_malformed(tmp_path):
    film, path, _ = filmed(tmp_path)
    path.unlink()
    with pytest.raises(CapsuleError, match=r"CAP-E011 .* No such file"):
        drawn(film, path, ".gif")


def test_bytes_that_are_not_packed_are_malformed(tmp_path):
    film, path, _ = filmed(tmp_path)
    path.write_bytes(b"not packed")
    with pytest.raises(CapsuleError, match="CAP-E011"):
        drawn(film, path, ".gif")


@pytest.mark.slow
def test_the_screens_of_a_bomb_are_not_unpacked_further_than_filmed(tmp_path):
    film, path, screens = filmed(tmp_path)
    packer = zlib.compressobj()
    data = packer.compress(screens.tobytes()) + packer.compress(bytes(1 << 28)) + packer.flush()
    path.write_bytes(data)
    assert len(drawn(film, path, ".gif")) == len(screens)


@pytest.mark.parametrize("name", ["play", "play.mp4", ".gif", "play.gif.txt"])
def test_another_form_is_refused(name):
    with pytest.raises(CapsuleError, match=r"CAP-V092 --output .* \.gif, \.png, \.webp"):
        check_form(Path(name))
