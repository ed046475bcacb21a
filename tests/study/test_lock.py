"""The lock of a study: a pure function of its spec, and nothing that was edited is taken."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment.canonical import canonical_json
from capsule.host.errors import CapsuleError
from capsule.image.cache import Cache
from capsule.image.lockfile import write_lock
from capsule.study.lock import (
    MAX_STUDY_BYTES,
    STARTS,
    STUDY_LOCK,
    earlier_lock,
    find_starts,
    lock_starts,
    read_study_lock,
)
from capsule.study.study_file import StudyFile
from tests.bundle.locks import digest_of
from tests.study.small_studies import STUDY, Resolutions, digests, locked, write
from tests.study.test_study_file import STARTS as START_SET

CUDA = "{kind: cuda, cuda: '13.0', cudnn: '>=9.10', driver: '>=580.65'}"
PROGRAMS = STUDY.replace("vary: [exploration]", "vary: [root]")
LARGER = [
    ("another group", STUDY, STUDY + "  other: {set: {seeds.root: 7}}\n"),
    ("a first group", STUDY, STUDY.replace("groups:\n", "groups:\n  a: {set: {name: x}}\n")),
    ("more runs", STUDY, STUDY.replace("runs: 2", "runs: 3")),
    (
        "a larger grid",
        STUDY + "  g: {grid: {seeds.root: [1, 2], trainer.discount: [0.5, 0.6]}}\n",
        STUDY + "  g: {grid: {seeds.root: [1, 2, 3], trainer.discount: [0.5, 0.6, 0.7]}}\n",
    ),
    (
        "a larger sample",
        STUDY + "  g: {sample: {count: 2, fields: {trainer.learning_rate: {uniform: [0.1, 1]}}}}\n",
        STUDY + "  g: {sample: {count: 3, fields: {trainer.learning_rate: {uniform: [0.1, 1]}}}}\n",
    ),
    (
        "a further image",
        STUDY,
        STUDY.replace("groups:\n", "groups:\n  a: {set: {image.debian: [vim]}}\n"),
    ),
]


@pytest.mark.parametrize(
    ("before", "after"), [each[1:] for each in LARGER], ids=[x[0] for x in LARGER]
)
def test_a_larger_study_leaves_the_locks_of_its_members_as_they_were(
    tmp_path, resolutions, before, after
):
    first = locked(write(tmp_path, before))
    second = locked(write(tmp_path, after), first)
    assert digests(first).items() < digests(second).items()
    fields = first.members[0].model_dump().keys()
    assert fields == {"name", "spec", "pins", "lock"}


def test_runs_are_one_experiment_where_no_stream_varies(tmp_path, resolutions):
    lock = locked(write(tmp_path))
    found = digests(lock)
    assert found["deterministic.1"] == found["deterministic.2"]
    assert len(set(found.values())) == 3
    assert (len(lock.specs), len(lock.pins), len(resolutions.made)) == (3, 1, 1)
    for member in lock.members:
        assert lock.lock_of(member).digest() == member.lock


def test_a_group_with_another_image_or_accelerator_has_pins_of_its_own(tmp_path, resolutions):
    study = STUDY + (
        "  packages: {set: {image.packages: [torch==2.5.0]}}\n"
        f"  gpu: {{set: {{accelerator: {CUDA}}}, vary: [exploration]}}\n"
        "  same: {set: {image.packages: [torch==2.5.0], seeds.root: 3}}\n"
    )
    lock = locked(write(tmp_path, study))
    places = {member.name.partition(".")[0]: member.pins for member in lock.members}
    assert places == {"deterministic": 0, "exploration": 0, "packages": 1, "gpu": 2, "same": 1}
    assert len(resolutions.made) == 3
    assert len({pins.image.base for pins in lock.pins}) == 3
    again = locked(write(tmp_path, study), lock)
    assert (again, len(resolutions.made)) == (lock, 3)


def test_groups_with_other_source_trees_have_pins_of_their_own(tmp_path, resolutions, monkeypatch):
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path / "cache"))
    for name in ("one", "two"):
        (tmp_path / "s" / name).mkdir(parents=True)
        (tmp_path / "s" / name / "main.py").write_text(f"print({name!r})\n")
    program = "{command: [python, main.py]}"
    base = f"schema: capsule/spec/v1\nname: p\ntrainer: {program}\ncode: {{path: one}}\n"
    study = PROGRAMS + "  two: {set: {code.path: two}}\n"
    lock = locked(write(tmp_path / "s", study, base))
    found = digests(lock)
    assert found["deterministic.1"] != found["two.1"]
    trees = [pins.project.sha256 for pins in lock.pins]
    assert len(set(trees)) == 2


def test_groups_with_other_data_sets_have_pins_of_their_own(tmp_path, resolutions, monkeypatch):
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path / "cache"))
    for name in ("one", "two"):
        (tmp_path / "s" / name).mkdir(parents=True)
        (tmp_path / "s" / name / "digits").write_text(name)
    base = (
        "schema: capsule/spec/v1\nname: p\ntrainer: {command: [python, main.py]}\n"
        "data: {digits: {path: one}}\n"
    )
    study = PROGRAMS + "  two: {set: {data.digits.path: two}}\n"
    first = locked(write(tmp_path / "s", PROGRAMS, base))
    lock = locked(write(tmp_path / "s", study, base), first)
    assert digests(first).items() < digests(lock).items()
    assert len({pins.data["digits"].sha256 for pins in lock.pins}) == 2
    path = tmp_path / "study.lock.json"
    path.write_bytes(lock.document())
    assert read_study_lock(path) == lock


def test_the_files_of_a_study_are_no_part_of_the_source_tree_that_it_runs(
    tmp_path, resolutions, monkeypatch
):
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path / "cache"))
    base = "schema: capsule/spec/v1\nname: p\ntrainer: {command: [python, main.py]}\ncode: {}\n"
    folder = tmp_path / "s"
    path = write(folder, PROGRAMS, base)
    (folder / "main.py").write_text("print(1)\n")
    first = locked(path)
    assert set(first.pins[0].project.files) == {"main.py"}
    (folder / ("tiny" + STUDY_LOCK)).write_bytes(first.document())
    (folder / ("tiny" + STARTS)).write_text("{}")
    path.write_text(PROGRAMS + "  other: {set: {seeds.root: 1}}\n")
    assert digests(first).items() < digests(locked(path, first)).items()


def test_pins_come_from_the_lock_of_the_base_which_is_not_written(tmp_path, resolutions):
    path = write(tmp_path)
    file = StudyFile.load(path)
    base = locked(path)
    lock = base.lock_of(base.members[0])
    pinned = lock.image.model_copy(update={"base": digest_of("of the base's lock")})
    write_lock(file.base_lock, lock.model_copy(update={"image": pinned}))
    written = file.base_lock.read_bytes()
    assert locked(path).pins[0].image == pinned
    assert locked(path, base).pins[0].image == base.pins[0].image
    assert len(resolutions.made) == 1
    assert file.base_lock.read_bytes() == written


def test_a_refresh_keeps_no_pins_of_any_lock(tmp_path, resolutions):
    path = write(tmp_path)
    first = locked(path)
    write_lock(StudyFile.load(path).base_lock, first.lock_of(first.members[0]))
    again = locked(path, refresh=True)
    assert len(resolutions.made) == 2
    assert again.pins != first.pins


def test_a_section_that_follows_its_field_takes_its_place(tmp_path, resolutions):
    study = STUDY + "  other: {set: {seeds: {streams: {minibatch: 1}}, image: {debian: [vim]}}}\n"
    lock = locked(write(tmp_path, study + "set: {seeds.root: 3}\n"))
    specs = {member.name: lock.specs[member.spec] for member in lock.members}
    assert (specs["other.1"].seeds.root, specs["deterministic.1"].seeds.root) == (0, 3)
    assert specs["other.1"].image.debian == ("vim",)


def test_sections_may_say_where_things_come_from(tmp_path, resolutions):
    links = "{sources: {find_links: [wheels]}}"
    write(tmp_path)
    (tmp_path / "own.json").write_text(json.dumps(START_SET.model_dump(mode="json", by_alias=True)))
    section = (
        "{interval: 1_024, starts: 2, candidates: 2, shortlist: 2, min_actions: 0, "
        "max_actions: 0, start_set: own.json}"
    )
    study = STUDY + f"  other: {{set: {{image: {links}, evaluation: {section}}}}}\n"
    lock = locked(write(tmp_path, study))
    spec = lock.specs[lock.members[-1].spec]
    assert (spec.image.sources.find_links, spec.evaluation.start_set) == ((), START_SET)


def test_the_start_sequences_of_a_study_are_part_of_every_member(tmp_path, resolutions):
    path = write(tmp_path, STUDY + "starts: {set: {seeds.root: 1000}}\n")
    file = StudyFile.load(path)
    with pytest.raises(CapsuleError, match=r"tiny\.starts\.json") as caught:
        find_starts(file)
    assert caught.value.code == "CAP-Y004"
    assert "capsule study starts" in caught.value.fix
    assert lock_starts(file, None, Cache(), lambda _: None).spec.seeds.root == 1000
    target = file.beside(STARTS)
    target.write_text("{}")
    with pytest.raises(CapsuleError) as caught:
        find_starts(file)
    assert caught.value.code == "CAP-S010"
    target.write_text(json.dumps(START_SET.model_dump(mode="json", by_alias=True)))
    assert find_starts(file) == START_SET
    assert find_starts(StudyFile.load(write(tmp_path))) is None


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        Resolutions(patch)
        path = write(
            tmp_path_factory.mktemp("study"), STUDY + "  g: {grid: {seeds.root: [1, 2]}}\n"
        )
        return locked(path).document()


def edited(document, path, value):
    found = json.loads(document)
    *sections, last = path
    section = found
    for key in sections:
        section = section[key]
    section[last] = value
    return canonical_json(found)


def read(tmp_path, data):
    path = tmp_path / "x.study.lock.json"
    path.write_bytes(data)
    return read_study_lock(path)


def refused(tmp_path, data):
    with pytest.raises(CapsuleError) as caught:
        read(tmp_path, data)
    assert caught.value.code == "CAP-Y003"
    assert "x.study.lock.json" in caught.value.message
    return caught.value.message


def test_a_lock_is_read_as_it_was_written_in_whatever_order_its_study_is(tmp_path, resolutions):
    study = STUDY.replace("deterministic", "zero").replace("exploration:", "one:") + (
        "  a: {grid: {trainer.discount: [0.5, 0.6], seeds.root: [1, 2, 3]}}\n"
        "  drawn:\n    sample:\n      count: 2\n      fields:\n"
        "        trainer.learning_rate: {uniform: [0.1, 1]}\n"
        "        trainer.discount: {choice: [0.1, 0.2]}\n"
        "set: {trainer.target_interval: 64, seeds.root: 9, seeds: {streams: {minibatch: 1}}}\n"
    )
    lock = locked(write(tmp_path, study))
    found = read(tmp_path, lock.document())
    assert found.document() == lock.document()
    assert found == lock
    assert found.groups == ("zero", "one", "a", "drawn")
    assert [*digests(found)] == [*digests(lock)]
    assert {name: member.settings for name, member in found.planned.items()} == {
        name: member.settings for name, member in lock.planned.items()
    }
    again = locked(tmp_path / "tiny.yaml", found)
    assert again.document() == lock.document()


def test_a_lock_is_read_as_it_was_written(tmp_path, document):
    assert read(tmp_path, document).document() == document
    assert read(tmp_path, document + b"\n").document() == document


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("members", 0, "lock"), "0" * 64, "the lock of deterministic.1 has another digest"),
        (("members", 0, "spec"), 1, "the lock of deterministic.1 has another digest"),
        (("members", 2, "spec"), 2, "exploration.1 has seeds.streams.exploration"),
        (("members", 0, "spec"), 99, "deterministic.1 names a spec or pins that do not exist"),
        (("members", 0, "pins"), 1, "deterministic.1 names a spec or pins that do not exist"),
        (("members", 0, "spec"), -1, "members.0.spec"),
        (("members", 0, "name"), "deterministic.3", "members are not those of the study"),
        (("members", 0, "name"), "../deterministic.1", "members are not those of the study"),
        (("study", "groups", "exploration", "vary"), ["minibatch"], "exploration.1 has seeds"),
        (("study", "groups", "g", "grid", "seeds.root"), [1, 3], "g.2.1 has seeds.root 2, not 3"),
        (("study", "seed"), 1, "exploration.1 has seeds.streams.exploration"),
        (("study", "runs"), 3, "members are not those of the study"),
        (("study", "runs"), 2000, "more than 2000 members"),
        (("specs", 0, "trainer", "discount"), 0.5, "the lock of deterministic.1"),
        (("pins", 0, "image", "base"), "0" * 64, "the lock of deterministic.1"),
        (("further",), 1, "further"),
        (("members",), [], "members"),
    ],
)
def test_an_edited_lock_is_refused(tmp_path, document, path, value, message):
    assert message in refused(tmp_path, edited(document, path, value))


def test_a_study_that_no_file_of_one_could_hold_is_refused(tmp_path, document):
    """The settings are compared with the spec of each of up to 2,000 members."""
    settings = {"name": "x" * MAX_STUDY_BYTES}
    assert "study: more than 2 MiB" in refused(
        tmp_path, edited(document, ["study", "set"], settings)
    )


def test_members_that_change_places_are_refused(tmp_path, document):
    members = json.loads(document)["members"]
    swapped = [members[1], members[0], *members[2:]]
    assert "members are not those" in refused(tmp_path, edited(document, ["members"], swapped))
    more = [*members, {**members[0], "name": "deterministic.3"}]
    assert "members are not those" in refused(tmp_path, edited(document, ["members"], more))
    assert "members are not those" in refused(tmp_path, edited(document, ["members"], members[1:]))


def test_a_file_that_is_not_a_lock_is_refused(tmp_path, document):
    for data in (b"", b"{}", b"[]", b"\xff", document[:-1], b" " + document, document + b"\n\n"):
        refused(tmp_path, data)
    with pytest.raises(CapsuleError) as caught:
        read_study_lock(tmp_path)
    assert caught.value.code == "CAP-Y003"
    path = write(tmp_path)
    assert earlier_lock(StudyFile.load(path)) is None
    path.with_name("tiny" + STUDY_LOCK).write_bytes(b"{}")
    with pytest.raises(CapsuleError) as caught:
        earlier_lock(StudyFile.load(path))
    assert caught.value.code == "CAP-Y003"


def test_a_missing_lock_is_not_to_be_deleted(tmp_path):
    with pytest.raises(CapsuleError) as caught:
        read_study_lock(tmp_path / "x.study.lock.json")
    assert caught.value.code == "CAP-Y003"
    place = tmp_path / "x.study.lock.json"
    assert caught.value.message == f"study lock {place}: No such file or directory"
    fix = "Name an existing lock of a study, or make one with 'capsule study lock'."
    assert caught.value.fix == fix


OPEN = [("study", field) for field in ("name", "base", "resources", "starts", "groups", "runs")]


def paths_of(value, path=()):
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in items:
        yield from paths_of(each, (*path, key))


@pytest.mark.slow
@given(
    st.data(),
    st.none()
    | st.booleans()
    | st.integers(-2, 2**54)
    | st.text(max_size=3)
    | st.just([])
    | st.just({}),
)
def test_an_edit_anywhere_is_refused_or_is_read_as_what_it_says(
    tmp_path_factory, document, data, value
):
    every = list(paths_of(json.loads(document)))[1:]
    path = data.draw(st.sampled_from(every))
    try:
        changed = edited(document, path, value)
    except ValueError:  # a number that canonical JSON does not have
        return
    folder = tmp_path_factory.getbasetemp()
    try:
        found = read(folder, changed)
    except CapsuleError as error:
        assert error.code == "CAP-Y003"
    else:
        assert found.document() == changed
        assert changed == document or path[:2] in OPEN


@given(st.data())
def test_bytes_that_are_exchanged_give_a_coded_error(tmp_path_factory, document, data):
    place = data.draw(st.integers(0, len(document) - 1))
    byte = data.draw(st.binary(min_size=1, max_size=3))
    changed = document[:place] + byte + document[place + 1 :]
    try:
        found = read(tmp_path_factory.getbasetemp(), changed)
    except CapsuleError as error:
        assert error.code == "CAP-Y003"
    else:
        assert found.document() == changed
