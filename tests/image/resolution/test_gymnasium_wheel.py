"""The environments of a wheel of Gymnasium are read from its sources, which are not executed."""

import importlib.metadata
import io
import zipfile

import pytest

from capsule.image.resolution.gymnasium_wheel import Registered, is_continuous, registered


def wheel_of(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return zipfile.ZipFile(buffer)


def registrations(text):
    return list(registered(wheel_of({"gymnasium/envs/__init__.py": text})))


def test_an_environment_is_registered_with_and_without_its_version():
    assert registrations('register(id="Tree-v12", entry_point="a.b:C")') == [
        Registered("Tree-v12", "a.b:C", None),
        Registered("Tree", "a.b:C", None),
    ]


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        ('register("A-v0", "a:B")', ("A-v0", "", None)),
        ('register(id="A-v0")', ("A-v0", "", None)),
        ('register(id="A-v0", entry_point=find("a:B"))', ("A-v0", "", None)),
        ('register(id="A-v0", kwargs={"continuous": True})', ("A-v0", "", True)),
        ('register(id="A-v0", kwargs={"continuous": False, "x": 1})', ("A-v0", "", False)),
        ('register(id="A-v0", kwargs={"x": 1})', ("A-v0", "", None)),
        ('register(id="A-v0", kwargs=OTHERS)', ("A-v0", "", None)),
        ('if True:\n    register(id="A-v0")', ("A-v0", "", None)),
        ('register(id="A-v0", **OTHERS)', ("A-v0", "", None)),
    ],
)
def test_what_a_registration_says_in_literals_is_read(call, facts):
    assert registrations(call)[0] == Registered(*facts)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "register()",
        "register(id=NAME)",
        'register(id=f"{NAME}-v0")',
        "register(id=1)",
        'make("A-v0")',
        "\"register(id='A-v0')\"",
    ],
)
def test_other_sources_register_nothing(text):
    assert registrations(text) == []


def test_sources_are_not_executed(tmp_path):
    mark = tmp_path / "executed"
    text = f"open({str(mark)!r}, 'w')\nregister(id='A-v0', entry_point=open({str(mark)!r}, 'w'))\n"
    assert registrations(text)[0] == Registered("A-v0", "", None)
    assert not mark.exists()


BOX = "        self.action_space = spaces.Box(-1, 1)\n"
DISCRETE = "        self.action_space = Discrete(2)\n"


def class_of(body, name="Task", base="Env", signature="self"):
    return f"class {name}({base}):\n    def __init__({signature}):\n{body}"


def continuous(files, entry_point="a.b:Task", argument=None):
    return is_continuous(wheel_of(files), Registered("Task-v0", entry_point, argument))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (BOX, True),
        (DISCRETE, False),
        ("        self.action_space = MultiDiscrete([2, 2])\n", False),
        ("        self.action_space = spaces.MultiBinary(2)\n", False),
        ("        self.observation_space = Box(-1, 1)\n" + DISCRETE, False),
        ("        self.observation_space = Discrete(2)\n" + BOX, True),
        ("        self.action_space = self.other = Box(-1, 1)\n", True),
        ("        self.action_space: spaces.Space = spaces.Box(-1, 1)\n", True),
        ("        self.action_space: spaces.Space\n", False),
        ("        self.action_space = space_of(self)\n", False),
        ("        pass\n", False),
    ],
)
def test_the_space_that_a_class_creates_decides(body, expected):
    assert continuous({"a/b.py": class_of(body)}) is expected


@pytest.mark.parametrize(
    ("signature", "argument", "expected"),
    [
        ("self, continuous=False", None, False),
        ("self, continuous=True", None, True),
        ("self, continuous=False", True, True),
        ("self, continuous=True", False, False),
        ("self, x, y=1, continuous=True, z=0", None, True),
        ("self, continuous, z=True", None, False),
        ("self, continuous=default()", None, False),
        ("self, x=0, *, continuous=True", None, True),
        ("self, *, continuous=True, z=False", None, True),
        ("self, *, z=True, continuous=False", None, False),
        ("self, *, continuous, z=True", None, False),
        ("self", True, True),
        ("self", None, False),
    ],
)
def test_a_class_with_both_spaces_chooses_by_its_argument(signature, argument, expected):
    files = {"a/b.py": class_of(DISCRETE + BOX, signature=signature)}
    assert continuous(files, argument=argument) is expected


@pytest.mark.parametrize(
    "files",
    [
        {"a/b.py": class_of(BOX, "Base") + class_of("        pass\n", base="Base")},
        {
            "a/b.py": "from a.c import Base\n" + class_of("        pass\n", base="Base"),
            "a/c.py": class_of(BOX, "Base"),
        },
        {"a/b.py": "from a.c.d import Task\n", "a/c/d.py": class_of(BOX)},
        {"a/b/__init__.py": "from a.b.c import Task\n", "a/b/c.py": class_of(BOX)},
    ],
    ids=["base", "imported base", "imported class", "package"],
)
def test_a_class_is_followed_to_where_the_space_is_created(files):
    assert continuous(files)
    discrete = {
        path: text.replace("spaces.Box(-1, 1)", "Discrete(2)") for path, text in files.items()
    }
    assert not continuous(discrete)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"a/b.py": ""},
        {"a/b.py": class_of(BOX, "Other")},
        {"a/b.py": "from a.b import Task\n"},
        {"a/b.py": "from a.c import Task\n", "a/c.py": "from a.b import Task\n"},
        {"a/b.py": class_of("        pass\n", base="Task")},
        {"a/b.py": "from elsewhere import Base\n" + class_of("        pass\n", base="Base")},
        {"a/b.py": class_of("        pass\n", base="module.Base")},
    ],
)
def test_nothing_is_known_of_a_class_that_is_not_found(files):
    assert not continuous(files)


@pytest.mark.parametrize("entry_point", ["", "a.b", ":Task", "../a/b:Task", "a.b:Task:x"])
def test_nothing_is_known_of_an_entry_point_that_names_no_class(entry_point):
    assert not continuous({"a/b.py": class_of(BOX)}, entry_point)


@pytest.mark.parametrize(
    ("name", "continuous"),
    [
        *(("Pendulum-v1", True), ("Pendulum", True), ("MountainCarContinuous-v0", True)),
        *(("LunarLander-v3", False), ("LunarLanderContinuous-v3", True), ("CarRacing-v3", True)),
        *(("BipedalWalkerHardcore-v3", True), ("Ant-v5", True), ("Blackjack-v1", False)),
    ],
)
def test_continuous_actions_are_found_in_gymnasiums_sources(name, continuous, real_gymnasium):
    with zipfile.ZipFile(real_gymnasium) as wheel:
        known = {each.id: each for each in registered(wheel)}
        assert is_continuous(wheel, known[name]) == continuous


@pytest.fixture(scope="module")
def real_gymnasium(tmp_path_factory):
    """A wheel with the sources of the Gymnasium that is installed."""
    distribution = importlib.metadata.distribution("gymnasium")
    path = tmp_path_factory.mktemp("wheel") / "gymnasium.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in distribution.files:
            if file.suffix == ".py":
                archive.write(distribution.locate_file(file), str(file))
    return path
