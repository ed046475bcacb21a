"""An animated picture of an episode, from its screens."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from capsule.experiment.files import open_regular
from capsule.host.errors import CapsuleError

if TYPE_CHECKING:
    from PIL.Image import Image

    from capsule.experiment.contract import Film

FORMS = (".gif", ".png", ".webp")
MAX_SIDE = 1024  # pixels; the screens come from the bundle's own code
_READ_BYTES = 1 << 20
_SLOWEST, _FASTEST = 0.02, 1000.0  # screens a second; in a PNG, one lasts at most 65 seconds
_LEAST_WIDTH = 160  # pixels; the grid of MinAtar has ten


def check_form(output: Path) -> None:
    """Reject the name of a file whose suffix is none of :data:`FORMS`.

    Raises:
        CapsuleError: CAP-V092.
    """
    if output.suffix.lower() not in FORMS:
        raise CapsuleError(
            "CAP-V092",
            f"--output {str(output)!a}: the suffix is not one of {', '.join(FORMS)}",
            fix="Name a file with one of these suffixes, which determine its format.",
        )


def animation(
    film: Film, screens: Path, suffix: str, *, begin: float, seconds: float | None
) -> bytes:
    """Return an animated picture of a part of an episode, at the speed of the game.

    Args:
        film: What was filmed.
        screens: The file with the screens.
        suffix: One of :data:`FORMS`.
        begin: Where in the episode the part begins, in seconds.
        seconds: How long the part is; None: it lasts until the end of the episode.

    Raises:
        CapsuleError: CAP-V092, the part has no screens; CAP-E011, the file does not have the
            screens that were filmed.
    """
    if film.screens:
        _check_sizes(film, screens)
    # The times are bounded before they are rounded: numbers of the command line can be infinite.
    first = int(min(film.screens, begin * film.rate))
    last = film.screens
    if seconds is not None:
        last = min(last, first + int(min(last, seconds * film.rate)))
    if first >= last:
        length = film.screens / film.rate if film.rate else 0.0
        raise CapsuleError(
            "CAP-V092",
            f"--begin and --seconds name a part of the episode without a screen: it lasts "
            f"{length:.1f} seconds",
            fix="Give a --begin before the end of the episode, and --seconds of at least 1.",
        )
    # Times are rounded and not durations, whose errors would add up. A GIF counts hundredths.
    unit = 10 if suffix.lower() == ".gif" else 1
    times = [round(1000 / unit * each / film.rate) * unit for each in range(last - first + 1)]
    written = BytesIO()
    # Pillow saves an animation from its first image, and iterates over the others.
    next(iter(Images(film, screens, first, last))).save(
        written,
        format=suffix.lower().removeprefix("."),
        save_all=True,
        append_images=Images(film, screens, first + 1, last),
        duration=[after - before for before, after in pairwise(times)],
        loop=0,
        # Pillow writes WebP with losses by default, which would change colours.
        **({"lossless": True} if suffix.lower() == ".webp" else {}),
    )
    return written.getvalue()


@dataclass(frozen=True)
class Images:
    """Some screens as images of a palette, read anew in each iteration: some formats take two.

    Attributes:
        film: What was filmed.
        screens: The file with the screens.
        first: The first screen.
        last: The screen after the last one.
    """

    film: Film
    screens: Path
    first: int
    last: int

    def __iter__(self) -> Iterator[Image]:
        """Yield the images; those of few pixels are enlarged."""
        from PIL import Image

        size = self.film.columns, self.film.rows
        scale = max(1, _LEAST_WIDTH // self.film.columns)
        for screen in islice(_screens(self.film, self.screens), self.first, self.last):
            # No dithering: games have few colours, and each is to stay as it is.
            image = Image.frombytes("RGB", size, screen).quantize(256, dither=Image.Dither.NONE)
            yield image.resize([side * scale for side in size], Image.Resampling.NEAREST)


def _check_sizes(film: Film, path: Path) -> None:
    """Reject a film that no environment makes: with screens, but of no size or at no speed."""
    sides = 0 < film.rows <= MAX_SIDE and 0 < film.columns <= MAX_SIDE
    if not (sides and _SLOWEST <= film.rate <= _FASTEST):  # nor NaN
        raise _malformed(path, f"{film.rows} x {film.columns} pixels at {film.rate} a second")


def _screens(film: Film, path: Path) -> Iterator[bytes]:
    """Yield the content of each screen, with never more than one of them in memory."""
    size = film.rows * film.columns * 3
    unpacker = zlib.decompressobj()
    screen = bytearray()
    with _opened(path) as stream:
        for number in range(film.screens):
            while len(screen) < size:
                # Never more than one screen is unpacked at a time, whatever the packed bytes would
                # become.
                packed = unpacker.unconsumed_tail or stream.read(_READ_BYTES)
                try:
                    part = unpacker.decompress(packed, size - len(screen))
                except zlib.error as error:
                    raise _malformed(path, str(error)) from error
                if not (packed or part):
                    raise _malformed(path, f"it ends before screen {number}")
                screen += part
            yield bytes(screen)
            screen.clear()


def _opened(path: Path) -> BufferedReader:
    try:
        return open_regular(path, follow=False)
    except OSError as error:
        raise _malformed(path, f"it cannot be read: {error.strerror}") from error


def _malformed(path: Path, reason: str) -> CapsuleError:
    return CapsuleError(
        "CAP-E011",
        f"{path.name} is malformed: {reason}",
        fix="Do not trust the training code of this bundle; ask its signer for a valid one.",
    )
