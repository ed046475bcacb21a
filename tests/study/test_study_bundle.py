"""The bundle of a study: what is in it, and what is refused."""

import json

import pytest

from capsule.bundle.bundle import Content, open_bundle, pack
from capsule.bundle.keys import generate, load_private, load_public
from capsule.bundle.trust import TrustPolicy
from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.errors import CapsuleError
from capsule.study.study_bundle import CLAIMS, GUIDE, LOCK, MEMBER, open_study, pack_study
from capsule.study.tables import tables_of
from tests.study.studies import BASE, CLAIMED, make_claims, make_lock, make_results


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    generate(folder / "alice")
    return load_private(folder / "alice"), load_public(folder / "alice.pub")


@pytest.fixture(scope="module")
def results():
    return make_results()


@pytest.fixture(scope="module")
def packed(results, keys, tmp_path_factory):
    return pack_study(results, keys[0], tmp_path_factory.mktemp("study"))


def reading(path, keys):
    return open_study(path, TrustPolicy.of([keys[1]]))


@pytest.mark.slow
def test_it_gives_back_what_was_packed(packed, results, keys):
    path, bundle = packed
    assert path.name == f"tiny-{bundle.claim_id[:8]}.capsule-study.tar"
    with reading(path, keys) as (opened, found):
        assert opened.authentic
        assert opened.claim_id == found.claim_id == bundle.claim_id
        assert found.claims.tables == tables_of(results)
        assert [member.claims for member in found.results.members] == [
            member.claims for member in results.members
        ]


def test_equal_results_give_equal_bytes(packed, results, keys, tmp_path):
    again, _ = pack_study(results, keys[0], tmp_path)
    assert again.read_bytes() == packed[0].read_bytes()


def test_the_file_may_be_named(packed, results, keys, tmp_path):
    wanted = tmp_path / "folder" / "mine.tar"
    path, bundle = pack_study(results, keys[0], wanted)
    assert path == wanted
    with reading(path, keys) as (opened, _):
        assert opened.claim_id == bundle.claim_id == packed[1].claim_id


@pytest.mark.parametrize(
    ("runs", "image", "shown"),
    [(2, CLAIMED, "2\n"), (4, None, "3 --engine process\n")],
)
def test_its_guide_has_a_command_that_runs_members_again(keys, tmp_path, runs, image, shown):
    results = make_results(make_lock({"a": {"runs": runs}}), image=image)
    path, _ = pack_study(results, keys[0], tmp_path / "my study.tar")
    with open_bundle(path, (), kind="study") as opened:
        guide = opened.content(GUIDE).decode()
    assert f"capsule study verify 'my study.tar' --key KEY.pub --sample {shown}" in guide


def test_its_guide_names_the_bundles_that_members_need(keys, tmp_path):
    own = {"suite": "gymnasium", "id": "mine/Catch-v0", "modules": ["catch"]}
    base = BASE | {"code": {"path": "."}, "environment": own}
    results = make_results(make_lock({"a": {"runs": 1}}, base=base), image=CLAIMED)
    path, _ = pack_study(results, keys[0], tmp_path)
    with open_bundle(path, (), kind="study") as opened:
        guide = opened.content(GUIDE).decode()
    assert "\n    # Run 1 member again, too; FOLDER has the bundles of the members.\n" in guide
    assert " --key KEY.pub --sample 1 --members FOLDER\n" in guide


def test_it_is_small(packed):
    assert packed[0].stat().st_size < 200_000


def test_its_statement_says_that_it_is_of_a_study(packed, keys):
    with open_bundle(packed[0], [keys[1]], kind="study") as opened:
        assert opened.manifest.kind == "study"
    with pytest.raises(CapsuleError) as refused:
        open_bundle(packed[0], [keys[1]])
    assert refused.value.code == "CAP-B146"
    assert "capsule study verify" in refused.value.fix


def test_a_study_without_all_results_is_not_bundled(keys, tmp_path):
    with pytest.raises(CapsuleError) as refused:
        pack_study(make_results(missing=("exploration.2",)), keys[0], tmp_path)
    assert refused.value.code == "CAP-Y017"
    assert refused.value.message == (
        "1 of 9 members of study tiny has no results; the first is exploration.2"
    )
    assert list(tmp_path.iterdir()) == []


def forged(packed, keys, folder, change):
    """Sign a bundle whose files a signer has changed."""
    with open_bundle(packed[0], [keys[1]], kind="study") as opened:
        files = {
            file.path: [opened.content(file.path), file.role, file.media_type]
            for file in opened.manifest.files
        }
    change(files)
    contents = {path: Content(*facts) for path, facts in files.items()}
    (claim_id,) = (sha256_hex(data) for data, role, _ in files.values() if role == "claims")
    return pack(contents, claim_id, keys[0], folder / "forged.capsule-study.tar", kind="study")


def edited(files, path, edit):
    document = json.loads(files[path][0])
    edit(document)
    files[path][0] = canonical_json(document)


def better_mean(files):
    edited(files, CLAIMS, lambda claims: claims["tables"]["groups"][0].update(mean=99.0))


def smaller_p_value(files):
    edited(files, CLAIMS, lambda claims: claims["tables"]["variances"][0].update(p_value=0.001))


def lost_row(files):
    edited(files, CLAIMS, lambda claims: claims["tables"]["groups"].pop())


def lost_member(files):
    edited(files, CLAIMS, lambda claims: claims["members"].pop())


def another_order(files):
    edited(files, CLAIMS, lambda claims: claims["members"].reverse())


def another_lock(files):
    edited(files, CLAIMS, lambda claims: claims.update(lock="1" * 64))


def better_claims(files):
    """Replace what one member claims, and the claim id that names it."""
    path = MEMBER.format(name="exploration.2")
    lock = json.loads(files[path][0])["lock"]
    claims = make_claims(lock, (0, 1000, 1000))
    files[path][0] = claims.document()
    edited(files, CLAIMS, lambda found: found["members"][4].update(claim_id=claims.claim_id()))


def swapped_claims(files):
    """Put the results of one member in the place of another one's."""
    one, other = (MEMBER.format(name=name) for name in ("exploration.1", "exploration.2"))
    files[one][0] = files[other][0]

    def rename(claims):
        claims["members"][3]["claim_id"] = claims["members"][4]["claim_id"]

    edited(files, CLAIMS, rename)


def unnamed_claims(files):
    path = MEMBER.format(name="exploration.2")
    files[path][0] = make_claims(json.loads(files[path][0])["lock"], (1, 2, 3)).document()


def surplus_file(files):
    files["members/other.json"] = [b"{}", "run", "application/json"]


def lost_guide(files):
    del files[GUIDE]


def other_role(files):
    files[LOCK][1] = "log"


def other_type(files):
    files[MEMBER.format(name="exploration.1")][2] = "image/png"


def claims_of_a_member(files):
    """Have the manifest state the claim id of a member as the one of the study."""
    files[CLAIMS][1], files[MEMBER.format(name="exploration.1")][1] = "run", "claims"


def renamed_group(files):
    edited(files, LOCK, lambda lock: lock["study"]["groups"].pop("exploration"))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (better_mean, "CAP-Y018"),
        (smaller_p_value, "CAP-Y018"),
        (lost_row, "CAP-Y018"),
        (lost_member, "CAP-Y018"),
        (another_order, "CAP-Y018"),
        (another_lock, "CAP-Y018"),
        (better_claims, "CAP-Y018"),
        (unnamed_claims, "CAP-Y018"),
        (surplus_file, "CAP-Y018"),
        (lost_guide, "CAP-Y018"),
        (other_role, "CAP-Y018"),
        (other_type, "CAP-Y018"),
        (claims_of_a_member, "CAP-Y018"),
        (swapped_claims, "CAP-Y015"),
        (renamed_group, "CAP-B144"),
    ],
)
def test_a_bundle_that_contradicts_itself_is_refused_though_it_is_signed(
    packed, keys, tmp_path, change, code
):
    path = forged(packed, keys, tmp_path, change)
    with pytest.raises(CapsuleError) as refused, reading(path, keys):
        pass
    assert refused.value.code == code
    assert refused.value.exit_code == 3


def test_a_changed_byte_is_found(packed, keys, tmp_path):
    path = tmp_path / "changed.capsule-study.tar"
    data = bytearray(packed[0].read_bytes())
    data[data.index(b'"mean":') + 8] ^= 1
    path.write_bytes(data)
    with pytest.raises(CapsuleError) as refused, reading(path, keys):
        pass
    assert refused.value.exit_code == 3
