"""Nested observations: their entries by paths, as vectors, as several images, and as numbers."""

import json

import pytest
from pydantic import ValidationError

from capsule.experiment.spec import GymnasiumEnvironment


def section(**changes):
    document = {"suite": "gymnasium", "id": "capsule/Nested-v0", **changes}
    return GymnasiumEnvironment.model_validate_json(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"images": ["a", "b"]}, "images requires frames: image"),
        ({"images": ["a", "b"], "frames": "image", "observation": "c"}, "replaces observation 'c'"),
        ({"images": ["a"], "frames": "image"}, "images\n.* at least 2"),
        ({"images": ["a", "a"], "frames": "image"}, "images names an entry twice"),
        ({"images": ["a", "b"], "frames": "image", "instruction": "b"}, "is the instruction"),
        ({"images": ["a", "b"], "frames": "image", "numbers": ["b"]}, "numbers names an entry"),
        (
            {"images": ["a", "b"], "frames": "image", "masked_observations": [0]},
            "masked_observations does not apply to frames: image",
        ),
    ],
)
def test_a_spec_that_names_images_wrongly_is_refused(changes, said):
    with pytest.raises(ValidationError, match=said):
        section(**changes)


def test_a_spec_without_images_keeps_its_document():
    plain = section(observation="image", frames="image").document()
    assert b'"images"' not in plain
    assert GymnasiumEnvironment.parse(plain).images is None
    several = section(images=["a", "b"], frames="image")
    assert GymnasiumEnvironment.parse(several.document()) == several
